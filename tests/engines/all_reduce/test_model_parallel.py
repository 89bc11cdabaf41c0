"""Ranks that hold parts of one network: they are one learner with the whole network."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import qfleet
from qfleet.agent.learner import Learner
from qfleet.agent.weights import FlatWeights
from qfleet.config.config import Config
from qfleet.config.validation import validate
from qfleet.core.errors import ConfigError
from qfleet.core.types import BATCH_FIELDS, Batch, Block, EnvSpec, StateDict
from qfleet.engines.all_reduce.group import Order
from qfleet.engines.all_reduce.inference import SharedInference
from qfleet.engines.all_reduce.rank import rank_config
from qfleet.engines.all_reduce.replay import SharedReplay
from qfleet.engines.all_reduce.split_model import LeadingEvaluator, SplitModel
from qfleet.lab.compare import (
    RANKS_S,
    FixedBatches,
    ThreadRanks,
    Whole,
    collect_batches,
    compare,
    initial_weights,
    learn_batches,
)
from qfleet.memory.samplers import UniformSampler
from qfleet.networks.factory import make_network
from qfleet.networks.parallel import stages
from qfleet.networks.parallel.layout import Layout, Piece
from qfleet.networks.parallel.split import make_part
from qfleet.storage.checkpoint import load_checkpoint, save_checkpoint
from qfleet.storage.state_checks import check_like
from support.configs import tiny_config, tiny_fields

CPU = torch.device("cpu")
UPDATES, CONTROL_UPDATES = 100, 20
"""Those of comparisons, and those after which a missing exchange shows."""


class NoSum(ThreadRanks):
    """A negative control: nothing is added up."""

    def sum(self, tensor: Tensor) -> None:
        return


class NoGather(ThreadRanks):
    """A negative control: every rank sees its own part in place of all others."""

    def gather(self, tensor: Tensor) -> list[Tensor]:
        return [tensor] * self.size


class NoBroadcast(ThreadRanks):
    """A negative control: only the last stage has the output of the network."""

    def broadcast(self, tensor: Tensor, rank: int) -> None:
        tensor.mul_(self.rank == rank).nan_to_num_(0.0)


class Apart(ThreadRanks):
    """A negative control: the copies of the network do not add their gradients up."""

    def sum(self, tensor: Tensor) -> None:
        tensor.mul_(self.size)


SERIAL = tiny_config(
    algo="double-dqn", precision="fp64", batch_size=32, learning_rate=1e-3, steps=10_000,
    prioritized_replay=True, target_update_interval=80, engine="serial", net_arch=(16, 12),
    max_grad_norm=0.5, dueling=True, micro_batches=2,
)  # fmt: skip


@functools.cache
def draw() -> tuple[EnvSpec, list[Batch]]:
    spec, batches = collect_batches(SERIAL, UPDATES)
    generator = torch.Generator().manual_seed(3)
    for batch in batches:  # as if they had been drawn by priority
        batch.weight.uniform_(generator=generator)
    return spec, batches


@functools.cache
def plain(updates: int = UPDATES) -> dict[str, Tensor]:
    return learn(SERIAL, updates=updates)[0]


def learn(
    config: Config, *kinds: Any, updates: int = UPDATES
) -> tuple[dict[str, Tensor], list[dict[str, int]]]:
    """Return the whole state after the updates, with the losses, and the bytes of each rank."""
    spec, batches = draw()
    found: dict[str, Tensor] = {}
    has_ranks = config.engine == "all-reduce"
    held: list[dict[str, int]] = [{} for _ in range(config.workers if has_ranks else 1)]
    losses: list[list[float]] = [[] for _ in held]

    def keep(
        rank: int, learner: Learner, _: FixedBatches, whole: Callable[[Tensor], Tensor]
    ) -> None:
        losses[rank].append(learner.read_metrics()["loss"])
        if len(losses[rank]) < updates:
            return
        state = learner.state_dict()
        vectors = {
            "weights": state["weights"],
            "target_weights": state["target_weights"],
            "gradient": learner.weights.grad,
            "first": state["optimiser"]["first"],
            "second": state["optimiser"]["second"],
        }
        held[rank] = {name: vector.nbytes for name, vector in vectors.items()}
        joined = {name: whole(vector).clone() for name, vector in vectors.items()}
        if rank == 0:
            found.update(joined)

    initial = initial_weights(config, spec)
    learn_batches(config, spec, batches[:updates], initial, keep, *kinds)
    found["loss"] = torch.tensor(losses, dtype=torch.float64).mean(
        0
    )  # of a batch: the mean of all parts
    return found, held


def split_config(mesh: tuple[int, int, int]) -> Config:
    """``mesh``: ranks, parts of layers and stages."""
    names = "workers", "tensor_parallel", "pipeline_parallel"
    return SERIAL.replace(engine="all-reduce", **dict(zip(names, mesh, strict=True)))


def differs(mesh: tuple[int, int, int], *kinds: Any) -> bool:
    """Return whether weights or losses are clearly not those of the plain network."""
    split, _ = learn(split_config(mesh), *kinds, updates=CONTROL_UPDATES)
    whole = plain(CONTROL_UPDATES)
    return any((split[n] - whole[n]).abs().max() > 1e-4 for n in ("weights", "loss"))


# A torso 4 → 16 → 12 and streams 12 → 2 and 12 → 1. Weights that ranks hold: those of a layer that
# is split by outputs have a part of its bias, those of one that is split by inputs all of it.
TORSO, STREAMS = (4 * 16 + 16) + (16 * 12 + 12), (12 * 2 + 2) + (12 + 1)
HALF_FIRST = (4 * 16 + 16) // 2
HALF_TORSO, HALF_STREAMS = (4 * 16 + 16) // 2 + 16 * 12 // 2 + 12, (12 * 2 + 2) // 2 + 6 + 1
HELD = {
    (2, 2, 1): [HALF_TORSO + HALF_STREAMS] * 2,
    (4, 2, 1): [HALF_TORSO + HALF_STREAMS] * 4,
    (2, 1, 2): [16 * 4 + 16, TORSO - 16 * 4 - 16 + STREAMS],
    (4, 1, 2): [16 * 4 + 16, TORSO - 16 * 4 - 16 + STREAMS] * 2,
    (4, 2, 2): [HALF_FIRST] * 2 + [HALF_TORSO - HALF_FIRST + HALF_STREAMS] * 2,
    (8, 2, 2): ([HALF_FIRST] * 2 + [HALF_TORSO - HALF_FIRST + HALF_STREAMS] * 2) * 2,
}
"""Ranks, parts of layers and stages → weights of each rank."""


@pytest.mark.parametrize(
    "mesh",
    [pytest.param(mesh, marks=pytest.mark.slow if mesh[0] > 2 else ()) for mesh in HELD],
    ids=str,
)
def test_parts_of_a_network_are_the_whole_network(mesh: tuple[int, int, int]) -> None:
    """In float64, after 100 updates of double DQN with Adam, clipping and a target network."""
    split, held = learn(split_config(mesh))
    for name, theirs in plain().items():
        torch.testing.assert_close(split[name], theirs, rtol=0, atol=1e-10, msg=name)
    assert held == [dict.fromkeys(held[0], 8 * size) for size in HELD[mesh]]


def test_stages_of_gpipe_are_the_whole_network() -> None:
    found, _ = learn(split_config((2, 1, 2)).replace(pipeline_schedule="gpipe"))
    for name, theirs in plain().items():
        torch.testing.assert_close(found[name], theirs, rtol=0, atol=1e-10, msg=name)


@pytest.mark.parametrize(
    ("mesh", "ranks", "tensor_ranks"),
    [
        ((4, 2, 1), ThreadRanks, NoSum),
        ((4, 2, 1), ThreadRanks, NoGather),
        ((4, 2, 1), Apart, ThreadRanks),
        ((2, 1, 2), ThreadRanks, NoBroadcast),
        pytest.param((4, 1, 2), Apart, ThreadRanks, marks=pytest.mark.slow),
        pytest.param((4, 2, 2), ThreadRanks, NoSum, marks=pytest.mark.slow),
    ],
)
def test_without_an_exchange_they_are_not(
    mesh: tuple[int, int, int], ranks: type[ThreadRanks], tensor_ranks: type[ThreadRanks]
) -> None:
    assert differs(mesh, ranks(mesh[0]), tensor_ranks)
    assert not differs(mesh)


@pytest.mark.parametrize("mesh", [(2, 1, 2), (4, 2, 2)], ids=str)
@pytest.mark.parametrize("step", [-1, 1], ids=["activations", "gradients"])
def test_without_the_messages_between_stages_they_are_not(
    mesh: tuple[int, int, int], step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The activations of the stage before, or the gradients of the next one."""
    wait = stages.Stage._wait

    def without(stage: stages.Stage, tensor: Tensor, rank: int) -> Tensor:
        received = wait(stage, tensor, rank)
        return torch.zeros_like(received) if rank == stage._ranks.rank + step else received

    monkeypatch.setattr(stages.Stage, "_wait", without)
    assert differs(mesh)


