"""Pipeline parallelism: a network whose layers are on several ranks is the plain network."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import WeakSet

import pytest
import torch
from torch import Tensor

from qfleet.agent.updaters.optimisers import Adam
from qfleet.agent.weights import FlatWeights
from qfleet.core.errors import ConfigError
from qfleet.core.types import EnvSpec
from qfleet.lab.compare import ThreadRanks, make_meshes
from qfleet.networks.factory import make_network
from qfleet.networks.parallel.layout import Layout
from qfleet.networks.parallel.schedule import Slot, make_schedule
from qfleet.networks.parallel.split import make_part
from qfleet.networks.parallel.stages import Stage, assign_stages
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


class Learnt(NamedTuple):
    """What a network, or a rank's part of it, has after some updates of Adam."""

    output: Tensor
    weights: Tensor
    layout: Layout | None
    stage: object


def observations(spec: EnvSpec) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    if spec.obs_dtype == "uint8":
        return torch.randint(0, 256, (11, *spec.obs_shape), generator=generator, dtype=torch.uint8)
    return torch.randn(11, *spec.obs_shape, generator=generator)


def train(case: str, updates: int, kind: str = "1f1b", *ranks: ThreadRanks) -> Learnt:
    spec, fields = CASES[case]
    config = tiny_config(precision="fp64", pipeline_schedule=kind, micro_batches=4, **fields)
    cpu, layout = torch.device("cpu"), None
    if ranks:
        network, layout = make_part(config, spec, cpu, 5, *ranks)
    else:
        network = make_network(config, spec, cpu, 5)
    weights, obs = FlatWeights(network), observations(spec)
    optimiser = Adam(weights.data, 1e-8)
    for parameter, view in zip(weights.parameters, weights.grad_views(), strict=True):
        parameter.grad = view
    for _ in range(updates):
        weights.grad.zero_()
        if isinstance(network.stage, Stage):
            network.stage.learn(obs, lambda output, _: squares(output) / len(obs))
        else:
            (squares(network(obs)) / len(obs)).backward()
        optimiser.step(weights.data, weights.grad, 1e-3, None)
    with torch.no_grad():
        return Learnt(network(obs), weights.data, layout, network.stage)


def squares(output: Tensor) -> Tensor:
    return (output - 1.0).square().sum()


def train_split(
    case: str,
    updates: int,
    tensor: int,
    pipeline: int,
    kind: str = "1f1b",
    ranks: type[ThreadRanks] = ThreadRanks,
) -> list[Learnt]:
    config = tiny_config(tensor_parallel=tensor, pipeline_parallel=pipeline)
    every, found = ThreadRanks(tensor * pipeline), dict[int, Learnt]()
    meshes = make_meshes(config, every, ranks)

    def work(rank: int) -> None:
        axes = meshes[rank].tensor, meshes[rank].stages
        found[rank] = train(case, updates, kind, *axes)

    every.run(work)
    return [found[rank] for rank in range(every.size)]


