"""Small environments that misbehave on cue, and the helpers that watch them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box, Discrete, MultiDiscrete

from qfleet.config.config import Config


class Faults(list[tuple[str, str]]):
    """An ``OnFault`` that remembers."""

    def __call__(self, kind: str, message: str) -> None:
        self.append((kind, message))

    @property
    def kinds(self) -> list[str]:
        return [kind for kind, _ in self]


def scripted(**changes: Any) -> Config:
    return Config(env="support.scripted_envs:ScriptedEnv").replace(**changes)


def faulty(fault: str, at: int = 1, only_seed: int | None = None, **changes: Any) -> Config:
    kwargs = json.dumps({"fault": fault, "at": at, "only_seed": only_seed})
    return scripted(env_kwargs=kwargs, **changes)


REWARDS: dict[str, Any] = {
    "nan_reward": float("nan"),
    "inf_reward": float("-inf"),
    "large_reward": 1e39,
    "text_reward": "1.0",
    "bytes_reward": b"1.0",
    "array_reward": np.array([1.0]),
    "float32_reward": np.float32(1),
    "tensor_reward": torch.tensor(1.0),
    "bool_reward": True,
}


class ScriptedEnv(gymnasium.Env[Any, Any]):
    """Observes [episode, step in it] and ends every ``length`` steps; ``fault`` strikes ``at``.

    With ``only_seed`` it does so only if the env was reset with that seed and no other since.
    """

    def __init__(
        self, length: int = 4, fault: str = "", at: int = 0, only_seed: int | None = None
    ) -> None:
        self.observation_space = Box(-np.inf, np.inf, (2,), np.float32)
        self.action_space = Discrete(2)
        self.length, self.fault, self.at = length, fault, at
        self.only_seed = self.seed = only_seed
        self.episode = self.time = self.steps = 0
        if fault == "constructor":
            raise RuntimeError("no licence")

    def obs(self) -> Any:
        return np.array([self.episode, self.time], dtype=np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed, options=options)
        if self.only_seed is not None and seed is not None:
            self.seed = seed
        if self.fault == "hang_reset":
            time.sleep(3600)
        if self.fault == "reset":
            raise RuntimeError("cannot reset")
        if self.fault == "nan_reset":
            return np.full(2, np.nan, dtype=np.float32), {}
        self.episode += 1
        self.time = 0
        return self.obs(), {}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action)
        self.steps += 1
        self.time += 1
        obs, reward = self.obs(), 1.0
        if self.steps == self.at and self.seed == self.only_seed:
            if self.fault == "crash":
                raise ValueError("boom")
            if self.fault == "interrupt":
                raise KeyboardInterrupt
            if self.fault == "sys.exit":
                sys.exit(3)
            if self.fault == "hang":
                time.sleep(3600)
            if self.fault == "exit":
                os._exit(7)
            if self.fault == "segv":
                os.kill(os.getpid(), signal.SIGSEGV)
                time.sleep(3600)
            if self.fault == "child":
                # It never ends by itself, and this env forgets it; others learn its pid.
                obs[1] = subprocess.Popen(["sleep", "3600"]).pid
            obs = {
                "shape": np.zeros(5, dtype=np.float32),
                "kind": np.zeros(2, dtype=np.int64),
                "nan_obs": np.array([0, np.nan], dtype=np.float32),
                "huge_obs": np.array([0, 1e300]),
            }.get(self.fault, obs)
            reward = REWARDS.get(self.fault, 1.0)
        return obs, reward, False, self.time >= self.length, {}

    def close(self) -> None:
        if self.fault == "close":
            raise RuntimeError("cannot close")
        if self.fault == "exit_in_close":
            sys.exit(3)
        if self.fault == "hang_in_close":
            time.sleep(3600)


class OffsetEnv(gymnasium.Env[Any, Any]):
    """Discrete observations 5..7 and actions 3..4; observes 5 + the number of the action taken."""

    observation_space = Discrete(3, start=5)
    action_space = Discrete(2, start=3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed, options=options)
        return np.int64(7), {}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action)
        return np.int64(5 + action - 3), 0.0, False, False, {}


class TypedEnv(gymnasium.Env[Any, Any]):
    """A box of any dtype, always in the same array."""

    action_space = Discrete(2)

    def __init__(self, dtype: str = "float64") -> None:
        self.observation_space = Box(0, 1, (3,), np.dtype(dtype).type)
        self.array = np.zeros(3, dtype=dtype)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed, options=options)
        self.array[:] = 1
        return self.array, {}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action)
        self.array[:] = 0
        return self.array, 0.0, False, False, {}


class OddEnv(OffsetEnv):
    """Has a space that the DQN family cannot handle."""

    def __init__(self, what: str = "observation") -> None:
        if what == "observation":
            self.observation_space = gymnasium.spaces.Dict({"a": gymnasium.spaces.Text(3)})
        elif what == "unbounded":
            self.action_space = Box(-np.inf, np.inf, (1,), np.float32)
        else:
            self.action_space = MultiDiscrete([32, 33])


class MemoryEnv(gymnasium.Env[Any, Any]):
    """A user's environment that can be resumed: noise from np_random on top of a counter."""

    observation_space = Box(-np.inf, np.inf, (2,), np.float32)
    action_space = Discrete(2)

    def __init__(self) -> None:
        self.count, self.trace = 0, np.zeros(2)

    def obs(self) -> Any:
        return (self.trace + self.count + self.np_random.random()).astype(np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed, options=options)
        self.count = 0
        return self.obs(), {}

    def step(self, action: Any) -> Any:
        self.count += 1 + action
        self.trace[action] += 0.1
        return self.obs(), float(self.count), self.count > 20, False, {}

    def get_state(self) -> dict[str, Any]:
        return {"count": self.count, "trace": self.trace}

    def set_state(self, state: dict[str, Any]) -> None:
        self.count, self.trace = state["count"], state["trace"]


class NotAnEnv:
    pass