def test_the_command_that_compares_knows_parts_of_networks() -> None:
    config = tiny_config(engine="serial", batch_size=32, precision="fp64")
    split = config.replace(engine="all-reduce", workers=2, tensor_parallel=2)
    assert max(compare(config, split, 20).relative) < 1e-12
    with pytest.raises(ConfigError, match="different networks"):
        compare(config, split.replace(net_arch=(8,)), 1)


def test_all_ranks_skip_a_gradient_that_is_not_finite() -> None:
    config = tiny_config(engine="all-reduce", workers=4, tensor_parallel=2, batch_size=32)
    spec, batches = collect_batches(config.replace(engine="serial"), 3)
    batches[1].reward[20] = torch.nan  # in the samples of the second copy
    weights: dict[int, list[Tensor]] = {rank: [] for rank in range(4)}

    def keep(rank: int, learner: Learner, *_: Any) -> None:
        weights[rank].append(learner.weights.data.clone())

    learn_batches(config, spec, batches, initial_weights(config, spec), keep)
    for first, second, third in weights.values():
        assert torch.equal(first, second)
        assert not torch.equal(second, third)
        assert torch.isfinite(third).all()


# --- batches and actions ----------------------------------------------------------------------


def test_every_rank_learns_from_what_its_peers_have_drawn() -> None:
    """Two batches of six: of each, a rank draws three samples, and gets their priorities."""
    spec = EnvSpec("numbers", (1,), "float32", 2)
    peers, drawn, updated = ThreadRanks(2), dict[int, Batch](), dict[int, Tensor]()

    def draw(rank: int) -> None:
        group: Any = SimpleNamespace(exchanges=False)
        sampler = UniformSampler(torch.Generator().manual_seed(rank))
        ring = SharedReplay(group, spec, 2, 40, 1, 0.99, sampler, CPU, peers=peers, share=3)
        shape = (8, 2)
        flags, obs = torch.zeros(shape, dtype=torch.uint8), torch.zeros(*shape, 1)
        rewards = torch.full(shape, float(rank))
        ring.extend(Block(obs, torch.ones(shape).long(), rewards, flags))
        drawn[rank] = ring.sample(12, 1.0)
        ring.sampler = SimpleNamespace(update=lambda index, _: updated.update({rank: index}))  # type: ignore[assignment]
        ring.update_priorities(torch.arange(6), torch.arange(6.0))

    peers.run(draw)
    assert drawn[0].reward.tolist() == [0, 0, 0, 1, 1, 1] * 2
    for name in BATCH_FIELDS:
        assert torch.equal(getattr(drawn[0], name), getattr(drawn[1], name))
    assert [updated[rank].tolist() for rank in (0, 1)] == [[0, 1, 2], [3, 4, 5]]


