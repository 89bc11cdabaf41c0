"""An environment that cannot give its state, so that a resume must cut its episode."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete


class StatelessEnv(gymnasium.Env[Any, Any]):
    """Observes [number of the episode, step in it]; truncates every 23 steps."""

    observation_space = Box(-np.inf, np.inf, (2,), np.float32)
    action_space = Discrete(2)

    def __init__(self) -> None:
        self.episode = self.time = 0

    def _obs(self) -> Any:
        return np.array([self.episode, self.time], dtype=np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed, options=options)
        self.episode += 1
        self.time = 0
        return self._obs(), {}

    def step(self, action: Any) -> Any:
        self.time += 1
        return self._obs(), float(action), False, self.time >= 23, {}
