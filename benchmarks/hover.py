"""A task with MultiDiscrete actions, for ``first_contact.py``."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, MultiDiscrete


class Hover(gymnasium.Env[Any, Any]):
    """Hold a point mass at the origin of a plane with one thruster per axis: −1, 0 or 1.

    An episode has 50 steps; the reward is minus the mean distance of the two axes. A controller
    that knows the physics (thrust against position + 1.5 velocity) gets −2.1, a random one −86.
    """

    observation_space = Box(-np.inf, np.inf, (4,), np.float32)
    action_space = MultiDiscrete([3, 3])

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.time, self.velocity = 0, np.zeros(2)
        self.position = self.np_random.uniform(-1, 1, 2)
        return self._observe(), {}

    def step(self, action: Any) -> Any:
        self.time += 1
        self.velocity = 0.95 * self.velocity + 0.05 * (np.asarray(action) - 1)
        self.position = self.position + self.velocity
        reward = -float(np.abs(self.position).mean())
        return self._observe(), reward, False, self.time == 50, {}

    def _observe(self) -> Any:
        return np.concatenate((self.position, self.velocity)).astype(np.float32)
