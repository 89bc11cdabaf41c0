"""Schedules of ε and the actions drawn with it."""

from __future__ import annotations

import pytest
import torch
from torch import tensor

from qfleet.algorithms.exploration import epsilon_greedy, epsilon_ladder, linear_epsilon


@pytest.mark.parametrize(
    ("env_steps", "expected"),
    # over the first 100 of 1000 steps from 1 to .05; half way: 1 − .5·.95 = .525
    [(0, 1.0), (50, 0.525), (100, 0.05), (1000, 0.05), (2000, 0.05)],
)
def test_linear_epsilon(env_steps: int, expected: float) -> None:
    assert linear_epsilon(env_steps, 1000, 0.1, 1.0, 0.05) == pytest.approx(expected)


def test_linear_epsilon_without_a_fall_is_final_at_once() -> None:
    assert linear_epsilon(0, 1000, 0.0, 1.0, 0.05) == 0.05


def test_epsilon_ladder() -> None:
    # .4^1, .4^(1 + 7/2) = .4^4.5 = .0161909, .4^8 = .00065536
    expected = tensor([0.4, 0.01619086, 0.00065536])
    torch.testing.assert_close(epsilon_ladder(3, 0.4), expected, atol=1e-7, rtol=0)


def test_epsilon_ladder_of_one_env_is_its_base() -> None:
    torch.testing.assert_close(epsilon_ladder(1, 0.4), tensor([0.4]))


def test_greedy_takes_the_best_and_the_first_of_equals() -> None:
    q = tensor([[0.0, 2.0, 1.0], [3.0, 3.0, 3.0], [-1.0, 5.0, 5.0]])
    actions = epsilon_greedy(q, 0.0, torch.Generator().manual_seed(0))
    assert actions.dtype == torch.int64
    assert actions.tolist() == [1, 0, 1]


def test_every_action_is_drawn_alike_at_epsilon_one() -> None:
    q = torch.zeros(30_000, 3)
    actions = epsilon_greedy(q, 1.0, torch.Generator().manual_seed(0))
    share = actions.bincount(minlength=3) / 30_000
    torch.testing.assert_close(share, torch.full((3,), 1 / 3), atol=0.01, rtol=0)


def test_epsilon_is_per_env() -> None:
    # best action 0; a random one of 4 misses it ¾ of the time: ε = (0, .4, 1) → 0, .3, .75
    q = tensor([1.0, 0.0, 0.0, 0.0]).expand(30_000, 4)
    epsilon = tensor([0.0, 0.4, 1.0]).repeat_interleave(10_000)
    actions = epsilon_greedy(q, epsilon, torch.Generator().manual_seed(0))
    missed = (actions != 0).float().view(3, -1).mean(1)
    torch.testing.assert_close(missed, tensor([0.0, 0.3, 0.75]), atol=0.02, rtol=0)


def test_the_stream_of_draws_does_not_depend_on_epsilon() -> None:
    after = []
    for epsilon in (0.0, 1.0):
        generator = torch.Generator().manual_seed(3)
        epsilon_greedy(torch.zeros(5, 2), epsilon, generator)
        after.append(torch.rand(4, generator=generator))
    assert torch.equal(after[0], after[1])


def test_the_same_seed_gives_the_same_actions() -> None:
    q = torch.zeros(100, 4)
    first, second, other = (
        epsilon_greedy(q, 1.0, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)
    )
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


def test_an_epsilon_for_another_number_of_envs_is_refused() -> None:
    with pytest.raises(AssertionError):
        epsilon_greedy(torch.zeros(3, 2), torch.zeros(2), torch.Generator())
