"""Losses and their gradients against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, tensor

from qfleet.algorithms.losses import (
    action_cross_entropy,
    categorical_cross_entropy,
    huber,
    quantile_huber,
    squared,
)


def close(actual: Tensor, expected: list[object]) -> None:
    torch.testing.assert_close(actual, tensor(expected), atol=1e-6, rtol=0)


def gradient(loss: Tensor, of: Tensor) -> Tensor:
    return torch.autograd.grad(loss.sum(), of)[0]


def test_huber() -> None:
    # ½·.5² = .125; at 1 both branches give .5; |−3| − .5 = 2.5
    td = tensor([0.5, 1.0, -3.0], requires_grad=True)
    close(huber(td), [0.125, 0.5, 2.5])
    close(gradient(huber(td), td), [0.5, 1.0, -1.0])


def test_squared() -> None:
    # ½·.5² = .125; ½·9 = 4.5
    td = tensor([0.5, -3.0], requires_grad=True)
    close(squared(td), [0.125, 4.5])
    close(gradient(squared(td), td), [0.5, -3.0])


def test_cross_entropy() -> None:
    # softmax(0, ln 3) = (¼, ¾): −.4 ln ¼ − .6 ln ¾ = .554518 + .172609 = .727127
    logits = tensor([[0.0, math.log(3)]], requires_grad=True)
    target = tensor([[0.4, 0.6]])
    close(categorical_cross_entropy(logits, target), [0.727127])
    # softmax − target = (¼ − .4, ¾ − .6)
    close(gradient(categorical_cross_entropy(logits, target), logits), [[-0.15, 0.15]])


def test_cross_entropy_of_actions() -> None:
    # softmax(0, ln 3) = (¼, ¾): −ln ¾ = .287682 for action 1, −ln ¼ = 1.386294 for action 0
    logits = tensor([[0.0, math.log(3)], [0.0, math.log(3)]], requires_grad=True)
    action = tensor([1, 0])
    close(action_cross_entropy(logits, action), [0.287682, 1.386294])
    # softmax − one-hot
    expected: list[object] = [[0.25, -0.25], [-0.75, 0.75]]
    close(gradient(action_cross_entropy(logits, action), logits), expected)


def test_cross_entropy_is_finite_for_extreme_logits() -> None:
    loss = categorical_cross_entropy(tensor([[1e4, -1e4]]), tensor([[0.0, 1.0]]))
    close(loss, [2e4])


def test_quantile_huber() -> None:
    # δ = target − prediction; fractions (¼, ¾), predictions (0, 1), targets (½, 3)
    # k = 0: δ = ½ → ¼·⅛ = 1/32;  δ = 3 → ¼·2½ = 5/8;   mean 21/64
    # k = 1: δ = −½ → ¼·⅛ = 1/32; δ = 2 → ¾·1½ = 9/8;   mean 37/64
    loss = quantile_huber(tensor([[0.0, 1.0]]), tensor([0.25, 0.75]), tensor([[0.5, 3.0]]))
    close(loss, [58 / 64])


def test_quantile_huber_with_another_kappa() -> None:
    # κ = 2, δ = 3: 2·(3 − 1)/2 = 2, times ¼; δ = −1: ½·1/2 = ¼, times |¼ − 1| = ¾
    prediction, fractions = tensor([[0.0], [1.0]]), tensor([0.25])
    close(quantile_huber(prediction, fractions, tensor([[3.0], [0.0]]), 2.0), [0.5, 0.1875])


def test_quantile_huber_with_fractions_per_sample() -> None:
    # δ = 3 in both rows: 2½ times .1 and times .9
    fractions = tensor([[0.1], [0.9]])
    loss = quantile_huber(torch.zeros(2, 1), fractions, torch.full((2, 1), 3.0))
    close(loss, [0.25, 2.25])


def test_quantile_huber_pulls_high_fractions_up_and_low_ones_down() -> None:
    # Targets ±10 around predictions 0, τ = (.1, .9): dL/dp_k = mean over j of −weight·sgn δ
    # τ = .1: (−.1 + .9)/2 = .4; τ = .9: (−.9 + .1)/2 = −.4: descent lowers the first
    prediction = torch.zeros(1, 2, requires_grad=True)
    loss = quantile_huber(prediction, tensor([0.1, 0.9]), tensor([[-10.0, 10.0]]))
    close(gradient(loss, prediction), [[0.4, -0.4]])


def test_quantile_huber_does_not_pull_a_met_target() -> None:
    prediction = torch.ones(1, 2, requires_grad=True)
    loss = quantile_huber(prediction, tensor([0.25, 0.75]), torch.ones(1, 3))
    close(loss, [0.0])
    close(gradient(loss, prediction), [[0.0, 0.0]])


@pytest.mark.parametrize("shape", [(2,), (3, 2), (1,)])
def test_quantile_huber_refuses_fractions_of_another_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(AssertionError):
        quantile_huber(torch.zeros(2, 3), torch.zeros(shape), torch.zeros(2, 4))