def test_ranks_act_together_in_their_own_environments() -> None:
    """The actions are those of the whole network, also while one rank explores only."""
    config, spec = tiny_config(net_arch=(8, 8)), EnvSpec("vector", (4,), "float32", 3)
    whole = make_network(config, spec, CPU, 5)
    states = np.random.default_rng(1).normal(size=(2, 6, 4)).astype(np.float32)
    peers, chosen = ThreadRanks(2), dict[int, Any]()

    def act(rank: int) -> None:
        network, _ = make_part(config, spec, CPU, 5, peers, ThreadRanks(1, [rank]))
        inference = SharedInference(peers, network, CPU, spec.obs_dtype, 0)
        obs, opened = states[rank], np.zeros(6, dtype=np.bool_)
        chosen[rank] = inference.choose(0, 0, 0, slice(0, 6), obs, opened, needed=rank == 0)

    peers.run(act)
    for rank in (0, 1):
        expected = whole.q_values(torch.from_numpy(states[rank])).argmax(1)
        assert chosen[rank].tolist() == expected.tolist()
    assert chosen[0].tolist() != chosen[1].tolist()


# --- checkpoints ------------------------------------------------------------------------------


class ThreadGroup:
    """The group of ranks that are threads: orders and states go through queues."""

    def __init__(self, size: int) -> None:
        self.size, self._orders = size, [Queue[tuple[Order, float]]() for _ in range(size)]
        self._states = [Queue[Any]() for _ in range(size)]
        self.ranks = ThreadRanks(size)

    @property
    def rank(self) -> int:
        return int(threading.current_thread().name)

    def give_order(self, order: Order, number: float = 0.0) -> None:
        for queue in self._orders[1:]:
            queue.put((order, number))

    def send_state(self, state: Any, rank: int) -> None:
        assert rank == 0
        self._states[self.rank].put(state.clone())

    def receive_state(self, rank: int) -> Any:
        return self._states[rank].get(timeout=RANKS_S)

    def lead(self, model: SplitModel, work: Callable[[], None]) -> None:
        """Let rank 0 do the work, and the others what it orders meanwhile."""
        if self.rank == 0:
            work()
            self.give_order(Order.STOP)
            return
        while (told := self._orders[self.rank].get(timeout=RANKS_S))[0] != Order.STOP:
            order, number = told
            (model.follow if order == Order.FORWARD else model.send_piece)(int(number))


