"""Dropout: active in gradients alone, in the configured share, and resumed bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import qfleet
from qfleet.config.config import Config
from qfleet.core.types import EnvSpec
from qfleet.networks.dropout import Dropout
from qfleet.networks.factory import make_network
from qfleet.storage.checkpoint import load_checkpoint
from support.configs import tiny_fields

VECTOR = EnvSpec("vector", (4,), "float32", 3)
IMAGE = EnvSpec("image", (2, 36, 36), "uint8", 3, frame_stack=2)


def test_a_share_of_the_features_is_dropped_and_the_mean_stays() -> None:
    layer, x = Dropout(0.25), torch.ones(200, 100)
    first, second = layer(x), layer(x)
    torch.testing.assert_close(first.unique(), torch.tensor([0.0, 4 / 3]))
    assert float((first == 0).double().mean()) == pytest.approx(0.25, abs=0.01)
    assert not torch.equal(first, second)


def test_nothing_is_dropped_without_a_gradient_or_in_evaluation() -> None:
    layer, x = Dropout(0.5), torch.ones(8, 8)
    with torch.no_grad():
        assert layer(x) is x
    assert layer.eval()(x) is x


@pytest.mark.parametrize(("spec", "layers"), [(VECTOR, 2), (IMAGE, 1)])
def test_networks_drop_after_their_dense_layers(spec: EnvSpec, layers: int) -> None:
    network = make_network(Config(dropout=0.5), spec, torch.device("cpu"), 0)
    assert sum(isinstance(module, Dropout) for module in network.modules()) == layers
    obs = torch.ones(4, *spec.obs_shape).to(spec.torch_dtype)
    assert not torch.equal(network(obs), network(obs))
    with torch.no_grad():
        assert torch.equal(network(obs), network(obs))


@pytest.mark.slow
def test_a_resumed_run_draws_the_same_masks(tmp_path: Path) -> None:
    fields = tiny_fields(steps=400, engine="serial", dropout=0.3, learning_rate=1e-2)
    states = []
    for name, stop_after in (("whole", None), ("cut", 200)):
        options = qfleet.RunOptions(stop_after=stop_after)
        qfleet.train("CartPole-v1", run_dir=tmp_path / name, options=options, **fields)
        if stop_after:
            qfleet.resume(tmp_path / name)
        learner = load_checkpoint(tmp_path / name / "checkpoints").parts["learner"]
        states.append(learner["weights"])
    assert torch.equal(*states)
    without = fields | {"dropout": 0.0}
    qfleet.train("CartPole-v1", run_dir=tmp_path / "without", **without)
    other = load_checkpoint(tmp_path / "without" / "checkpoints").parts["learner"]["weights"]
    assert not torch.allclose(other, states[0], atol=1e-3)


def test_ranks_draw_the_parts_of_one_mask() -> None:
    layers, x = [Dropout(0.5) for _ in range(3)], torch.ones(6, 50)
    for layer in layers:
        layer.counter.fill_(7)
    whole, first, second = layers
    second.first_sample = 4
    assert torch.equal(torch.cat((first(x[:4]), second(x[4:]))), whole(x))
    second.first_sample = 0  # the negative control
    assert not torch.equal(second(x[4:]), whole(x)[4:])
