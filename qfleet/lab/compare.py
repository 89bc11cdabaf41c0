"""Two configurations on the same batches: after which update do their weights differ, and how much?

In: two configurations that have the same network and the same samples per update. Out: the
difference of their weights after every update. Both start with the weights of the first one. The
batches are drawn once, from steps of its environment with random actions. Ranks of an all-reduce
are threads here, each of which learns from its part of every batch.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Queue
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from qfleet.accelerator.compiling import Compilable
from qfleet.agent.learner import Learner
from qfleet.agent.weights import FlatWeights
from qfleet.config.config import Config
from qfleet.config.validation import validate
from qfleet.core.errors import ConfigError
from qfleet.core.seeding import Seeds
from qfleet.core.types import BATCH_FIELDS, Batch, Block, Clock, EnvSpec, Memory, StateDict
from qfleet.engines import serial
from qfleet.engines.all_reduce.compression import make_exchange
from qfleet.engines.all_reduce.mesh import axes_of, use_whole_norm
from qfleet.engines.all_reduce.rank import rank_config, whole_config
from qfleet.engines.all_reduce.updater import AllReduceUpdater
from qfleet.engines.factories import make_learner, make_updater
from qfleet.engines.parts import Setup
from qfleet.engines.placement import Placement
from qfleet.engines.torch_settings import TorchSettings
from qfleet.engines.tuning import apply_precision
from qfleet.networks.factory import make_network
from qfleet.networks.parallel.layout import Layout
from qfleet.networks.parallel.split import make_part
from qfleet.networks.qnetwork import QNetwork
from qfleet.telemetry.faults import FaultLog
from qfleet.telemetry.timers import Timers

BATCHES_OF_STEPS = 8
"""Env steps that are collected, in batches."""
RANKS_S = 60.0
"""Deadline of the ranks for each other."""


OnUpdate: TypeAlias = "Callable[[int, Learner, FixedBatches, Whole], None]"
"""Called after every update with the rank, its learner and its memory."""


@dataclass(frozen=True)
class Comparison:
    """The differences of two trajectories of weights, one entry per update."""

    largest: list[float]
    """Largest absolute difference of a weight."""
    relative: list[float]
    """Norm of the difference over the norm of how far the first one has moved."""

    @property
    def first_difference(self) -> int | None:
        """The first update, from 1, after which a bit differs; None: there is none."""
        return next((i for i, number in enumerate(self.largest, 1) if number != 0), None)


class ThreadRanks:
    """Ranks that are threads; a thread's name is its number."""

    def __init__(self, size: int, members: Sequence[int] = ()) -> None:
        """``members``: the numbers of the threads; default: 0 to ``size`` − 1."""
        self.size, self.exchanges, self._members = size, size > 1, members or range(size)
        self.bytes_sent = self.messages = 0
        self._tensors: tuple[dict[int, Tensor], ...] = {}, {}
        """Of the newest exchange and the one before, which a slower rank may still read."""
        self._newest = [0] * size
        self._barrier = threading.Barrier(size)
        self._sent = defaultdict[tuple[int, int], Queue[tuple[Tensor, threading.Event]]](Queue)
        """By sender and receiver."""

    @property
    def rank(self) -> int:
        """The place of this thread among these ranks."""
        if self.size == 1:
            return 0  # in any thread
        return self._members.index(int(threading.current_thread().name))

    def sum(self, tensor: Tensor) -> None:
        tensor.copy_(torch.stack(self.gather(tensor)).sum(0))

    def gather(self, tensor: Tensor) -> list[Tensor]:
        own = self.rank
        assert tensor.is_contiguous(), "other ranks may have this tensor in another layout"
        self._newest[own] ^= 1
        tensors = self._tensors[self._newest[own]]
        tensors[own] = tensor.clone()
        self._barrier.wait(RANKS_S)
        return [tensors[rank] for rank in range(self.size)]

    def broadcast(self, tensor: Tensor, rank: int) -> None:
        tensor.copy_(self.gather(tensor)[rank])

    def send(self, tensor: Tensor, rank: int) -> Callable[[], None]:
        arrived = threading.Event()
        self._sent[self.rank, rank].put((tensor.clone(), arrived))

        def wait() -> None:
            assert arrived.wait(RANKS_S), f"rank {rank} did not receive within {RANKS_S:g} s"

        return wait

    def receive(self, tensor: Tensor, rank: int) -> None:
        sent, arrived = self._sent[rank, self.rank].get(timeout=RANKS_S)
        tensor.copy_(sent)
        arrived.set()

    def run(self, work: Callable[[int], None]) -> None:
        """Call ``work`` with each rank, in a thread of its own; raise the first error."""
        errors: list[BaseException] = []

        def guarded(rank: int) -> None:
            try:
                work(rank)
            except BaseException as error:
                errors.append(error)
                self._barrier.abort()

        threads = [
            threading.Thread(target=guarded, args=(rank,), name=f"{rank:04}", daemon=True)
            for rank in range(self.size)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]