LAYOUTS = {
    "plain": (1, 1, 1),
    "tensor 2": (2, 2, 1),
    "pipeline 2": (2, 1, 2),
    "tensor 2 × pipeline 2": (4, 2, 2),
    "data 2": (2, 1, 1),
    "data 2 × tensor 2": (4, 2, 1),
    "data 2 × pipeline 2": (4, 1, 2),
    "data 2 × tensor 2 × pipeline 2": (8, 2, 2),
}
"""Name → ranks, parts of layers and stages."""


def laid_out(name: str) -> Config:
    workers, tensor, pipeline = LAYOUTS[name]
    return tiny_config(
        algo="double-dqn", precision="fp64", batch_size=32, engine="all-reduce", workers=workers,
        tensor_parallel=tensor, pipeline_parallel=pipeline, net_arch=(16, 12),
    )  # fmt: skip


@pytest.fixture(scope="module")
def drawn() -> tuple[EnvSpec, list[Batch], Tensor]:
    spec, batches = collect_batches(laid_out("plain").replace(engine="serial"), 2)
    return spec, batches, initial_weights(laid_out("plain"), spec)


@pytest.fixture(scope="module")
def checkpoints(
    drawn: tuple[EnvSpec, list[Batch], Tensor], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, StateDict]:
    """Return the learner's state that each layout has saved after an update, by name."""
    spec, batches, initial = drawn
    states: dict[str, StateDict] = {}
    for name, (size, *_) in LAYOUTS.items():
        folder, group = tmp_path_factory.mktemp("checkpoint"), ThreadGroup(size)

        def save(
            rank: int, learner: Learner, _: Any, whole: Whole, to: Path = folder, group: Any = group
        ) -> None:
            if whole.layout is not None:
                model = SplitModel(learner, whole.layout, group, group.ranks, spec)
                state = model.state_dict()
                group.lead(model, lambda: save_checkpoint(to, 1, {"learner": state}, {}, 1))
            elif rank == 0:
                save_checkpoint(to, 1, {"learner": learner.state_dict()}, {}, 1)

        learn_batches(laid_out(name), spec, batches[:1], initial, save)
        states[name] = load_checkpoint(folder).parts["learner"]
    return states


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_checkpoint_of_every_layout_loads_under_every_other(
    layout: str,
    drawn: tuple[EnvSpec, list[Batch], Tensor],
    checkpoints: dict[str, StateDict],
) -> None:
    """It is the plain one, and the next update from it is the plain run's."""
    (spec, batches, initial), group = drawn, ThreadGroup(LAYOUTS[layout][0])
    alone, reached = list[Tensor](), dict[str, Tensor]()
    keep = lambda _, learner, *__: alone.append(learner.weights.data.clone())  # noqa: E731
    learn_batches(laid_out("plain"), spec, batches, initial, keep)
    names, turn = list(LAYOUTS), threading.local()

    def load(rank: int, learner: Learner, _: Any, whole: Whole) -> None:
        number = turn.number = getattr(turn, "number", -1) + 1
        joined = whole(learner.weights.data)
        if rank == 0 and number:
            reached[names[number - 1]] = joined.clone()
        if number == len(names):
            return
        state = checkpoints[names[number]] | {"objective": learner.state_dict()["objective"]}
        if whole.layout is not None:
            model = SplitModel(learner, whole.layout, group, group.ranks, spec)  # type: ignore[arg-type]
            check_like(state, model.state_dict(), "learner")
            state = model.cut(state, rank)
        learner.load_state_dict(state)

    every = [batches[0], *[batches[1]] * len(names)]
    learn_batches(laid_out(layout), spec, every, initial, load)
    assert set(reached) == set(LAYOUTS)
    for name, weights in reached.items():
        torch.testing.assert_close(weights, alone[1], rtol=0, atol=1e-10, msg=name)
    assert (alone[1] - alone[0]).abs().max() > 1e-5


