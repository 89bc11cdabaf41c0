"""N environments, each in a process of its own: for slow ones, and for ones that may crash hard.

Actions go in, a ``core.Step`` comes out. Every environment is guarded inside its worker, and what
the guard reports comes back in the info of Gymnasium's AsyncVectorEnv. Every wait has a deadline,
and ``close`` leaves no worker behind. Workers come from a fork server: forking this process, with
its threads and perhaps a GPU, is unsafe, and importing everything anew for each of them is slow.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import signal
import time
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AsyncVectorEnv, AutoresetMode
from numpy.typing import NDArray

from qfleet.config import Config
from qfleet.core import EnvSpec, StateDict, Step
from qfleet.envs.guard import GuardedEnv, OnFault
from qfleet.envs.registry import make_single, single_spec
from qfleet.envs.seeding import env_seeds
from qfleet.errors import CheckpointError, EnvironmentFault, QfleetError

_INVALID, _FRESH, _FAULTS, _FATAL = (
    f"qfleet_{name}" for name in ("invalid", "fresh", "faults", "fatal")
)
_CLOSE_S = 5.0
"""How long workers may take to close their environments before they are killed."""


@dataclass(frozen=True)
class WorkerFactory:
    """Makes the guarded environment of one worker, inside that worker."""

    config: Config
    spec: EnvSpec
    index: int
    seed: int
    parent_pid: int

    def __call__(self) -> WorkerEnv:
        if os.getpid() != self.parent_pid:
            # Ctrl-C reaches the whole process group; the parent alone decides when to stop.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        return WorkerEnv(self)


class WorkerEnv(gymnasium.Env[Any, Any]):
    """A guarded environment as AsyncVectorEnv wants it; faults leave it through ``info``."""

    def __init__(self, factory: WorkerFactory) -> None:
        spec = factory.spec
        if spec.num_obs_values:
            self.observation_space = Discrete(spec.num_obs_values)
        elif spec.obs_dtype == "uint8":
            self.observation_space = Box(0, 255, spec.obs_shape, np.uint8)
        else:
            self.observation_space = Box(-np.inf, np.inf, spec.obs_shape, np.float32)
        self.action_space = Discrete(spec.num_actions)
        self._faults: list[tuple[str, str]] = []
        self._row: NDArray[Any] = np.zeros(spec.obs_shape, dtype=spec.obs_dtype)
        self._guard = GuardedEnv(
            functools.partial(make_single, factory.config),
            spec,
            index=factory.index,
            seed=factory.seed,
            max_restarts=factory.config.max_env_restarts,
            on_fault=lambda kind, message: self._faults.append((kind, message)),
        )

    def reset(
        self,
        *,
        seed: int | None = None,
        options: dict[str, Any] | None = None,  # noqa: ARG002 (Gymnasium's signature)
    ) -> tuple[NDArray[Any], dict[str, Any]]:
        info: dict[str, Any] = {}
        try:
            if seed is None:
                self._guard.reset(self._row)
            else:
                self._guard.start(self._row)
        except QfleetError as error:
            info[_FATAL] = str(error)
        return self._row, self._with_faults(info)

    def step(self, action: Any) -> tuple[NDArray[Any], float, bool, bool, dict[str, Any]]:
        try:
            outcome = self._guard.step(int(action), self._row)
        except QfleetError as error:
            return self._row, 0.0, False, False, self._with_faults({_FATAL: str(error)})
        info = {
            name: True
            for name, is_set in zip((_INVALID, _FRESH), outcome[3:], strict=True)
            if is_set
        }
        return self._row, *outcome[:3], self._with_faults(info)

    def _with_faults(self, info: dict[str, Any]) -> dict[str, Any]:
        if self._faults:
            info[_FAULTS] = json.dumps(self._faults)
            self._faults.clear()
        return info

    def close(self) -> None:
        self._guard.close()


class ProcessEnvs:
    """A ``core.VectorEnv``."""

    spec: EnvSpec
    num_envs: int
    seeds: list[int]

    def __init__(self, config: Config, num_envs: int, seed: int, on_fault: OnFault) -> None:
        probe = make_single(config)
        self.spec = single_spec(config, probe)
        probe.close()
        self.num_envs = num_envs
        self.seeds = env_seeds(seed, num_envs)
        self._on_fault = on_fault
        self._timeout_s = config.env_timeout_s
        self._is_over = np.zeros(num_envs, dtype=np.bool_)
        context = "spawn"
        if "forkserver" in multiprocessing.get_all_start_methods():
            context = "forkserver"
            multiprocessing.get_context(context).set_forkserver_preload(["__main__", __name__])
        self._envs: AsyncVectorEnv[Any, Any] = AsyncVectorEnv(
            [
                WorkerFactory(config, self.spec, index, env_seed, os.getpid())
                for index, env_seed in enumerate(self.seeds)
            ],
            context=context,
            autoreset_mode=AutoresetMode.NEXT_STEP,
        )

    def reset(self) -> NDArray[Any]:
        """Start all envs anew from their seeds: two resets give the same episodes."""
        try:
            self._envs.reset_async(seed=list(self.seeds))
            obs, info = self._envs.reset_wait(self._timeout_s)
        except (multiprocessing.TimeoutError, EOFError, OSError) as error:
            raise self._lost("reset", error) from error
        self._is_over = np.zeros(self.num_envs, dtype=np.bool_)
        self._report(info)
        return np.asarray(obs)

    def step(self, actions: NDArray[np.int64]) -> Step:
        try:
            self._envs.step_async(actions)
            obs, reward, terminated, truncated, info = self._envs.step_wait(self._timeout_s)
        except (multiprocessing.TimeoutError, EOFError, OSError) as error:
            raise self._lost("step", error) from error
        self._report(info)
        opened = self._is_over
        self._is_over = terminated | truncated
        invalid = opened | info[_INVALID] if _INVALID in info else opened
        fresh = opened | info[_FRESH] if _FRESH in info else opened
        return Step(obs, reward, terminated, truncated, invalid, fresh)

    def _report(self, info: dict[str, Any]) -> None:
        if _FAULTS in info:
            for faults in info[_FAULTS]:
                for kind, message in json.loads(faults or "[]"):
                    self._on_fault(kind, message)
        if _FATAL in info:
            self.close()
            raise EnvironmentFault(next(message for message in info[_FATAL] if message))

    def _lost(self, call: str, error: Exception) -> EnvironmentFault:
        """End what is left, and say which environment hung or died."""
        name = f"of '{self.spec.env_id}'"
        if isinstance(error, multiprocessing.TimeoutError):
            silent = [
                index for index, pipe in enumerate(self._envs.parent_pipes) if not pipe.poll(0)
            ]
            self._end_workers(grace_s=0.0)
            return EnvironmentFault(
                f"env {_listed(silent)} {name} did not answer a {call} within env_timeout_s "
                f"{self._timeout_s:g}; mend the environment or raise env_timeout_s"
            )
        for process in self._envs.processes:
            process.join(_CLOSE_S / self.num_envs)
            if process.exitcode is not None:
                break
        dead = {
            index: process.exitcode
            for index, process in enumerate(self._envs.processes)
            if process.exitcode is not None
        }
        self.close()
        codes = sorted({str(code) for code in dead.values()})
        return EnvironmentFault(
            f"the process of env {_listed(list(dead))} {name} died in a {call} (exit code "
            f"{', '.join(codes) or 'unknown'}); run it with --vectorize sync to see why"
        )

    def state_dict(self) -> StateDict | None:
        """None: the state is in other processes, and AsyncVectorEnv does not bring it back."""
        return None

    def load_state_dict(self, state: StateDict) -> None:
        raise CheckpointError(
            f"environments in processes cannot be resumed from a state ({len(state)} entries)"
        )

    def close(self) -> None:
        """Let the workers close their environments, and kill those that take too long."""
        self._end_workers(_CLOSE_S)

    def _end_workers(self, grace_s: float) -> None:
        # Not AsyncVectorEnv.close: it waits without a deadline, and trips over dead workers.
        if self._envs.closed:
            return
        self._envs.closed = True
        for pipe in self._envs.parent_pipes:
            try:
                pipe.send(("close", None))
            except (OSError, AttributeError):
                continue  # its worker is gone, or Gymnasium has already dropped the pipe
        deadline_s = time.monotonic() + grace_s
        for process in self._envs.processes:
            process.join(max(0.0, deadline_s - time.monotonic()))
        for process in self._envs.processes:
            if process.is_alive():
                process.kill()
                process.join(_CLOSE_S)
        self._envs.error_queue.cancel_join_thread()
        self._envs.error_queue.close()
        for pipe in self._envs.parent_pipes:
            if pipe is not None:
                pipe.close()


def _listed(indices: list[int]) -> str:
    return ", ".join(map(str, indices)) or "?"
