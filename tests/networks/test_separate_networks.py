"""An actor-critic whose policy and value share no layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import qfleet
from qfleet.agent.weights import FlatWeights
from qfleet.config.config import Config
from qfleet.core.types import EnvSpec
from qfleet.engines.registry import build
from qfleet.networks.factory import make_network
from qfleet.storage.checkpoint import load_checkpoint
from qfleet.telemetry.faults import FaultLog
from support.configs import TINY, tiny_config

SPEC = EnvSpec("toy", (3,), "float32", 2)
CPU = torch.device("cpu")
FIELDS: dict[str, Any] = {
    "separate_networks": True, "target_network": True, "target_update_interval": 0, "tau": 0.1,
    "envs": 2, "train_freq": 16, "batch_size": 16, "gradient_steps": 1, "steps": 640,
    "value_learning_rate": 3e-3, "learning_rate": 1e-3, "sum_gradients": True,
}  # fmt: skip


def configure(**fields: Any) -> Config:
    return tiny_config(algo="a3c", **FIELDS | fields)


def test_the_gradient_of_the_value_reaches_its_own_network_only() -> None:
    network = make_network(configure(), SPEC, CPU, 0)
    output = network(torch.randn(5, 3))
    assert output.shape == (5, 3)
    names = [name for name, _ in network.named_parameters()]
    for column, own in ((output[:, -1], True), (output[:, :-1], False)):
        found = torch.autograd.grad(
            column.sum(), list(network.parameters()), allow_unused=True, retain_graph=True
        )
        touched = {
            name.startswith("critic.")
            for name, g in zip(names, found, strict=True)
            if g is not None and g.abs().max() > 0
        }
        assert touched == {own}


def test_the_weights_of_the_value_have_a_rate_of_their_own() -> None:
    config = configure()
    weights = FlatWeights(make_network(config, SPEC, CPU, 0))
    factors = weights.rate_factors(config)
    assert factors is not None
    assert sorted(set(factors.tolist())) == [1.0, pytest.approx(3.0)]
    assert 0.3 < float((factors > 1).float().mean()) < 0.6
    assert weights.rate_factors(configure(value_learning_rate=0.0)) is None


def test_masked_observations_reach_both_networks() -> None:
    network = make_network(configure(), SPEC.with_masks(), CPU, 0)
    obs = torch.cat((torch.randn(4, 3), torch.tensor([[1.0, 0.0]] * 4)), dim=1)
    output = network(obs)
    assert output.shape == (4, 3)
    assert (output[:, 1] < -1e29).all()
    assert output[:, 2].abs().max() < 100


def test_target_and_online_network_normalise_alike() -> None:
    parts = build(configure(normalize_observations=True, engine="serial"), FaultLog())
    online, target = parts.learner.networks
    parts.close()
    online.observe(torch.randn(50, 2, 4) * 5 + 3)
    obs = torch.randn(6, 4) * 5 + 3
    torch.testing.assert_close(online.state_values(obs), target.state_values(obs))


def test_a_run_resumes_bit_for_bit_and_its_policy_can_be_saved(tmp_path: Path) -> None:
    fields = {**TINY, **FIELDS, "preset": "none", "algo": "a3c", "engine": "serial"}
    half = qfleet.RunOptions(stop_after=320)
    qfleet.train("CartPole-v1", run_dir=tmp_path / "halves", options=half, **fields)
    resumed = qfleet.resume(tmp_path / "halves")
    whole = qfleet.train("CartPole-v1", run_dir=tmp_path / "whole", **fields)
    ends = [
        load_checkpoint(trained.folder / "checkpoints").parts["learner"]
        for trained in (resumed, whole)
    ]
    for name in ("weights", "target_weights"):
        assert torch.equal(ends[0][name], ends[1][name])
    policy = whole.policy()
    loaded = qfleet.load(policy.save(tmp_path / "policy"))
    obs = torch.randn(7, 4).numpy()
    assert (loaded.q_values(obs) == policy.q_values(obs)).all()