def test_a_run_begins_with_the_weights_of_a_plain_network(
    drawn: tuple[EnvSpec, list[Batch], Tensor],
) -> None:
    """Of ``init_from``: every rank gets its part, of both networks."""
    spec, batches, initial = drawn
    config = laid_out("tensor 2 × pipeline 2")
    other = FlatWeights(make_network(config, spec, CPU, 77))
    small = FlatWeights(make_network(config.replace(net_arch=(8,)), spec, CPU, 77))
    group, joined = ThreadGroup(4), dict[str, Tensor]()

    def start(rank: int, learner: Learner, _: Any, whole: Whole) -> None:
        if rank > 0:
            return
        assert whole.layout is not None
        model = SplitModel(learner, whole.layout, group, group.ranks, spec)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="init_from has another network"):
            model.copy_from(small)
        model.copy_from(other)
        parts = [model.take_part(rank) for rank in range(4)]
        assert torch.equal(learner.weights.data, parts[0]["weights"])
        for name in ("weights", "target_weights"):
            joined[name] = whole.layout.join([part[name] for part in parts])
        model.forget_loaded()
        assert model.take_part(1) == {}

    learn_batches(config, spec, batches[:1], initial, start)
    assert torch.equal(joined["weights"], other.data)
    assert torch.equal(joined["target_weights"], other.data)


