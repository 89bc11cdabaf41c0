"""Tensor parallelism: a network whose layers are split among ranks is the plain network."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from qfleet.agent.updaters.optimisers import Adam
from qfleet.agent.weights import FlatWeights
from qfleet.core.types import EnvSpec
from qfleet.lab.compare import ThreadRanks
from qfleet.networks.factory import make_network
from qfleet.networks.parallel import tensor
from qfleet.networks.parallel.layout import Layout
from qfleet.networks.parallel.split import make_part
from qfleet.networks.parallel.tensor import Split, plan
from qfleet.networks.qnetwork import QNetwork
from support.configs import tiny_config

VECTOR = EnvSpec("vector", (6,), "float32", 3)
IMAGE = EnvSpec("image", (4, 36, 36), "uint8", 3)
SMALL_IMAGE = EnvSpec("small", (4, 10, 10), "uint8", 3)
CASES: dict[str, tuple[EnvSpec, dict[str, Any]]] = {
    "three dense layers": (VECTOR, {"net_arch": (8, 12)}),
    "dueling": (VECTOR, {"net_arch": (8, 12), "dueling": True}),
    "layer normalisation": (VECTOR, {"net_arch": (8, 12), "layer_norm": True}),
    "tanh": (VECTOR, {"net_arch": (8, 12), "activation": "tanh"}),
    "separate networks": (
        VECTOR,
        {"net_arch": (8, 8), "head": "actor-critic", "separate_networks": True, "replay": False},
    ),
    "quantiles": (VECTOR, {"net_arch": (8, 8), "head": "qr", "n_quantiles": 4}),
    "widths of 12": (VECTOR, {"net_arch": (12, 12)}),
    "odd widths": (VECTOR, {"net_arch": (7, 9)}),
    "nature": (IMAGE, {"network": "nature"}),
    "nature, normalised": (IMAGE, {"network": "nature", "layer_norm": True}),
    "impala": (SMALL_IMAGE, {"network": "impala"}),
    "minatar": (SMALL_IMAGE, {"network": "minatar"}),
}


# Each exchange without its collective, and a network that needs it.
CONTROLS: dict[str, tuple[Callable[[Tensor, ThreadRanks], Tensor], str]] = {
    "enter": (lambda x, _: x, "impala"),
    "add_up": (lambda x, _: x, "three dense layers"),
    "gather_channels": (lambda x, ranks: torch.cat([x] * ranks.size, 1), "impala"),
    "own_channels": (lambda x, ranks: x.chunk(ranks.size, 1)[ranks.rank], "three dense layers"),
}


def make(case: str, ranks: ThreadRanks | None = None) -> tuple[QNetwork, Layout | None]:
    (spec, fields), cpu = CASES[case], torch.device("cpu")
    config = tiny_config(precision="fp64", **fields)
    if ranks is None:
        return make_network(config, spec, cpu, 5), None
    return make_part(config, spec, cpu, 5, ranks, ThreadRanks(1, [ranks.rank]))


def observations(case: str) -> Tensor:
    spec, generator = CASES[case][0], torch.Generator().manual_seed(2)
    if spec.obs_dtype == "uint8":
        return torch.randint(0, 256, (4, *spec.obs_shape), generator=generator, dtype=torch.uint8)
    return torch.randn(4, *spec.obs_shape, generator=generator)


class Learnt(NamedTuple):
    """What a network, or a rank's part of it, has after some updates of Adam."""

    output: Tensor
    first_grad: Tensor
    weights: Tensor
    layout: Layout | None


def train(case: str, updates: int, ranks: ThreadRanks | None = None) -> Learnt:
    network, layout = make(case, ranks)
    weights, obs, first = FlatWeights(network), observations(case), torch.empty(0)
    optimiser = Adam(weights.data, 1e-8)
    for update in range(updates):
        output = network(obs)
        loss = (output - 1.0).square().mean()
        weights.set_grad(torch.autograd.grad(loss, weights.parameters))
        first = weights.grad.clone() if update == 0 else first
        optimiser.step(weights.data, weights.grad, 1e-3, None)
    return Learnt(output.detach(), first, weights.data, layout)


def train_split(case: str, updates: int, ranks: ThreadRanks) -> list[Learnt]:
    found: dict[int, Learnt] = {}
    ranks.run(lambda rank: found.update({rank: train(case, updates, ranks)}))
    return [found[rank] for rank in range(ranks.size)]


def joined(parts: list[Learnt], name: str) -> Tensor:
    layout = parts[0].layout
    assert layout is not None
    return layout.join([getattr(part, name) for part in parts])


