"""Kernels of our own against the plain code they stand in for. Skipped without a GPU."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import qfleet
from qfleet.agent.gradients import AutogradGradient
from qfleet.agent.recorded_gradients import FusedGradient
from qfleet.agent.updaters.fused import FusedUpdater
from qfleet.agent.updaters.local import LocalUpdater
from qfleet.agent.updaters.optimisers import make_optimiser
from qfleet.agent.weights import FlatWeights
from qfleet.config.config import Config
from qfleet.config.presets import resolve
from qfleet.config.validation import validate
from qfleet.core.types import Batch
from qfleet.engines import device as device_engine
from qfleet.engines.factories import make_networks, make_objective, make_updater
from qfleet.engines.registry import build
from qfleet.engines.torch_settings import TorchSettings
from qfleet.engines.tuning import Choice, apply_choice
from qfleet.envs.device.names import MINATAR_IDS
from qfleet.envs.factory import make_tensors
from qfleet.networks.fused_cnn import fuse
from qfleet.telemetry.faults import FaultLog

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]
CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def exact_products() -> Iterator[None]:
    """What kernels are held against must not round to TF32, as torch's convolutions like to."""
    settings = TorchSettings()
    apply_choice(Choice("fp32", compiled=False), [], [])
    yield
    settings.restore()


def configure(env: str = "MinAtar/Breakout-v1", **fields: object) -> Config:
    exact = {"precision": "fp32", "engine": "device", "device": "cuda"}
    return validate(resolve(env, "pqn", fields={**exact, **fields})[0])


def batch_of(config: Config, seed: int = 0) -> tuple[Batch, Tensor]:
    spec = make_tensors(config).spec
    count = config.batch_size * config.population
    g = torch.Generator().manual_seed(seed)
    obs = (torch.rand((count, *spec.obs_shape), generator=g) < 0.15).to(torch.uint8) * 255
    action = torch.randint(spec.num_actions, (count,), generator=g)
    target = 2 * torch.randn(count, generator=g)
    weight = (torch.rand(count, generator=g) < 0.9).float()
    batch = Batch(obs, action, target, target, obs, weight, action).to(CUDA)
    return batch, target.to(CUDA)


@pytest.mark.parametrize("population", [1, 3])
@pytest.mark.parametrize("loss", ["mse", "huber"])
@pytest.mark.parametrize("env", MINATAR_IDS)
def test_fused_gradients_are_those_of_autograd(env: str, loss: str, population: int) -> None:
    config = configure(env, loss=loss, population=population)
    spec = make_tensors(config).spec
    network = make_networks(config, spec, CUDA)
    weights = FlatWeights(network)
    # Scales and shifts as after some training: at their first values mistakes would not show.
    torch.manual_seed(1)
    weights.data += 0.1 * torch.randn_like(weights.data)
    fused = fuse(config, spec, network, CUDA)
    assert fused is not None
    objective = make_objective(config, CUDA, 0)
    plain = AutogradGradient(network, objective, weights, weighted=True)
    ours = FusedGradient(fused, objective, weights)
    batch, target = batch_of(config)
    wanted = plain.backward(plain.predict(batch), batch, target)
    grad = weights.grad.clone()
    weights.grad = torch.full_like(grad, math.nan if population == 1 else 0.0)
    found = ours.backward(None, batch, target)
    assert fused.takes(len(batch))
    with torch.no_grad():
        q = fused.q_values(weights.data, batch.obs)
        torch.testing.assert_close(q, network.q_values(batch.obs), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.prediction, wanted.prediction, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.loss(), wanted.loss(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.priority.abs(), wanted.priority, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(weights.grad, grad, rtol=1e-4, atol=1e-6)


def test_fused_gradients_are_the_same_every_time() -> None:
    config = configure(precision="tf32", population=2)
    spec = make_tensors(config).spec
    network = make_networks(config, spec, CUDA)
    weights = FlatWeights(network)
    fused = fuse(config, spec, network, CUDA)
    assert fused is not None
    batch, target = batch_of(config)
    ours = FusedGradient(fused, make_objective(config, CUDA, 0), weights)
    ours.backward(None, batch, target)
    first = weights.grad.clone()
    for _ in range(20):
        weights.grad.zero_()
        ours.backward(None, batch, target)
        assert torch.equal(weights.grad, first)


@pytest.mark.parametrize("population", [1, 3])
def test_fused_radam_is_radam(population: int) -> None:
    config = configure(population=population, max_grad_norm=1.0)
    spec = make_tensors(config).spec
    both = [FlatWeights(make_networks(config, spec, CUDA)) for _ in range(2)]
    plain = LocalUpdater(both[0], make_optimiser("radam", both[0].data, 1e-8), 1.0)
    ours = make_updater(dataclasses.replace(config, optimizer_eps=1e-8), both[1], capturable=True)
    assert isinstance(ours, FusedUpdater)
    each = () if population == 1 else (population, 1)
    rate = torch.full(each, 1e-3, device=CUDA)
    if population > 1:
        rate *= torch.arange(1, population + 1, device=CUDA).unsqueeze(1)
    torch.manual_seed(2)
    for step in range(20):
        grad = torch.randn_like(both[0].data) * (0.5 if step % 3 else 1e-4)
        if step == 7:
            grad.view(-1)[11] = math.nan  # of the first agent
        before = both[1].data.clone()
        for weights, updater in zip(both, (plain, ours), strict=True):
            weights.grad = grad.clone()
            told = updater.apply(rate)
        assert float(torch.as_tensor(told["skipped"]).sum()) == (step == 7)
        if step == 7:
            rows = both[1].data.view(population, -1)
            assert torch.equal(rows[0], before.view(population, -1)[0])
        torch.testing.assert_close(both[1].data, both[0].data, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours.state_dict()["steps"], plain.state_dict()["steps"])


def test_one_run_and_a_population_are_fused_and_learn_alike() -> None:
    """A rollout later the first agent of three is where an agent alone is, to rounding."""
    fields = {"envs": 64, "train_freq": 512, "gradient_steps": 4, "compile": "off"}
    alone, three = (
        build(configure(population=k, **fields), FaultLog()) for k in (1, 3)
    )  # fmt: skip
    for parts in (alone, three):
        assert parts.learner.is_fused
        device_engine.run(parts, lambda parts=parts: parts.clock.env_steps < 512)  # type: ignore[misc]
    weights = alone.learner.weights.data
    torch.testing.assert_close(
        three.learner.weights.data[0, : len(weights)], weights, rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("population", [1, 2])
def test_pqn_trains_and_resumes_on_the_device(tmp_path: Path, population: int) -> None:
    config = configure(
        precision="auto", population=population, steps=16_384, envs=64, train_freq=2048,
        gradient_steps=32, eval_freq=8192, n_eval_episodes=16, tensorboard=False,
        max_episode_steps=100, log_interval=2048, checkpoint_freq=4096,
    )  # fmt: skip
    result = qfleet.train(config=config, run_dir=tmp_path / "run").result
    assert result.updates == 16_384 // 2048 * 32
    assert result.faults == {}
    resumed = qfleet.resume(tmp_path / "run", steps=20_480)
    assert resumed.result.updates == 20_480 // 2048 * 32