def test_rank_0_asks_for_one_parameter_at_a_time() -> None:
    """A saved vector is the whole one, and no piece of it is larger than a parameter."""
    pieces = [Piece("weight", (8, 4), 0), Piece("bias", (4,), None), Piece("last", (4, 8), 1)]
    numbers = torch.arange(8 * 4 + 4 + 4 * 8)
    for ranks in (2, 4):
        layout = Layout(pieces, ranks)
        parts = [layout.cut(numbers, rank) for rank in range(ranks)]
        assert all(len(part) == layout.local_size(0) < len(numbers) for part in parts)
        assert parts[1][0] == 8 // ranks * 4
        held = [layout.split_vector(part, rank) for rank, part in enumerate(parts)]
        joined = list(layout.join_each(lambda rank, piece, held=held: held[rank][piece.name]))  # type: ignore[misc]
        assert list(map(len, joined)) == [32, 4, 32]
        assert torch.equal(torch.cat(joined), numbers)


def test_all_ranks_evaluate_together(drawn: tuple[EnvSpec, list[Batch], Tensor]) -> None:
    """Rank 0 leads: its values are those of the whole network, though it has a part of it.

    Ranks that hold another copy of the network have nothing to compute.
    """
    spec, batches, initial = drawn
    alone, found, obs = list[Tensor](), list[Tensor](), batches[0].obs
    keep = lambda _, learner, *__: alone.append(learner.online.q_values(obs))  # noqa: E731
    learn_batches(laid_out("plain"), spec, batches[:1], initial, keep)
    for layout in ("tensor 2", "data 2 × pipeline 2"):
        group: Any = ThreadGroup(LAYOUTS[layout][0])
        computed = set[int]()

        def evaluate(
            rank: int,
            learner: Learner,
            _: Any,
            whole: Whole,
            group: Any = group,
            computed: set[int] = computed,
        ) -> None:
            assert whole.layout is not None
            hook = learner.online.register_forward_pre_hook(lambda *_: computed.add(rank))
            model = SplitModel(learner, whole.layout, group, group.ranks, spec)
            player: Any = SimpleNamespace(play=lambda _: found.append(model.online.q_values(obs)))
            group.lead(model, lambda: LeadingEvaluator(model, player).play(lambda _: False))
            hook.remove()
            assert not model.online._forward_pre_hooks

        learn_batches(laid_out(layout), spec, batches[:1], initial, evaluate)
        torch.testing.assert_close(found[-1], alone[0].detach(), rtol=0, atol=1e-10)
        assert computed == {0, 1}
    assert len(found) == 2


def learner_of(run: Path) -> dict[str, Any]:
    return load_checkpoint(run / "checkpoints").parts["learner"]


@pytest.mark.slow
def test_a_run_resumes_with_another_split(tmp_path: Path) -> None:
    """Ranks collect and draw as they do without a split, so the whole run is the same one."""
    told = tiny_fields(
        engine="all-reduce", workers=2, envs=2, device="cpu", learning_starts=64, train_freq=8,
        buffer_size=300, target_update_interval=100, steps=240, precision="fp64", eval_freq=120,
    )  # fmt: skip
    half = qfleet.RunOptions(stop_after=144)
    whole = qfleet.train("CartPole-v1", run_dir=tmp_path / "whole", **told)
    split = told | {"tensor_parallel": 2}
    qfleet.train("CartPole-v1", run_dir=tmp_path / "split", options=half, **split)
    stages = qfleet.resume(
        tmp_path / "split", tensor_parallel=1, pipeline_parallel=2, micro_batches=4
    )
    theirs, ours = (learner_of(tmp_path / name) for name in ("whole", "split"))
    for vector in ("weights", "target_weights"):
        torch.testing.assert_close(ours[vector], theirs[vector], rtol=0, atol=1e-10)
    for which in ("best", "last"):  # evaluated and saved by ranks that hold parts
        pair = [qfleet.load(tmp_path / name, which=which) for name in ("whole", "split")]
        values = [policy.q_values(np.ones(4, dtype=np.float32)) for policy in pair]
        np.testing.assert_allclose(*values, rtol=0, atol=1e-10)
    assert isinstance(stages, qfleet.Trained)
    assert stages.result.eval_return_mean == whole.result.eval_return_mean
    for rank in stages.result.fleet["ranks"]:
        assert rank["pipeline"]["idle_slots"] == pytest.approx(1 / 5)
        assert 0 < rank["pipeline"]["idle_share"] < 1
    # Micro-batches are of these stages: without any, they would be refused.
    more = qfleet.resume(tmp_path / "split", pipeline_parallel=1, steps=264)
    assert isinstance(more, qfleet.Trained)
    assert (more.config.micro_batches, more.result.env_steps) == (0, 264)