@pytest.mark.parametrize("case", CASES)
def test_a_split_network_is_the_plain_one(case: str) -> None:
    """Output, gradients and the weights after five updates of Adam, in float64."""
    plain, parts = train(case, 5), train_split(case, 5, ThreadRanks(2))
    for part in parts:
        torch.testing.assert_close(part.output, plain.output, rtol=0, atol=1e-10)
    for name in ("first_grad", "weights"):
        theirs = getattr(plain, name)
        torch.testing.assert_close(joined(parts, name), theirs, rtol=0, atol=1e-10)


@pytest.mark.parametrize("case", CASES)
def test_parts_begin_with_the_weights_of_the_plain_network(case: str) -> None:
    """To the last bit, buffers included."""
    plain, _ = make(case)
    ranks, found = ThreadRanks(2), dict[int, tuple[QNetwork, Layout | None]]()
    ranks.run(lambda rank: found.update({rank: make(case, ranks)}))
    layout = found[0][1]
    assert layout is not None
    parts = [FlatWeights(found[rank][0]).data for rank in (0, 1)]
    assert torch.equal(layout.join(parts), FlatWeights(plain).data)
    assert not torch.equal(*parts)
    for name, buffer in plain.named_buffers():
        assert torch.equal(found[1][0].get_buffer(name), buffer)


def test_no_rank_ever_holds_the_whole_network() -> None:
    """The most bytes while a part is made: less than half of the network, of which it is an eighth.

    The control is the plain network, which needs all of them.
    """
    config = tiny_config(net_arch=(256,) * 16)
    whole_bytes = 4 * 15 * 256 * 256
    peaks, eight = dict[int, int](), ThreadRanks(8)

    def build_part() -> None:
        make_part(config, VECTOR, torch.device("cpu"), 5, ThreadRanks(1, [3]), eight)

    thread = threading.Thread(name="3", target=lambda: peaks.update({1: peak(build_part)}))
    thread.start()
    thread.join()
    plain = peak(lambda: make_network(config, VECTOR, torch.device("cpu"), 5))
    assert peaks[1] < whole_bytes / 2 < whole_bytes < plain


def peak(work: Callable[[], object]) -> int:
    """Return the most bytes of tensors that were allocated at one time."""
    with torch.profiler.profile(profile_memory=True) as profile:
        work()
    assert profile.profiler is not None
    results: Any = profile.profiler.kineto_results
    changes = [event.nbytes() for event in results.events() if event.name() == "[memory]"]
    return max(itertools.accumulate(changes))


def test_three_ranks_and_a_hundred_updates() -> None:
    """Three actions and hidden layers of 12: with three ranks all three layers are split."""
    plain, parts = train("widths of 12", 100), train_split("widths of 12", 100, ThreadRanks(3))
    assert parts[0].layout is not None
    assert [p.name for p in parts[0].layout.pieces if p.dim is None] == ["head.advantage.bias_1"]
    torch.testing.assert_close(joined(parts, "weights"), plain.weights, rtol=0, atol=1e-10)


@pytest.mark.parametrize("exchange", CONTROLS)
def test_without_any_of_its_exchanges_it_is_not(
    exchange: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    without, case = CONTROLS[exchange]
    monkeypatch.setattr(tensor, exchange, without)
    plain, parts = train(case, 5), train_split(case, 5, ThreadRanks(2))
    assert (joined(parts, "weights") - plain.weights).abs().max() > 1e-4


@pytest.mark.parametrize("case", CASES)
def test_the_layout_predicts_what_a_rank_holds(case: str) -> None:
    """From the shapes of the plain network; and whole vectors are cut and joined unchanged."""
    plain = train(case, 1)
    for part in train_split(case, 1, ThreadRanks(2)):
        layout = part.layout
        assert layout is not None
        shapes = [(math.prod(piece.shape), piece.dim) for piece in layout.pieces]
        assert sum(size for size, _ in shapes) == layout.whole_size == len(plain.weights)
        predicted = sum(size if dim is None else size // 2 for size, dim in shapes)
        assert predicted == layout.local_size(0) == len(part.weights) == len(part.first_grad)
        numbers = torch.arange(layout.whole_size)
        assert torch.equal(layout.join([layout.cut(numbers, rank) for rank in (0, 1)]), numbers)
        assert not torch.equal(layout.cut(numbers, 0), layout.cut(numbers, 1))


def test_pairs_of_layers_have_one_sum() -> None:
    first, second = Split(by_outputs=True, alone=False), Split(by_outputs=False, alone=False)
    assert plan([(6, 8), (8, 4)], 2) == [first, second]
    assert plan([(6, 8), (8, 4), (4, 2)], 2) == [first, second, Split(by_outputs=True, alone=True)]
    assert plan([(6, 8), (8, 4), (4, 3)], 2)[2] == Split(by_outputs=False, alone=True)
    assert plan([(5, 7)], 2) == [None]
    assert plan([(5, 7), (7, 4)], 2) == [None, Split(by_outputs=True, alone=True)]
