"""Schedules of ε."""

from __future__ import annotations

import pytest
import torch
from torch import tensor

from qfleet.agent import schedules
from qfleet.algorithms.exploration import epsilon_ladder
from qfleet.config.config import Config


def falling(fraction: float) -> Config:
    return Config(
        steps=1000,
        exploration_fraction=fraction,
        exploration_initial_eps=1.0,
        exploration_final_eps=0.05,
    )


@pytest.mark.parametrize(
    ("env_steps", "expected"),
    # over the first 100 of 1000 steps from 1 to .05; half way: 1 − .5·.95 = .525
    [(0, 1.0), (50, 0.525), (100, 0.05), (1000, 0.05), (2000, 0.05)],
)
def test_linear_epsilon(env_steps: int, expected: float) -> None:
    assert schedules.epsilon(falling(0.1), env_steps) == pytest.approx(expected)


def test_linear_epsilon_without_a_fall_is_final_at_once() -> None:
    assert schedules.epsilon(falling(0.0), 0) == 0.05


def test_epsilon_ladder() -> None:
    # .4^1, .4^(1 + 7/2) = .4^4.5 = .0161909, .4^8 = .00065536
    expected = tensor([0.4, 0.01619086, 0.00065536])
    torch.testing.assert_close(epsilon_ladder(3, 0.4), expected, atol=1e-7, rtol=0)


def test_epsilon_ladder_of_one_env_is_its_base() -> None:
    torch.testing.assert_close(epsilon_ladder(1, 0.4), tensor([0.4]))
