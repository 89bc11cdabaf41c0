"""Loss scaling changes no bit of a float32 gradient, and reacts to overflows."""

from __future__ import annotations

import pytest
import torch

from qfleet.agent import loss_scale
from qfleet.agent.gradients import AutogradGradient, Gradient
from qfleet.agent.learner import Learner
from qfleet.agent.loss_scale import FIRST_SCALE, LARGEST_SCALE, ScaledGradient
from qfleet.agent.weights import FlatWeights
from qfleet.config.config import Config
from qfleet.core.types import Batch, Clock, EnvSpec
from qfleet.engines.factories import make_learner, make_objective
from qfleet.engines.placement import Placement
from qfleet.lab.compare import FixedBatches
from qfleet.networks.factory import make_network
from qfleet.telemetry.timers import Timers

CPU = torch.device("cpu")
SPEC = EnvSpec("boxes", (4,), "float32", 3)
TARGET = torch.linspace(-2.0, 2.0, 8)


def random_batch() -> Batch:
    random = torch.Generator().manual_seed(0)
    return Batch(
        obs=torch.randn(8, 4, generator=random),
        action=torch.randint(3, (8,), generator=random),
        reward=torch.randn(8, generator=random),
        discount=torch.rand(8, generator=random),
        next_obs=torch.randn(8, 4, generator=random),
        weight=torch.rand(8, generator=random),
        index=torch.arange(8),
    )


def gradients(dtype: torch.dtype | None = None) -> tuple[FlatWeights, Gradient, ScaledGradient]:
    config = Config(net_arch=(16, 16))
    network = make_network(config, SPEC, CPU, seed=0)
    network.autocast_dtype = dtype
    weights = FlatWeights(network)
    plain = AutogradGradient(network, make_objective(config, CPU, 0), weights, weighted=True)
    return weights, plain, ScaledGradient(plain, weights)


def state_of(scaled: ScaledGradient) -> list[float]:
    """The scale, and the finite gradients since it changed."""
    state: list[float] = scaled.state_dict()["loss_scale"].tolist()
    return state


def start_with(scaled: ScaledGradient, scale: float, finite: float) -> None:
    scaled.load_state_dict({"loss_scale": torch.tensor([scale, finite])})


def compute(gradient: Gradient, batch: Batch) -> float:
    return float(gradient.backward(gradient.predict(batch), batch, TARGET).loss())


def test_a_power_of_two_changes_no_bit() -> None:
    weights, plain, scaled = gradients()
    loss = compute(plain, random_batch())
    expected = weights.grad.clone()
    assert compute(scaled, random_batch()) == pytest.approx(loss, rel=1e-6)
    assert torch.equal(weights.grad, expected)
    assert state_of(scaled) == [FIRST_SCALE, 1.0]


def test_small_gradients_survive_in_float16() -> None:
    """Of the first layer, behind a hidden one; without the scale they are zero."""
    batch = random_batch()
    batch.weight.mul_(1e-7)
    found = []
    for dtype, is_scaled in ((None, False), (torch.float16, False), (torch.float16, True)):
        weights, plain, scaled = gradients(dtype)
        compute(scaled if is_scaled else plain, batch)
        found.append(weights.grad_views()[0].clone())
    exact, unscaled, rescued = found
    assert exact.abs().sum() > 0
    assert not unscaled.any()
    assert torch.allclose(rescued, exact, rtol=0.02, atol=0.01 * float(exact.abs().max()))


def test_an_overflow_halves_the_scale_and_is_left_for_the_updater() -> None:
    weights, _, scaled = gradients()
    start_with(scaled, FIRST_SCALE, 7.0)
    batch = random_batch()
    batch.weight[0] = 1e36
    compute(scaled, batch)
    assert not torch.isfinite(weights.grad).all()
    assert state_of(scaled) == [FIRST_SCALE / 2, 0.0]
    assert float(scaled.is_fault) == 0
    batch.weight[0] = torch.inf
    start_with(scaled, 1.0, 0.0)
    compute(scaled, batch)
    assert state_of(scaled) == [1.0, 0.0]
    assert float(scaled.is_fault) == 1


def test_finite_gradients_double_the_scale_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_scale, "GROW_AFTER", 3)
    _, _, scaled = gradients()
    seen = []
    for _ in range(6):
        compute(scaled, random_batch())
        seen.append(state_of(scaled))
    assert seen[:3] == [[FIRST_SCALE, 1.0], [FIRST_SCALE, 2.0], [2 * FIRST_SCALE, 0.0]]
    assert seen[5] == [4 * FIRST_SCALE, 0.0]
    start_with(scaled, LARGEST_SCALE, 2.0)
    compute(scaled, random_batch())
    assert state_of(scaled) == [LARGEST_SCALE, 0.0]


def test_the_scale_is_in_the_state_of_the_learner() -> None:
    config = Config(net_arch=(16,), batch_size=8, precision="fp16")
    place = Placement(CPU, CPU, ahead=False, capturable=False)

    def learner(config: Config) -> Learner:
        memory = FixedBatches([random_batch()] * 3, slice(0, 8))
        return make_learner(config, SPEC, place, memory, Clock(), Timers())

    first, second = learner(config), learner(config)
    for _ in range(3):
        first.learn(1)
    state = first.state_dict()
    assert state["loss_scale"].tolist() == [FIRST_SCALE, 3.0]
    second.load_state_dict(state)
    assert second.state_dict()["loss_scale"].tolist() == [FIRST_SCALE, 3.0]
    assert "loss_scale" not in learner(config.replace(precision="auto")).state_dict()


def test_overflows_that_lower_the_scale_are_no_faults() -> None:
    config = Config(net_arch=(16,), batch_size=8, precision="fp16", loss="mse")
    place = Placement(CPU, CPU, ahead=False, capturable=False)
    batch = random_batch()
    batch.reward.mul_(1e4)
    memory = FixedBatches([batch] * 20, slice(0, 8))
    learner = make_learner(config, SPEC, place, memory, Clock(), Timers())
    scales = []
    for _ in range(20):
        learner.learn(1)
        scales.append(learner.read_metrics()["loss_scale"])
    assert scales[0] == FIRST_SCALE
    assert 1 < scales[-1] < FIRST_SCALE
    assert learner.read_metrics()["skipped"] == 0
