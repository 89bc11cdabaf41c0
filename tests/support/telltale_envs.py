"""Environments whose every picture tells what was done before it."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

SIDE = 40
ACTIONS = 5


class TelltaleEnv(gymnasium.Env[Any, Any]):
    """The first pixels hold: step of the episode, last action, last reward + 1, length to come.

    Episodes end after 5 to 90 steps; rewards depend on step and action.
    """

    observation_space = gymnasium.spaces.Box(0, 255, (SIDE, SIDE), np.uint8)
    action_space = gymnasium.spaces.Discrete(ACTIONS)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.uint8], dict[str, Any]]:
        super().reset(seed=seed)
        self.at, self.length = 0, int(self.np_random.integers(5, 90))
        return self._picture(0, 0.0), {}

    def step(self, action: Any) -> tuple[NDArray[np.uint8], float, bool, bool, dict[str, Any]]:
        reward = float((3 * self.at + int(action)) % 3 - 1)
        self.at += 1
        return self._picture(int(action), reward), reward, self.at >= self.length, False, {}

    def _picture(self, action: int, reward: float) -> NDArray[np.uint8]:
        picture = np.full((SIDE, SIDE), 7 * self.at % 256, np.uint8)
        picture[0, :4] = (self.at, action, int(reward) + 1, self.length)
        return picture
