"""Environments with unusual habits, for tests/training/test_run_habits.py."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete


class Offset(gymnasium.Env[Any, Any]):
    """Observations 3 … 7 and actions 7, 8; action 8 is right."""

    observation_space = Discrete(5, start=3)
    action_space = Discrete(2, start=7)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[int, dict[str, Any]]:
        super().reset(seed=seed)
        self._steps = 0
        return 3 + int(self.np_random.integers(5)), {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        assert action in (7, 8)
        self._steps += 1
        obs = 3 + int(self.np_random.integers(5))
        return obs, float(action == 8), self._steps >= 5, False, {}


class Chatty(Offset):
    """Prints to standard output."""

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        print("chat")
        return super().step(action)


class Endless(Offset):
    """Never ends an episode."""

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        obs, reward, _, _, info = super().step(action)
        return obs, reward, False, False, info


class Colour(gymnasium.Env[Any, Any]):
    """Small colour pictures."""

    observation_space = Box(0, 255, (40, 40, 3), np.uint8)
    action_space = Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._steps = 0
        return self.observation_space.sample(), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._steps += 1
        return self.observation_space.sample(), 1.0, self._steps >= 8, False, {}
