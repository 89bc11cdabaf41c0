"""Tabular Q-learning. NumPy only."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class QTable:
    """A Q-table, updated by Q-learning: Q(s,a) += α [r + γ max Q(s',·) − Q(s,a)] (Watkins 1989)."""

    def __init__(self, num_states: int, num_actions: int, alpha: float, gamma: float) -> None:
        self.alpha = alpha
        self.gamma = gamma
        self.values: NDArray[np.float64] = np.zeros((num_states, num_actions))

    def update(self, s: int, a: int, r: float, s2: int, terminated: bool) -> None:
        """Learn from one step. The next state is worth 0 if the step terminated."""
        bootstrap = 0.0 if terminated else self.gamma * float(self.values[s2].max())
        self.values[s, a] += self.alpha * (r + bootstrap - self.values[s, a])

    def greedy(self, s: int) -> int:
        """Return the action with the largest value; the first one if several are equal."""
        return int(self.values[s].argmax())
