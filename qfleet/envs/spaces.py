"""The supported spaces, and the canonical form of observations and actions.

In: a Gymnasium environment. Out: an environment whose observations are float32 or uint8 arrays or
integers from 0 and whose actions are integers from 0, and its ``EnvSpec``.
"""

from __future__ import annotations

import operator
from typing import Any, SupportsFloat

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete, Space
from numpy.typing import NDArray

from qfleet.core.errors import EnvironmentFault, UnsupportedEnvError
from qfleet.core.types import EnvSpec

AnyEnv = gymnasium.Env[Any, Any]


def describe(
    env_id: str,
    observation_space: Space[Any],
    action_space: Space[Any],
    *,
    frame_stack: int = 1,
    frame_skip: int = 1,
) -> EnvSpec:
    """Return the spec of these spaces, or raise UnsupportedEnvError."""
    if not isinstance(action_space, Discrete):
        raise _unsupported(env_id, f"action space {action_space}")
    num_actions, first_action = int(action_space.n), int(action_space.start)
    if isinstance(observation_space, Discrete):
        return EnvSpec(
            env_id,
            (),
            "int64",
            num_actions,
            num_obs_values=int(observation_space.n),
            first_obs_value=int(observation_space.start),
            first_action=first_action,
        )
    if not isinstance(observation_space, Box) or not observation_space.shape:
        raise _unsupported(env_id, f"observation space {observation_space}")
    dtype = "uint8" if observation_space.dtype == np.uint8 else "float32"
    shape = tuple(int(size) for size in observation_space.shape)
    return EnvSpec(
        env_id, shape, dtype, num_actions, frame_stack, frame_skip, first_action=first_action
    )


def _unsupported(env_id: str, what: str) -> UnsupportedEnvError:
    return UnsupportedEnvError(
        f"environment '{env_id}' has {what}; supported are Discrete actions with "
        "Box (not of shape ()) or Discrete observations: wrap it to fit"
    )


def check_array(name: str, obs: NDArray[Any], shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    """Raise EnvironmentFault unless ``obs`` has this shape and a dtype of the same kind.

    Other widths of floats and integers are accepted, but only uint8 for uint8, because a cast would
    wrap around.
    """
    if dtype == np.uint8:
        same_kind = obs.dtype == np.uint8
    else:
        same_kind = _KIND.get(obs.dtype.kind) == _KIND[dtype.kind]
    if obs.shape != shape or not same_kind:
        raise EnvironmentFault(
            f"{name} changed its observation: expected {shape} {dtype}, got {obs.shape} {obs.dtype}"
            "; fix the environment or its observation_space"
        )


_KIND = {"f": "float", "i": "integer", "u": "integer", "b": "bool"}


class Canonical(gymnasium.Wrapper[Any, Any, Any, Any]):
    """A wrapper that casts observations to float32 or uint8; discrete values start from 0.

    It returns a copy, because frame stacks keep references and an environment may reuse its array.
    """

    def __init__(self, env: AnyEnv, spec: EnvSpec) -> None:
        super().__init__(env)
        self.first_action, self.first_value = spec.first_action, spec.first_obs_value
        self.action_space = Discrete(spec.num_actions)
        self._name = f"environment '{spec.env_id}'"
        self._shape = spec.obs_shape
        self._dtype = np.dtype(spec.obs_dtype)
        self._declared_dtype = np.dtype(env.observation_space.dtype)
        self._is_discrete = spec.num_obs_values > 0
        if self._is_discrete:
            self.observation_space = Discrete(spec.num_obs_values)
        elif self._declared_dtype != self._dtype:
            self.observation_space = Box(-np.inf, np.inf, self._shape, np.float32)

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = self.env.step(action + self.first_action)
        return self._convert(obs), reward, terminated, truncated, info

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        obs, info = self.env.reset(seed=seed, options=options)
        return self._convert(obs), info

    def _convert(self, obs: Any) -> Any:
        if self._is_discrete:
            return operator.index(obs) - self.first_value
        raw = np.asarray(obs)
        # Checked here and not only by the guard: for a changed shape, a frame stack around this
        # wrapper would raise an error that does not name the environment.
        check_array(self._name, raw, self._shape, self._declared_dtype)
        # A huge float64 may become infinite here; the guard detects it.
        with np.errstate(over="ignore"):
            return raw.astype(self._dtype)


def canonical(env: AnyEnv, spec: EnvSpec, *, copy: bool) -> AnyEnv:
    """Return ``env`` with canonical spaces, unwrapped if they already are: a wrapper costs time."""
    is_shifted = spec.first_action or spec.first_obs_value
    has_dtype = spec.num_obs_values or env.observation_space.dtype == np.dtype(spec.obs_dtype)
    return env if has_dtype and not is_shifted and not copy else Canonical(env, spec)
