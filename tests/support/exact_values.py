"""Value iteration for the exact Q* of a known MDP."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_MAX_SWEEPS = 1_000_000


def solve_q(
    transition: NDArray[np.float64],
    reward: NDArray[np.float64],
    terminal: NDArray[np.bool_],
    gamma: float,
) -> NDArray[np.float64]:
    """Return Q* ``[S, A]`` by value iteration, to a change of 1e-12 relative to the largest value.

    ``transition`` is P(s'|s,a) as ``[S, A, S]``, ``reward`` is the expected R(s,a), and the values
    of ``terminal`` states are 0.
    """
    states, actions = reward.shape
    assert transition.shape == (states, actions, states), f"transition {transition.shape}"
    assert terminal.shape == (states,), f"terminal {terminal.shape} for {states} states"
    assert np.allclose(transition.sum(2)[~terminal], 1.0), "transition rows must sum to 1"
    q = np.zeros((states, actions))
    for _ in range(_MAX_SWEEPS):
        value = np.where(terminal, 0.0, q.max(1))
        swept = np.where(terminal[:, None], 0.0, reward + gamma * (transition @ value))
        change = float(np.abs(swept - q).max())
        q = swept
        if change <= 1e-12 * max(1.0, float(np.abs(q).max())):
            return q
    raise ArithmeticError(f"value iteration did not converge in {_MAX_SWEEPS} sweeps, γ {gamma}")