class FixedBatches(Memory):
    """A memory that gives a rank its part of each batch, one batch after another."""

    def __init__(self, batches: Sequence[Batch], part: slice) -> None:
        self._batches, self._part, self.device = iter(batches), part, torch.device("cpu")
        self.priority = torch.zeros(0)
        """The newest priorities."""

    def sample(self, count: int, beta: float | Tensor) -> Batch:
        del beta
        whole = next(self._batches)
        batch = Batch(*(getattr(whole, name)[self._part].clone() for name in BATCH_FIELDS))
        assert len(batch) == count
        return batch

    def update_priorities(self, index: Tensor, priority: Tensor) -> None:
        del index
        self.priority = priority.clone()

    def extend(self, block: Block) -> None:
        raise ValueError(f"{block.rows} rows cannot be added: the batches are fixed")

    def can_sample(self) -> bool:
        return True

    def generators(self) -> list[torch.Generator]:
        return []

    def compilables(self) -> list[Compilable]:
        return []

    def end_open_episodes(self) -> None:
        return

    def close(self) -> None:
        return

    def state_dict(self) -> StateDict:
        return {}

    def load_state_dict(self, state: StateDict) -> None:
        del state


def collect_batches(config: Config, updates: int) -> tuple[EnvSpec, list[Batch]]:
    """Return batches of random steps in the environment of this configuration."""
    size = whole_config(config).batch_size
    steps = BATCHES_OF_STEPS * size + 8 * config.envs
    plain = config.replace(
        engine="serial", steps=10**9, learning_starts=10**8, precision="auto", compile="off",
        exploration_initial_eps=1.0, exploration_final_eps=1.0, exploration_ladder=False,
        buffer_size=2 * steps, gradient_compression="none", workers=Config.workers,
        batch_per_rank=0, lr_scaling="none", tensor_parallel=1,
        pipeline_parallel=1, record="", replay_dir="",
    )  # fmt: skip
    parts = serial.build(Setup(plain, FaultLog()))
    try:
        serial.run(parts, lambda: parts.clock.env_steps < steps)
        return parts.spec, [parts.memory.sample(size, 1.0) for _ in range(updates)]
    finally:
        parts.close()


def initial_weights(config: Config, spec: EnvSpec) -> Tensor:
    network = make_network(config, spec, torch.device("cpu"), Seeds.of(config.seed).network)
    return FlatWeights(network).data


class Whole(NamedTuple):
    """Returns a whole flat vector, given a rank's part of it; all ranks call it together."""

    ranks: ThreadRanks
    layout: Layout | None

    def __call__(self, part: Tensor) -> Tensor:
        return part if self.layout is None else self.layout.join(self.ranks.gather(part))


class ThreadMesh(NamedTuple):
    """The axes of ``Mesh``, of a rank that is a thread."""

    data: ThreadRanks
    copy: ThreadRanks
    stages: ThreadRanks
    tensor: ThreadRanks
    every: ThreadRanks


def make_meshes(config: Config, every: ThreadRanks, part: type[ThreadRanks]) -> list[ThreadMesh]:
    """Return the mesh of each rank. ``part``: the kind of ranks that hold parts of a network."""
    axes = list[dict[int, ThreadRanks]]()
    kinds: tuple[type[ThreadRanks], ...] = type(every), ThreadRanks, part, part, ThreadRanks
    for kind, lists in zip(kinds, axes_of(every.size, config), strict=True):
        axes.append({})
        for members in lists:
            axes[-1] |= dict.fromkeys(members, kind(len(members), members))
    if config.ranks_per_copy == 1:
        axes[0] = dict.fromkeys(range(every.size), every)
    return [ThreadMesh(*(axis[rank] for axis in axes)) for rank in range(every.size)]


