"""Environments that go wrong on cue, and the small run that the fault tests send into them."""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete

from support.configs import tiny_fields

TINY = tiny_fields(
    steps=600,
    learning_starts=40,
    train_freq=4,
    batch_size=8,
    buffer_size=1000,
    target_update_interval=50,
)


def faulty(fault: str, **kwargs: Any) -> dict[str, Any]:
    """Arguments of qfleet.train for a FaultyEnv."""
    env_kwargs = json.dumps({"fault": fault, **kwargs})
    return {"env": "support.faulty_envs:FaultyEnv", "env_kwargs": env_kwargs, **TINY}


def result_of(folder: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result


class FaultyEnv(gymnasium.Env[Any, Any]):
    """Ten calm steps an episode; in every step whose number ``every`` divides, ``fault`` strikes.

    Steps are counted over all episodes, and only from step ``after`` on.
    """

    observation_space = Box(-np.inf, np.inf, (2,), np.float32)
    action_space = Discrete(2)

    def __init__(self, fault: str = "", every: int = 1, after: int = 0, folder: str = "") -> None:
        self.fault, self.every, self.after, self.folder = fault, every, after, folder
        self.steps = self.time = 0

    def _obs(self) -> Any:
        return np.array([self.time / 10, 1.0], dtype=np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed, options=options)
        if self.fault == "reset":
            raise RuntimeError("the simulator has no licence")
        self.time = 0
        return self._obs(), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        self.time += 1
        obs, reward = self._obs(), float(action)
        if self.steps > self.after and self.steps % self.every == 0:
            if self.fault == "crash":
                raise ValueError("boom")
            if self.fault == "chdir":
                os.chdir(self.folder)
            if self.fault == "nan_reward":
                reward = float("nan")
            if self.fault == "huge_reward":
                reward = 1e12
            if self.fault == "large_reward":
                reward = 1e39
            if self.fault == "nan_obs":
                obs = np.array([np.nan, 0.0], dtype=np.float32)
            if self.fault == "shape":
                obs = np.zeros(5, dtype=np.float32)
        return obs, reward, False, self.time >= 10, {}


class ChainEnv(gymnasium.Env[Any, Any]):
    """Three cells in a row. Action 0 stays (reward 0.2), 1 goes right; the last exit pays 1."""

    CELLS = 3
    observation_space = Discrete(CELLS)
    action_space = Discrete(2)

    def __init__(self) -> None:
        self.cell = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed, options=options)
        self.cell = 0
        return self.cell, {}

    def step(self, action: Any) -> Any:
        if action == 0:
            return self.cell, 0.2, False, False, {}
        if self.cell == self.CELLS - 1:
            return self.cell, 1.0, True, False, {}
        self.cell += 1
        return self.cell, 0.0, False, False, {}


class RudeEnv(FaultyEnv):
    """Calls sys.exit, raises KeyboardInterrupt, hangs or leaves a thread ``where`` it is told to.

    In "step": in step number ``at`` of its life. In "reset" and "constructor": only the first of a
    process, if ``once``.
    """

    met = False

    def __init__(
        self, how: str, where: str, at: int = 90, once: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.how, self.where, self.at, self.once = how, where, at, once
        self._act("constructor")

    def _act(self, where: str) -> None:
        if where != self.where or (self.once and RudeEnv.met):
            return
        RudeEnv.met = True
        if self.how == "exit":
            sys.exit("the simulator says goodbye")
        if self.how == "interrupt":
            raise KeyboardInterrupt
        if self.how == "signal":  # Ctrl-C of the user at this moment
            os.kill(os.getpid(), signal.SIGINT)
        if self.how == "thread":
            threading.Thread(target=time.sleep, args=(3600,)).start()
            atexit.register(print, "atexit functions were called")
        if self.how == "hang":
            Path("hanging").touch()
            time.sleep(3600)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self._act("reset")
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> Any:
        if self.steps + 1 == self.at:
            self._act("step")
        return super().step(action)

    def close(self) -> None:
        self._act("close")


def rude(how: str, where: str, **kwargs: Any) -> dict[str, Any]:
    """Arguments of qfleet.train for a RudeEnv."""
    env_kwargs = json.dumps({"how": how, "where": where, **kwargs})
    return {"env": "support.faulty_envs:RudeEnv", "env_kwargs": env_kwargs, **TINY}