def joined(parts: list[Learnt]) -> Tensor:
    layout = parts[0].layout
    assert layout is not None
    return layout.join([part.weights for part in parts])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("tensor", "pipeline", "kind"), [(1, 2, "1f1b"), (1, 3, "gpipe"), (2, 2, "1f1b")]
)
def test_stages_are_the_whole_network(case: str, tensor: int, pipeline: int, kind: str) -> None:
    """Outputs and weights after five updates of Adam, in float64."""
    if case in ("dueling", "minatar") and pipeline == 3:
        pytest.skip("it has two layers that can be in different stages")
    plain, parts = train(case, 5), train_split(case, 5, tensor, pipeline, kind)
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
    assert assign_stages([0, *[1] * 60], 4) == [0, *[i // 15 for i in range(60)]]


def idle_share(schedules: Sequence[Sequence[Slot]]) -> float:
    """Return the share of slots in which stages wait, if all passes take one slot each.

    A pass begins once its stage is free and the neighbour has finished the one that it needs.
    """
    ends, free = dict[tuple[int, Slot], int](), [0] * len(schedules)
    left = [list(schedule) for schedule in schedules]
    while any(left):
        for stage, slots in enumerate(left):
            while slots:
                before = stage - 1 if slots[0].is_forward else stage + 1
                needed = (before, slots[0])
                if 0 <= before < len(left) and needed not in ends:
                    break
                free[stage] = max(free[stage], ends.get(needed, 0)) + 1
                ends[stage, slots.pop(0)] = free[stage]
    return 1 - sum(map(len, schedules)) / (len(schedules) * max(free))


@pytest.mark.parametrize("kind", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 8), (3, 4), (4, 4), (4, 2), (1, 3)])
def test_idle_slots_are_those_of_the_formula(kind: Any, stages: int, micro_batches: int) -> None:
    schedules = [make_schedule(kind, stage, stages, micro_batches) for stage in range(stages)]
    for schedule in schedules:
        assert len(set(schedule)) == len(schedule) == 2 * micro_batches
    formula = (stages - 1) / (micro_batches + stages - 1)
    assert idle_share(schedules) == pytest.approx(formula)
    if stages > 1:  # without overlap: a stage begins when the one before it has ended
        apart = [[*s[: micro_batches // 2], *s] for s in schedules]
        assert idle_share(apart) != pytest.approx(formula)


ORDER = {
    "gpipe": ["F0 F1 F2 F3 B0 B1 B2 B3"] * 3,
    "1f1b": [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ],
}
"""Forward and backward passes of four micro-batches in three stages, as in the documentation."""


class Watched(ThreadRanks):
    """Ranks that count the messages of each that it holds: it has not waited for their arrival."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.under_way, self.most = [0] * self.size, [0] * self.size

    def send(self, tensor: Tensor, rank: int) -> Callable[[], None]:
        arrived, own = super().send(tensor, rank), self.rank
        self.under_way[own] += 1
        self.most[own] = max(self.under_way[own], self.most[own])

        def wait() -> None:
            arrived()
            self.under_way[own] -= 1

        return wait


class Activations:
    """What is alive as long as the activations of a micro-batch."""


class Keep(torch.autograd.Function):
    """Returns its input; the graph that computed it then also keeps another object."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kept: Activations) -> Tensor:
        ctx.kept = kept
        return x.view_as(x)

    @staticmethod
    def backward(_: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


@pytest.mark.parametrize("kind", ["gpipe", "1f1b"])
def test_stages_execute_their_schedule_and_hold_no_more(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1F1B holds the activations of as many micro-batches as stages are left, and the messages of
    as many, and one gradient; GPipe those of all four."""
    passes, alive = [list[str]() for _ in range(3)], [WeakSet[Activations]() for _ in range(3)]
    held, watched = [list[int]() for _ in range(3)], list[Watched]()
    run, backward = Stage._run, torch.autograd.backward

    def watch_forward(stage: Stage, x: Tensor) -> Tensor:
        output, rank = run(stage, x), stage._ranks.rank
        if not torch.is_grad_enabled():
            return output
        alive[rank].add(kept := Activations())
        passes[rank].append(f"F{len([p for p in passes[rank] if 'F' in p])}")
        held[rank].append(len(alive[rank]))
        assert isinstance(stage._ranks, Watched)
        watched.append(stage._ranks)
        return Keep.apply(output, kept)  # type: ignore[no-any-return, no-untyped-call]

    def watch_backward(output: Tensor, grad: Tensor | None) -> None:
        rank = int(threading.current_thread().name)
        passes[rank].append(f"B{len([p for p in passes[rank] if 'B' in p])}")
        backward(output, grad)

    monkeypatch.setattr(Stage, "_run", watch_forward)
    monkeypatch.setattr(torch.autograd, "backward", watch_backward)
    parts = train_split("nature", 1, 1, 3, kind, Watched)
    assert [" ".join(own) for own in passes] == ORDER[kind]
    assert [max(own) for own in held] == ([4, 4, 4] if kind == "gpipe" else [3, 2, 1])
    assert watched[0].most == ([4, 4, 4] if kind == "gpipe" else [3, 3, 2])
    assert watched[0].under_way == [0, 0, 0]
    for part in parts:
        assert isinstance(part.stage, Stage)
        assert 0 < part.stage.idle_s < part.stage.learnt_s
        assert part.stage.report()["idle_slots"] == pytest.approx(2 / 6)
