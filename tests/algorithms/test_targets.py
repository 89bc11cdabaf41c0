"""Targets against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, tensor

from qfleet.algorithms.targets import (
    munchausen_bonus,
    project_categorical,
    soft_policy,
    soft_value,
    take,
    td_target,
)


def close(actual: Tensor, expected: list[object], tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(actual, tensor(expected), atol=tolerance, rtol=0)


def test_take_picks_each_rows_action() -> None:
    values = tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    close(take(values, tensor([2, 0])), [3.0, 4.0])


def test_take_picks_each_rows_distribution() -> None:
    values = tensor([[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0], [7.0, 8.0]]])
    close(take(values, tensor([1, 0])), [[3.0, 4.0], [5.0, 6.0]])


def test_take_sends_the_gradient_to_the_action_alone() -> None:
    values = torch.zeros(2, 3, requires_grad=True)
    take(values, tensor([1, 2])).sum().backward()
    assert values.grad is not None
    close(values.grad, [[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]])


@pytest.mark.parametrize(
    ("values", "action"),
    [
        (torch.zeros(2, 3), tensor([0, 1], dtype=torch.int32)),
        (torch.zeros(2, 3), tensor([0])),
        (torch.zeros(3), tensor([0, 1, 2])),
    ],
)
def test_take_refuses_wrong_shapes_and_types(values: Tensor, action: Tensor) -> None:
    with pytest.raises(AssertionError):
        take(values, action)


def test_td_target() -> None:
    # 1 + .9·10 = 10; a terminated row is worth its reward: −2 + 0·7 = −2
    close(td_target(tensor([1.0, -2.0]), tensor([0.9, 0.0]), tensor([10.0, 7.0])), [10.0, -2.0])


def test_td_target_moves_every_atom() -> None:
    # 1 + .5·(−2, 0, 4) = (0, 1, 3); 3 + 0·(…) = (3, 3, 3)
    atoms = tensor([[-2.0, 0.0, 4.0], [5.0, 6.0, 7.0]])
    target = td_target(tensor([1.0, 3.0]), tensor([0.5, 0.0]), atoms)
    close(target, [[0.0, 1.0, 3.0], [3.0, 3.0, 3.0]])


def test_td_target_refuses_a_shape_that_would_broadcast() -> None:
    with pytest.raises(AssertionError):
        td_target(torch.zeros(2), torch.zeros(2, 1), torch.zeros(2))


def test_soft_policy() -> None:
    # q/τ = (0, ln 3) for q = (0, .5·ln 3), τ = .5: π = (1, 3)/4
    policy, log_policy = soft_policy(tensor([[0.0, 0.5 * math.log(3)]]), 0.5)
    close(policy, [[0.25, 0.75]])
    close(log_policy, [[math.log(0.25), math.log(0.75)]])


def test_soft_policy_splits_ties_evenly() -> None:
    policy, _ = soft_policy(tensor([[5.0, 5.0, -100.0]]), 0.03)
    close(policy, [[0.5, 0.5, 0.0]])


def test_soft_policy_is_stable_for_large_values_and_small_temperature() -> None:
    # The difference is τ·ln 3 at a height where exp(q/τ) overflows: π is still (1, 3)/4.
    q = tensor([[1e5, 1e5 + 0.03 * math.log(3)]], dtype=torch.float64)
    policy, _ = soft_policy(q, 0.03)
    torch.testing.assert_close(
        policy, tensor([[0.25, 0.75]], dtype=torch.float64), atol=1e-8, rtol=0
    )
    policy, log_policy = soft_policy(tensor([[0.0, 1e7]]), 0.03)
    close(policy, [[0.0, 1.0]])
    assert torch.isfinite(log_policy).all()
    # log π of the worse action is −1e7/.03
    assert log_policy[0, 0].item() == pytest.approx(-1e7 / 0.03, rel=1e-6)


def test_soft_value() -> None:
    # π = (¼, ¾), τ = 2: ¼(4 − 2 ln ¼) + ¾(8 − 2 ln ¾) = 7 + 2(¼ ln 4 + ¾ ln 4/3) = 8.1246702
    policy = tensor([[0.25, 0.75]])
    close(soft_value(tensor([[4.0, 8.0]]), policy, policy.log(), 2.0), [8.1246702], 1e-5)


def test_soft_value_of_atoms() -> None:
    # as above for z = (4, 8), and with z = (0, 0) only the entropy is left: 1.1246702
    policy = tensor([[0.25, 0.75]])
    atoms = tensor([[[4.0, 0.0], [8.0, 0.0]]])
    close(soft_value(atoms, policy, policy.log(), 2.0), [[8.1246702, 1.1246702]], 1e-5)


def test_soft_value_ignores_an_action_of_no_probability() -> None:
    policy, log_policy = soft_policy(tensor([[0.0, 1000.0]]), 0.03)
    close(soft_value(tensor([[-5.0, 3.0]]), policy, log_policy, 0.03), [3.0])


def test_soft_value_is_the_log_sum_exp_of_its_own_values() -> None:
    # With π = softmax(z/τ): Σ π(z − τ log π) = τ log Σ exp(z/τ); τ = 1, z = (0, ln 3): ln 4
    q = tensor([[0.0, math.log(3)]])
    close(soft_value(q, *soft_policy(q, 1.0), 1.0), [math.log(4)])


def test_munchausen_bonus() -> None:
    # τ = .5, π = (¼, ¾): .9·.5·ln ¾ = −.1294569; .5·ln ¼ = −.693 clipped at −.6: .9·−.6 = −.54
    q = tensor([[0.0, 0.5 * math.log(3)]]).repeat(2, 1)
    bonus = munchausen_bonus(q, tensor([1, 0]), alpha=0.9, temperature=0.5, clip=-0.6)
    close(bonus, [-0.1294569, -0.54])


def test_munchausen_bonus_never_rewards() -> None:
    bonus = munchausen_bonus(tensor([[0.0, 1e6]]), tensor([1]), 0.9, 0.03, -1.0)
    assert bonus.item() <= 0
    close(bonus, [0.0])


SUPPORT = tensor([-1.0, 0.0, 1.0])


def test_projection_splits_by_nearness() -> None:
    # .25 lies ¾ near 0 and ¼ near 1: .6·(¾, ¼) = (.45, .15); −.5: .4·(½, ½) = (.2, .2); 1 has 0
    projected = project_categorical(tensor([[0.6, 0.4, 0.0]]), tensor([[0.25, -0.5, 1.0]]), SUPPORT)
    close(projected, [[0.2, 0.65, 0.15]])


def test_projection_is_exact_on_support_points() -> None:
    support = torch.linspace(-10, 10, 51)  # a spacing of .4 that float32 cannot hold
    probs = torch.softmax(torch.randn(8, 51, generator=torch.Generator().manual_seed(0)), 1)
    assert torch.equal(project_categorical(probs, support.expand(8, 51), support), probs)


def test_projection_puts_what_lies_outside_on_the_ends() -> None:
    atoms = tensor([[-7.0, 1.0, 5.0], [math.inf, -math.inf, -1.0]])
    probs = tensor([[0.2, 0.3, 0.5], [0.2, 0.3, 0.5]])
    # row 1: −7 → −1, 1 stays, 5 → 1; row 2: ∞ → 1, −∞ → −1
    close(project_categorical(probs, atoms, SUPPORT), [[0.2, 0.0, 0.8], [0.8, 0.0, 0.2]])


def test_projection_of_a_terminal_state_is_its_reward() -> None:
    # discount 0: every atom is the reward .5, half way between 0 and 1
    probs, atoms = tensor([[0.1, 0.2, 0.7]]), torch.full((1, 3), 0.5)
    close(project_categorical(probs, atoms, SUPPORT), [[0.0, 0.5, 0.5]])


def test_projection_keeps_mass_and_mean() -> None:
    generator = torch.Generator().manual_seed(1)
    support = torch.linspace(-10, 10, 51)
    probs = torch.softmax(torch.randn(16, 51, generator=generator), 1)
    atoms = 0.3 * torch.randn(16, 1, generator=generator) + 0.9 * support
    projected = project_categorical(probs, atoms, support)
    torch.testing.assert_close(projected.sum(1), torch.ones(16), atol=1e-5, rtol=0)
    torch.testing.assert_close(projected @ support, (probs * atoms).sum(1), atol=1e-4, rtol=0)


def test_projection_does_not_hide_a_nan() -> None:
    projected = project_categorical(tensor([[1.0, 0.0, 0.0]]), tensor([[math.nan, 0, 0]]), SUPPORT)
    assert projected.isnan().any()
