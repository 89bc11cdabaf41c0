"""Pipeline parallelism: a network whose layers are on several ranks is the plain network."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from qfleet.agent.updaters.optimisers import Adam
from qfleet.agent.weights import FlatWeights
from qfleet.core.errors import ConfigError
from qfleet.core.types import EnvSpec
from qfleet.lab.compare import ThreadRanks
from qfleet.networks.factory import make_network
from qfleet.networks.parallel.layout import Layout
from qfleet.networks.parallel.split import split_network
from qfleet.networks.parallel.stages import assign_stages
from qfleet.networks.qnetwork import QNetwork
from support.configs import tiny_config

VECTOR = EnvSpec("vector", (6,), "float32", 3)
IMAGE = EnvSpec("image", (4, 36, 36), "uint8", 3)
SMALL_IMAGE = EnvSpec("small", (4, 10, 10), "uint8", 3)
CASES: dict[str, tuple[EnvSpec, dict[str, Any]]] = {
    "three dense layers": (VECTOR, {"net_arch": (8, 12)}),
    "dueling": (VECTOR, {"net_arch": (8, 12), "dueling": True}),
    "layer normalisation": (VECTOR, {"net_arch": (8, 12), "layer_norm": True}),
    "quantiles": (VECTOR, {"net_arch": (8, 8), "head": "qr", "n_quantiles": 4}),
    "nature": (IMAGE, {"network": "nature"}),
    "impala": (SMALL_IMAGE, {"network": "impala"}),
    "minatar": (SMALL_IMAGE, {"network": "minatar"}),
}
ONE_AT_A_TIME = threading.Lock()


class Learnt(NamedTuple):
    """What a network, or a rank's part of it, has after some updates of Adam."""

    output: Tensor
    weights: Tensor
    layout: Layout | None


def observations(spec: EnvSpec) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    if spec.obs_dtype == "uint8":
        return torch.randint(0, 256, (11, *spec.obs_shape), generator=generator, dtype=torch.uint8)
    return torch.randn(11, *spec.obs_shape, generator=generator)


def train(case: str, updates: int, *ranks: ThreadRanks) -> Learnt:
    (spec, fields), layouts = CASES[case], list[Layout]()

    def split(network: QNetwork) -> None:
        if ranks:
            layouts.append(split_network(network, *ranks))

    config, cpu = tiny_config(precision="fp64", **fields), torch.device("cpu")
    with ONE_AT_A_TIME:  # the weights are drawn from torch's global generator
        network = make_network(config, spec, cpu, 5, split)
    weights, obs = FlatWeights(network), observations(spec)
    optimiser = Adam(weights.data, 1e-8)
    for _ in range(updates):
        output = network(obs)
        loss = (output - 1.0).square().mean()
        weights.set_grad(torch.autograd.grad(loss, weights.parameters))
        optimiser.step(weights.data, weights.grad, 1e-3, None)
    with torch.no_grad():
        return Learnt(network(obs), weights.data, layouts[0] if layouts else None)


def train_split(case: str, updates: int, tensor: int, pipeline: int) -> list[Learnt]:
    found: dict[int, Learnt] = {}
    tensors = [ThreadRanks(tensor) for _ in range(pipeline)]
    pipelines = [ThreadRanks(pipeline, stride=tensor) for _ in range(tensor)]

    def work(rank: int) -> None:
        axes = tensors[rank // tensor], pipelines[rank % tensor]
        found[rank] = train(case, updates, *axes)

    ThreadRanks(tensor * pipeline).run(work)
    return [found[rank] for rank in range(tensor * pipeline)]


def joined(parts: list[Learnt]) -> Tensor:
    layout = parts[0].layout
    assert layout is not None
    return layout.join([part.weights for part in parts])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 2), (1, 3), (2, 2)])
def test_stages_are_the_whole_network(case: str, tensor: int, pipeline: int) -> None:
    """Outputs and weights after five updates of Adam, in float64."""
    if case in ("three dense layers", "quantiles") and tensor == 2:
        pytest.skip("a stack of split dense layers stays in one stage")
    if case in ("dueling", "minatar") and pipeline == 3:
        pytest.skip("it has two layers that can be in different stages")
    plain, parts = train(case, 5), train_split(case, 5, tensor, pipeline)
    assert sum(part.weights.numel() for part in parts[::tensor]) <= plain.weights.numel()
    for rank, part in enumerate(parts):
        torch.testing.assert_close(part.output, plain.output, rtol=0, atol=1e-10)
        assert part.layout is not None
        assert len(part.weights) == part.layout.local_size(rank) < plain.weights.numel()
    torch.testing.assert_close(joined(parts), plain.weights, rtol=0, atol=1e-10)


def test_the_largest_stage_is_as_small_as_possible() -> None:
    assert assign_stages([0, 5, 0, 5, 10, 0], 2) == [0, 0, 0, 0, 1, 1]
    assert assign_stages([0, 1, 1, 100, 0], 2) == [0, 0, 0, 1, 1]
    assert assign_stages([3, 3, 3], 3) == [0, 1, 2]
    with pytest.raises(ConfigError, match="pipeline_parallel 3 is more than the 2 layers"):
        assign_stages([0, 7, 9], 3)