# --- settings ---------------------------------------------------------------------------------


def test_the_batch_of_a_copy_is_that_of_its_ranks() -> None:
    config = tiny_config(engine="all-reduce", workers=4, batch_size=32, tensor_parallel=2)
    own = [rank_config(config, rank) for rank in range(4)]
    assert [c.batch_size for c in own] == [16] * 4
    assert len({c.seed for c in own}) == 4  # every rank has environments of its own


def test_a_small_memory_does_not_depend_on_the_split() -> None:
    """Of which each rank writes a part into a checkpoint, to be read with another split."""
    config = tiny_config(engine="all-reduce", workers=8, batch_size=512, buffer_size=1000, envs=2)
    parts = (1, 2, 4, 8)
    own = [rank_config(config.replace(tensor_parallel=n), 0) for n in parts]
    assert [c.batch_size for c in own] == [64 * n for n in parts]
    assert [c.buffer_size for c in own] == [125] * 4


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tensor_parallel": 3}, "workers must be a multiple of tensor_parallel.*change"),
        ({"batch_size": 18}, "must divide batch_size 18.*change one of them"),
        ({"pipeline_parallel": 3}, "workers must be a multiple"),
        ({"algo": "rainbow"}, "noisy"),
        ({"algo": "iqn"}, "head 'iqn'"),
        ({"dropout": 0.1}, "dropout"),
        (
            {"micro_batches": 17, "pipeline_parallel": 2, "tensor_parallel": 1},
            "micro_batches must be ≤ 16.*raise batch_size",
        ),
        ({"micro_batches": 2}, "micro_batches 2 .*pipeline_parallel is 1; raise"),
        ({"pipeline_schedule": "gpipe"}, "pipeline_schedule 'gpipe' .*pipeline_parallel is 1"),
        ({"inference_device": "cpu"}, "inference_device 'cpu' is for --engine"),
        ({"network": "some.module:Torso"}, "qfleet's own networks"),
        ({"normalize_observations": True}, "normalize_observations"),
        ({"gradient_compression": "top-k"}, "gradient_compression 'top-k'"),
        ({"engine": "serial"}, "tensor_parallel 2 is for --engine all-reduce"),
    ],
)
def test_settings_that_cannot_work_are_refused(fields: dict[str, Any], words: str) -> None:
    told = {"engine": "all-reduce", "workers": 4, "tensor_parallel": 2, "batch_size": 32} | fields
    if told["engine"] == "serial":
        del told["workers"]
    with pytest.raises(ConfigError, match=words):
        validate(tiny_config(**told))


def test_a_split_that_divides_almost_nothing_is_refused() -> None:
    """Of widths 4, 127, 127 and 2, the last layer alone can be divided by two."""
    spec, ranks = EnvSpec("vector", (4,), "float32", 2), ThreadRanks(2)

    def make(rank: int) -> None:
        config = tiny_config(net_arch=(127, 127))
        make_part(config, spec, CPU, 5, ranks, ThreadRanks(1, [rank]))

    with pytest.raises(
        ConfigError, match=r"tensor_parallel 2 .*each part has 98% .*net_arch.*multiples"
    ):
        ranks.run(make)
