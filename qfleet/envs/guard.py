"""Fault handling of a single environment.

A step takes an action, writes the observation into a given row (always finite and of the spec's
shape) and returns an ``Outcome``. Faults are detected, reported and handled here:

=====================================  =========================================================
reward NaN or infinite, as float32     row invalid, reward 0, the episode continues
observation NaN or infinite            row invalid, reset at once
``step`` raises                        row invalid, environment rebuilt and reset
``reset`` or the constructor raises    environment rebuilt, retry
``close`` raises or hangs              it is abandoned
another shape or dtype of observation  EnvironmentFault
reward that is text                    EnvironmentFault
=====================================  =========================================================

More than ``max_restarts`` failures without a completed step in between raise EnvironmentFault.
SystemExit and KeyboardInterrupt are errors like others, unless they are a signal's.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from qfleet.core.errors import EnvironmentFault, UserError, one_line
from qfleet.core.seeding import mix_seeds
from qfleet.core.signals import FOREIGN_ERRORS, raise_if_signal
from qfleet.core.types import EnvSpec, StateDict
from qfleet.envs.closing import CLOSE_S, close_env
from qfleet.envs.foreign import check_interface
from qfleet.envs.spaces import AnyEnv, check_array
from qfleet.envs.state import load_env, save_env
from qfleet.storage.state_checks import check_like

OnFault: TypeAlias = Callable[[str, str], None]
"""Called for every fault with its kind (env_reward, env_observation, env_crash, env_reset,
env_close) and a message."""

FLOAT32_MAX = float(np.finfo(np.float32).max)
"""Rewards are stored as float32, in which a larger one is infinite."""


class Outcome(NamedTuple):
    """The result of a step without its observation; the fields are those of ``core.Step``."""

    reward: float
    terminated: bool
    truncated: bool
    invalid: bool
    fresh: bool


_RESTARTED = Outcome(0.0, terminated=False, truncated=False, invalid=True, fresh=True)


def all_finite(array: NDArray[Any]) -> bool:
    """Return whether all entries are finite.

    A dot product costs half as much as isfinite().all(). NaN and Inf always propagate into it; only
    if very large finite numbers overflow it is the full check needed.
    """
    return math.isfinite(np.vdot(array, array)) or bool(np.isfinite(array).all())


class GuardedEnv:
    """Environment number ``index`` of a pool, with fault handling and next-step autoreset."""

    def __init__(
        self,
        make: Callable[[], AnyEnv],
        spec: EnvSpec,
        *,
        index: int,
        seed: int,
        max_restarts: int,
        on_fault: OnFault,
        env: AnyEnv | None = None,
    ) -> None:
        """Create a guard. ``env`` is an existing environment, or None to make it on demand."""
        self._make = make
        self._env = env
        self._env_id, self._name = spec.env_id, f"env {index} of '{spec.env_id}'"
        self._seed = seed
        self._max_restarts = max_restarts
        self._on_fault = on_fault
        self._shape = spec.obs_shape
        self._dtype = np.dtype(spec.obs_dtype)
        self._num_obs_values = spec.num_obs_values
        self._is_masked = spec.is_masked
        self._is_float = self._dtype.kind == "f"
        self._next_seed: int | None = seed
        self._is_over = False
        self._steps = 0
        self._failures = 0
        self._rebuilds = 0

    def start(self, row: NDArray[Any]) -> None:
        """Reset the environment to its seed: start its first episode."""
        self._next_seed = self._seed
        self._rebuilds = 0
        self.reset(row)

    def step(self, action: int, row: NDArray[Any]) -> Outcome:
        if self._is_over:
            self.reset(row)
            return _RESTARTED
        self._steps += 1
        assert self._env is not None
        try:
            obs, raw_reward, terminated, truncated, _ = self._env.step(action)
            if isinstance(raw_reward, (str, bytes, np.ndarray)):
                raw_reward = self._number(raw_reward)
            reward = float(raw_reward)
            is_terminated, is_truncated = bool(terminated), bool(truncated)
        except EnvironmentFault:
            raise
        except FOREIGN_ERRORS as error:
            raise_if_signal(error)
            check_interface(self._env_id, self._env, error)
            self._discard()
            self._fail("env_crash", f"crashed in its step {self._steps}: {one_line(error)}")
            self.reset(row)
            return _RESTARTED
        if not self._store(obs, row):
            self._report("env_observation", f"observed NaN or Inf in its step {self._steps}")
            self.reset(row)
            return _RESTARTED
        self._failures = 0
        self._is_over = is_terminated or is_truncated
        if -FLOAT32_MAX <= reward <= FLOAT32_MAX:  # False for NaN
            return Outcome(reward, is_terminated, is_truncated, False, False)
        self._report("env_reward", f"gave reward {reward} in its step {self._steps}")
        return Outcome(0.0, is_terminated, is_truncated, True, False)

    def reset(self, row: NDArray[Any]) -> None:
        """Start the next episode, with retries up to the limit."""
        self._is_over = False
        while True:
            try:
                env = self._built()
                obs, _ = env.reset(seed=self._next_seed)
            except (EnvironmentFault, UserError):
                raise
            except FOREIGN_ERRORS as error:
                raise_if_signal(error)
                self._discard()
                self._fail("env_reset", f"failed to reset: {one_line(error)}")
                continue
            # A retry with the same seed would only repeat a non-finite first observation.
            self._next_seed = None
            if self._store(obs, row):
                return
            self._fail("env_observation", "observed NaN or Inf in its reset")

    def _built(self) -> AnyEnv:
        if self._env is None:
            try:
                self._env = self._make()
            except EnvironmentFault as error:
                # Not raised as EnvironmentFault: a failed start counts as a failure and is retried.
                raise RuntimeError(str(error)) from error
        return self._env

    def _discard(self) -> None:
        """Close a failed environment; the next reset builds a new one, with a new seed."""
        self.close()
        self._rebuilds += 1
        # The old seed would replay the same failure.
        self._next_seed = mix_seeds(self._seed, self._rebuilds)

    def _number(self, reward: Any) -> float:
        """Return a reward as a float, or raise EnvironmentFault if it is text."""
        if isinstance(reward, np.ndarray):  # NumPy 2.4 itself converts none that has axes
            reward = reward.item()
        if isinstance(reward, (str, bytes)):  # float() would accept them
            raise EnvironmentFault(
                f"{self._name} gave reward {reward!r} of type {type(reward).__name__} in its step "
                f"{self._steps}; return a number"
            )
        return float(reward)

    def _store(self, obs: Any, row: NDArray[Any]) -> bool:
        """Write the observation into the row and return whether it is finite."""
        if self._num_obs_values:
            self._store_discrete(obs, row)
            return True
        if type(obs) is not np.ndarray or obs.dtype != self._dtype or obs.shape != self._shape:
            obs = np.asarray(obs)
            check_array(self._name, obs, self._shape, self._dtype)
        row[...] = obs
        return not self._is_float or all_finite(row)

    def _store_discrete(self, obs: Any, row: NDArray[Any]) -> None:
        try:
            value = operator.index(obs[0] if self._is_masked else obs)
        except TypeError:
            value = -1
        if not 0 <= value < self._num_obs_values:
            raise EnvironmentFault(
                f"{self._name} changed its observation: expected an integer from 0 to "
                f"{self._num_obs_values - 1}, got {obs!r}; fix the environment or its "
                "observation_space"
            )
        row[...] = obs if self._is_masked else value

    def _report(self, kind: str, what: str) -> None:
        self._on_fault(kind, f"{self._name} {what}")

    def _fail(self, kind: str, what: str) -> None:
        self._failures += 1
        self._report(kind, what)
        if self._failures > self._max_restarts:
            raise EnvironmentFault(
                f"{self._name} {what} (failure {self._failures} in a row, more than "
                f"max_env_restarts {self._max_restarts}); fix it or raise max_env_restarts"
            )

    def state_dict(self) -> StateDict | None:
        if self._env is None:
            return None
        env_state = save_env(self._env)
        if env_state is None:
            return None
        return {
            "env": env_state,
            "is_over": self._is_over,
            "steps": self._steps,
            "failures": self._failures,
            "rebuilds": self._rebuilds,
        }

    def load_state_dict(self, state: StateDict) -> None:
        load_env(self._built(), state["env"])
        self._next_seed = None
        counts = {name: state[name] for name in ("is_over", "steps", "failures", "rebuilds")}
        check_like(counts, {"is_over": False, "steps": 0, "failures": 0, "rebuilds": 0}, self._name)
        self._is_over, self._steps, self._failures, self._rebuilds = counts.values()

    def close(self, timeout_s: float = CLOSE_S) -> None:
        env, self._env = self._env, None
        # An environment that has crashed may crash again in close(); it is discarded anyway.
        if env is not None and (problem := close_env(env, timeout_s)):
            self._report("env_close", problem)
