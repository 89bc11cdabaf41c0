"""The flat optimisers against torch.optim, clipping against torch's own, and bad gradients."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qfleet.agent.updaters.local import LocalUpdater
from qfleet.agent.updaters.optimisers import (
    SGD,
    Adam,
    FlatOptimiser,
    RAdam,
    RMSProp,
    make_optimiser,
)
from qfleet.agent.weights import FlatWeights

SIZE = 257
STEPS = 50
RATE = 1e-2
NAMES = ["adam", "adamw", "radam", "rmsprop", "sgd"]


def gradients(count: int = STEPS, size: int = SIZE) -> list[Tensor]:
    random = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=random) * 10 ** (i % 4 - 2) for i in range(count)]


def start() -> Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(1))


def descend(optimiser: FlatOptimiser, weights: Tensor, found_bad: Tensor | None = None) -> Tensor:
    for i, grad in enumerate(gradients()):
        optimiser.step(weights, grad.clone(), RATE / (i + 1), found_bad)
    return weights


def descend_stock(kind: type[torch.optim.Optimizer], **options: Any) -> Tensor:
    parameter = nn.Parameter(start())
    optimiser = kind([parameter], lr=RATE, **options)
    for i, grad in enumerate(gradients()):
        optimiser.param_groups[0]["lr"] = RATE / (i + 1)
        parameter.grad = grad.clone()
        optimiser.step()
    return parameter.detach()


def test_adam_is_the_stock_fused_adam_bit_for_bit() -> None:
    weights = start()
    ours = descend(Adam(weights, eps=1e-8), weights)
    assert torch.equal(ours, descend_stock(torch.optim.Adam, eps=1e-8, fused=True))
    assert not torch.equal(ours, start())


def test_radam_is_the_stock_one() -> None:
    """Below the threshold, across it and beyond: it lies between the fifth and the sixth step."""
    weights = start()
    ours = descend(RAdam(weights, eps=1e-8), weights)
    stock = descend_stock(torch.optim.RAdam, eps=1e-8)
    torch.testing.assert_close(ours, stock, rtol=1e-6, atol=1e-7)
    assert len(gradients()) > 8
    adam = descend_stock(torch.optim.Adam, eps=1e-8)
    assert not torch.allclose(stock, adam)


def test_rmsprop_is_the_stock_one_with_the_decay_of_nature_dqn() -> None:
    weights = start()
    ours = descend(RMSProp(weights, eps=0.01), weights)
    stock = descend_stock(torch.optim.RMSprop, alpha=0.95, eps=0.01)
    torch.testing.assert_close(ours, stock, rtol=1e-6, atol=1e-7)
    assert not torch.allclose(stock, descend_stock(torch.optim.RMSprop, alpha=0.99, eps=0.01))


def test_sgd_is_the_stock_one() -> None:
    ours = descend(SGD(), start())
    torch.testing.assert_close(ours, descend_stock(torch.optim.SGD), rtol=1e-6, atol=1e-7)


STOCK: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adam": (torch.optim.Adam, {"eps": 1e-8}),
    "adamw": (torch.optim.AdamW, {"eps": 1e-8}),
    "radam": (torch.optim.RAdam, {"eps": 1e-8}),
    "rmsprop": (torch.optim.RMSprop, {"eps": 1e-8, "alpha": 0.95}),
    "sgd": (torch.optim.SGD, {}),
}


@pytest.mark.parametrize("name", NAMES)
def test_weight_decay_is_the_stock_one(name: str) -> None:
    kind, options = STOCK[name]
    weights = start()
    ours = descend(make_optimiser(name, weights, 1e-8, weight_decay=0.5), weights)
    stock = descend_stock(kind, weight_decay=0.5, **options)
    torch.testing.assert_close(ours, stock, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(ours, descend_stock(kind, **{**options, "weight_decay": 0.0}))
    # The accelerator's path, with a learning rate in a tensor, and the rows of a population.
    rows = start().repeat(3, 1)
    optimiser = make_optimiser(name, rows, 1e-8, weight_decay=0.5)
    for i, grad in enumerate(gradients()):
        rate = torch.full((3, 1), RATE / (i + 1))
        bad = torch.tensor([[0.0], [1.0], [0.0]])
        optimiser.step(rows, grad.repeat(3, 1), rate, bad)
    torch.testing.assert_close(rows[0], stock, rtol=1e-4, atol=1e-5)
    assert torch.equal(rows[1], start())
    assert torch.equal(rows[2], rows[0])


@pytest.mark.parametrize("name", NAMES)
def test_two_learning_rates_are_two_groups_of_the_stock_one(name: str) -> None:
    kind, options = STOCK[name]
    weights, factors = start(), torch.ones(SIZE)
    factors[SIZE // 2 :] = 3.0
    decay = 0.5 if name == "adamw" else 0.0
    ours = descend(make_optimiser(name, weights, 1e-8, decay, factors), weights)
    halves = [half.clone() for half in torch.split(start(), [SIZE // 2, SIZE - SIZE // 2])]
    stock = kind([{"params": [half]} for half in halves], lr=RATE, weight_decay=decay, **options)
    for i, grad in enumerate(gradients()):
        for half, part, group, factor in zip(
            halves,
            torch.split(grad, [SIZE // 2, SIZE - SIZE // 2]),
            stock.param_groups,
            (1, 3),
            strict=True,
        ):
            half.grad, group["lr"] = part.clone(), factor * RATE / (i + 1)
        stock.step()
    torch.testing.assert_close(ours, torch.cat(halves), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(ours, descend(make_optimiser(name, start(), 1e-8, decay), start()))


@pytest.mark.parametrize("name", NAMES)
def test_two_learning_rates_leave_weights_alone_if_the_gradient_is_bad(name: str) -> None:
    weights = start()
    optimiser = make_optimiser(name, weights, 1e-8, factors=torch.full((SIZE,), 0.3))
    optimiser.step(weights, torch.full((SIZE,), math.nan), RATE, torch.tensor(1.0))
    assert torch.equal(weights, start())


@pytest.mark.parametrize("name", NAMES)
def test_nothing_bad_found_changes_nothing(name: str) -> None:
    """The accelerator's path with a good gradient is the host's path."""
    host, accelerator = start(), start()
    descend(make_optimiser(name, host, 1e-8), host)
    descend(make_optimiser(name, accelerator, 1e-8), accelerator, torch.tensor(0.0))
    assert torch.equal(host, accelerator)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_found_bad_leaves_weights_and_moments_bit_identical(name: str, bad: float) -> None:
    weights = start()
    optimiser = make_optimiser(name, weights, 1e-8, weight_decay=0.1)
    descend(optimiser, weights)
    before, state = weights.clone(), copy.deepcopy(optimiser.state_dict())
    grad = torch.ones(SIZE)
    grad[3] = bad
    optimiser.step(weights, grad, RATE, torch.tensor(1.0))
    assert torch.equal(weights, before)
    assert_same(optimiser.state_dict(), state)
    optimiser.step(weights, torch.ones(SIZE), RATE, torch.tensor(0.0))
    assert not torch.equal(weights, before)


@pytest.mark.parametrize("name", NAMES)
def test_a_restored_optimiser_goes_on_as_if_nothing_had_happened(name: str) -> None:
    whole = start()
    optimiser = make_optimiser(name, whole, 1e-8)
    descend(optimiser, whole)
    halted, state = whole.clone(), copy.deepcopy(optimiser.state_dict())
    descend(optimiser, whole)
    restored = make_optimiser(name, halted, 1e-8)
    restored.load_state_dict(state)
    assert torch.equal(descend(restored, halted), whole)


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name


# --- the updater around them ------------------------------------------------------------------


class Case:
    """A module on flat weights with an updater, in one of its two ways to apply a gradient."""

    def __init__(self, name: str, max_grad_norm: float, without_asking: bool) -> None:
        torch.manual_seed(0)
        self.weights = FlatWeights(nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)))
        self.optimiser = make_optimiser(name, self.weights.data, 1e-8)
        self.updater = LocalUpdater(self.weights, self.optimiser, max_grad_norm)
        self._without_asking = without_asking

    def apply(self, grad: Tensor) -> dict[str, float]:
        self.weights.grad.copy_(grad)
        if self._without_asking:
            metrics = self.updater.apply(torch.tensor(RATE))
        else:
            metrics = self.updater.apply(RATE)
        return {name: float(value) for name, value in metrics.items()}

    def random_grad(self, scale: float = 1.0) -> Tensor:
        return gradients(1, self.weights.data.numel())[0] / 0.01 * scale


WAYS = pytest.mark.parametrize("without_asking", [False, True], ids=["host", "accelerator"])


@WAYS
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_clipping_is_torchs(scale: float, without_asking: bool) -> None:
    case = Case("sgd", 2.0, without_asking)
    grad = case.random_grad(scale)
    before = case.weights.data.clone()
    metrics = case.apply(grad)
    parameter = nn.Parameter(before.clone())
    parameter.grad = grad.clone()
    norm = nn.utils.clip_grad_norm_([parameter], 2.0)
    assert metrics == {"grad_norm": pytest.approx(float(norm)), "skipped": 0.0}
    torch.testing.assert_close(case.weights.grad, parameter.grad, rtol=1e-6, atol=0.0)
    torch.testing.assert_close(case.weights.data, before - RATE * parameter.grad)


@WAYS
def test_zero_means_no_clipping(without_asking: bool) -> None:
    case = Case("sgd", 0.0, without_asking)
    grad = case.random_grad(1e6)
    case.apply(grad)
    assert torch.equal(case.weights.grad, grad)


@WAYS
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_bad_gradient_changes_nothing_and_is_counted(
    bad: float, max_grad_norm: float, name: str, without_asking: bool
) -> None:
    case = Case(name, max_grad_norm, without_asking)
    assert case.apply(case.random_grad())["skipped"] == 0.0
    before, state = case.weights.data.clone(), copy.deepcopy(case.updater.state_dict())
    grad = case.random_grad()
    grad[1] = bad
    metrics = case.apply(grad)
    assert metrics["skipped"] == 1.0
    assert not math.isfinite(metrics["grad_norm"])
    assert torch.equal(case.weights.data, before)
    assert_same(case.updater.state_dict(), state)
    assert case.apply(case.random_grad())["skipped"] == 0.0
    assert not torch.equal(case.weights.data, before)
