"""Tasks small enough to be learnt in seconds, and hard enough that luck does not solve them."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete


class Bandit(gymnasium.Env[Any, Any]):
    """One step: the observation says which of three actions pays."""

    observation_space = Box(0, 1, (3,), np.float32)
    action_space = Discrete(3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed, options=options)
        self.right = int(self.np_random.integers(3))
        return np.eye(3, dtype=np.float32)[self.right], {}

    def step(self, action: Any) -> Any:
        return np.zeros(3, np.float32), float(action == self.right), True, False, {}


class Corridor(gymnasium.Env[Any, Any]):
    """Five cells, started in the middle. The left end pays 0.3 at once, the right end 1.

    Greed for the near reward gives 0.3; the optimal policy always goes right. The right end is one
    cell farther away.
    """

    CELLS = 5
    observation_space = Box(0, 1, (CELLS,), np.float32)
    action_space = Discrete(2)

    def _obs(self) -> Any:
        return np.eye(self.CELLS, dtype=np.float32)[self.cell]

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed, options=options)
        self.cell = 1
        return self._obs(), {}

    def step(self, action: Any) -> Any:
        self.cell += 2 * int(action) - 1
        over = self.cell in (0, self.CELLS - 1)
        reward = {0: 0.3, self.CELLS - 1: 1.0}.get(self.cell, 0.0)
        return self._obs(), reward, over, False, {}


class Drift(gymnasium.Env[Any, Any]):
    """A dot on a ring of pixels drifts left or right; the action must name the direction.

    One frame does not tell it, two do. Episodes never terminate: they are truncated.
    """

    WIDTH, LENGTH = 5, 6
    observation_space = Box(0, 255, (2, WIDTH), np.uint8)
    action_space = Discrete(2)

    def _obs(self) -> Any:
        frame = np.zeros((2, self.WIDTH), np.uint8)
        frame[:, self.place] = 255
        return frame

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed, options=options)
        self.place, self.direction = (int(x) for x in self.np_random.integers((self.WIDTH, 2)))
        self.time = 0
        return self._obs(), {}

    def step(self, action: Any) -> Any:
        # Nothing can be known on the first frame, so nothing is paid for it.
        reward = float(action == self.direction and self.time > 0)
        self.time += 1
        self.place = (self.place + 2 * self.direction - 1) % self.WIDTH
        return self._obs(), reward, False, self.time >= self.LENGTH, {}
