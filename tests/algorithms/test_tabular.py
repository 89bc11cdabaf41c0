"""The table and the exact solution, against hand-computed numbers and each other."""

from __future__ import annotations

import numpy as np
import pytest

from qfleet.algorithms.tabular import QTable
from support.exact_values import solve_q


def test_update() -> None:
    table = QTable(num_states=2, num_actions=2, alpha=0.5, gamma=0.9)
    table.values[1] = [4.0, 10.0]
    table.update(0, 1, 1.0, 1, terminated=False)  # 0 + .5·(1 + .9·10 − 0) = 5
    assert table.values.tolist() == [[0.0, 5.0], [4.0, 10.0]]
    table.update(0, 1, 1.0, 1, terminated=True)  # 5 + .5·(1 − 5) = 3
    assert table.values.tolist() == [[0.0, 3.0], [4.0, 10.0]]


def test_greedy_takes_the_first_of_equals() -> None:
    table = QTable(num_states=2, num_actions=3, alpha=0.5, gamma=0.9)
    table.values[1] = [1.0, 2.0, 2.0]
    assert table.greedy(0) == 0
    assert table.greedy(1) == 1


def corridor() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """States 0, 1, 2 in a row, 2 is the goal; actions: left (stay at 0), right. −1 a step, +10."""
    transition = np.zeros((3, 2, 3))
    transition[0, 0, 0] = transition[1, 0, 0] = transition[0, 1, 1] = transition[1, 1, 2] = 1.0
    reward = np.array([[-1.0, -1.0], [-1.0, 10.0], [0.0, 0.0]])
    return transition, reward, np.array([False, False, True])


# γ = .9: Q(1,→) = 10; Q(0,→) = −1 + .9·10 = 8; Q(0,←) = Q(1,←) = −1 + .9·8 = 6.2
CORRIDOR_Q = [[6.2, 8.0], [6.2, 10.0], [0.0, 0.0]]


def test_solve_q() -> None:
    np.testing.assert_allclose(solve_q(*corridor(), 0.9), CORRIDOR_Q, atol=1e-12)


def test_solve_q_with_chance_and_without_an_end() -> None:
    # One state, one action, reward 1, no end: 1/(1 − .9) = 10
    forever = solve_q(np.ones((1, 1, 1)), np.ones((1, 1)), np.array([False]), 0.9)
    np.testing.assert_allclose(forever, [[10.0]], atol=1e-10)
    # Half the time stay, half the time end, reward 1: q = 1 + .5·.5·q → 4/3 with γ = .5
    transition = np.array([[[0.5, 0.5]], [[0.0, 1.0]]])
    q = solve_q(transition, np.array([[1.0], [5.0]]), np.array([False, True]), 0.5)
    np.testing.assert_allclose(q, [[4 / 3], [0.0]], atol=1e-12)


def test_solve_q_refuses_rows_that_are_no_distribution() -> None:
    with pytest.raises(AssertionError):
        solve_q(np.full((1, 1, 1), 0.5), np.ones((1, 1)), np.array([False]), 0.9)


def test_the_table_learns_the_exact_values() -> None:
    transition, reward, terminal = corridor()
    table = QTable(num_states=3, num_actions=2, alpha=0.2, gamma=0.9)
    rng = np.random.default_rng(0)
    state = 0
    for _ in range(5000):
        action = int(rng.integers(2))
        following = int(transition[state, action].argmax())
        table.update(
            state, action, float(reward[state, action]), following, bool(terminal[following])
        )
        state = 0 if terminal[following] else following
    np.testing.assert_allclose(table.values, CORRIDOR_Q, atol=1e-6)
    assert [table.greedy(s) for s in (0, 1)] == [1, 1]