def learn_batches(
    config: Config,
    spec: EnvSpec,
    batches: Sequence[Batch],
    initial: Tensor,
    on_update: OnUpdate,
    ranks: ThreadRanks | None = None,
    part_ranks: type[ThreadRanks] = ThreadRanks,
) -> None:
    """Learn from the batches, from ``initial`` weights on: one learner, or one per rank.

    ``ranks`` add gradients up, ``part_ranks`` hold the parts of layers and the stages.
    """
    size = config.workers if config.engine == "all-reduce" else 1
    if size > 1:
        config = config.replace(device="cpu")  # threads would share the streams of a GPU
    else:
        config = config.replace(tensor_parallel=1, pipeline_parallel=1)
    ranks = ranks or ThreadRanks(size)
    meshes, whole = make_meshes(config, ranks, part_ranks), whole_config(config)
    parts = config.ranks_per_copy

    def learn(rank: int) -> None:
        mesh, layouts = meshes[rank], list[Layout]()
        own = rank_config(config, rank) if size > 1 else whole
        first = sum(rank_config(config, r).batch_size for r in range(rank // parts))
        memory = FixedBatches(batches, slice(first, first + own.batch_size))
        place, clock, timers = Placement.of(own, spec, in_background=False), Clock(), Timers()

        def network() -> QNetwork:
            seed = Seeds.of(config.seed).network
            part, layout = make_part(own, spec, place.device, seed, mesh.tensor, mesh.stages)
            layouts.append(layout)
            return part

        def updater(weights: FlatWeights) -> AllReduceUpdater:
            for layout in layouts[:1]:
                use_whole_norm(weights, layout, mesh.copy)
            local, share = make_updater(own, weights, False), own.batch_size / whole.batch_size
            exchange = make_exchange(config, weights)
            return AllReduceUpdater(weights, local, mesh.data, exchange, share, timers)

        learner = make_learner(
            own, spec, place, memory, clock, timers,
            updater_factory=updater, network_factory=network if parts > 1 else None,
        )  # fmt: skip
        apply_precision(own, learner.networks)
        if initial.numel() != (layouts[0].whole_size if layouts else len(learner.weights.data)):
            raise ConfigError("the two configurations have different networks")
        learner.weights.data.copy_(layouts[0].cut(initial, mesh.copy.rank) if layouts else initial)
        learner.move_target(1.0)
        for _ in batches:
            learner.learn(1)
            clock.env_steps += max(1, config.train_freq // config.gradient_steps)
            on_update(rank, learner, memory, Whole(mesh.copy, layouts[0] if layouts else None))

    ranks.run(learn)


def compare(first: Config, second: Config, updates: int) -> Comparison:
    """Compare the weights of rank 0 after each of ``updates`` updates."""
    first, second = validate(first), validate(second)
    sizes = [whole_config(config).batch_size for config in (first, second)]
    if sizes[0] != sizes[1]:
        raise ConfigError(
            f"the configurations have {sizes[0]} and {sizes[1]} samples per update; give both the "
            "same batch_size"
        )
    for config in (first, second):
        if config.engine not in ("auto", "serial", "all-reduce"):
            raise ConfigError(f"compare knows serial and all-reduce, not --engine {config.engine}")
        if not config.replay or config.envs == 0 or config.population > 1:
            raise ConfigError("compare needs one agent, with replay, and envs of at least 1")
    settings = TorchSettings()
    try:
        spec, batches = collect_batches(first, updates)
        initial = initial_weights(first, spec)
        ours: list[Tensor] = []
        largest, relative = list[float](), list[float]()

        def keep(rank: int, learner: Learner, _: FixedBatches, whole: Whole) -> None:
            weights = whole(learner.weights.data)
            if rank == 0:
                ours.append(weights.cpu().clone())

        def measure(rank: int, learner: Learner, _: FixedBatches, whole: Whole) -> None:
            weights = whole(learner.weights.data)
            if rank == 0:
                mine = ours[len(largest)].double()
                difference, moved = (mine - w.cpu().double() for w in (weights, initial))
                largest.append(float(difference.abs().max()))
                relative.append(float(difference.norm() / moved.norm()))

        learn_batches(first, spec, batches, initial, keep)
        settings.restore()
        learn_batches(second, spec, batches, initial, measure)
    finally:
        settings.restore()
    return Comparison(largest, relative)
