"""One rank: the parts of the pipeline, with the clock, ratio and batch of the whole run.

On a CPU these are the parts of ``serial``: collecting and learning take turns. On a GPU a thread
collects ahead, and if every rank has a GPU of its own, the recorded updates contain the exchange.

Every rank steps its own environments into its own replay memory. All ranks collect and learn in
step, so that each of them counts the env steps of all: schedules, target updates and the replay
ratio then follow the same clock everywhere without a message.
"""

from __future__ import annotations

import functools
import json
import math
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from qfleet.agent.inference import HostInference
from qfleet.agent.recorded_learner import RecordedLearner
from qfleet.agent.schedules import own_ladder
from qfleet.agent.weights import FlatWeights
from qfleet.config.config import Config
from qfleet.core.cores import usable_cores
from qfleet.core.errors import CheckpointError, ConfigError
from qfleet.core.seeding import Seeds, mix_seeds
from qfleet.core.types import EnvSpec, Memory, StateDict
from qfleet.data.dataset_memory import BatchShare
from qfleet.engines import offline, pipeline
from qfleet.engines.all_reduce.compression import Ranks, make_exchange
from qfleet.engines.all_reduce.group import TUNED_S, Group, Order
from qfleet.engines.all_reduce.inference import SharedInference
from qfleet.engines.all_reduce.mesh import Axis, Mesh, use_whole_norm
from qfleet.engines.all_reduce.replay import SharedReplay, deal, in_order
from qfleet.engines.all_reduce.split_model import LeadingEvaluator, SplitModel
from qfleet.engines.all_reduce.updater import AllReduceUpdater
from qfleet.engines.factories import make_memory, make_ring, make_updater
from qfleet.engines.loop import RateLimiter
from qfleet.engines.parts import LoopParts, Parts, Setup
from qfleet.engines.placement import Placement, learner_device
from qfleet.engines.tuning import Choice
from qfleet.envs.latency import latency_of
from qfleet.memory.columns import check_transitions
from qfleet.networks.dropout import Dropout
from qfleet.networks.parallel.layout import Layout
from qfleet.networks.parallel.split import make_part
from qfleet.networks.parallel.stages import Stage
from qfleet.networks.qnetwork import QNetwork
from qfleet.storage.state_checks import check_like
from qfleet.telemetry.timers import Timers
from qfleet.telemetry.usage import device_id

IN_STEP = "take over the state of rank 0"
"""What rank 0 waits for, before the first order."""


def whole_config(config: Config) -> Config:
    """Return the settings of all ranks as one learner: batch_size and rate are the effective ones.

    ``batch_per_rank`` × workers samples per update replace ``batch_size``, and ``lr_scaling`` says
    whether the learning rate grows with them.
    """
    batch_size = config.batch_per_rank * config.workers or config.batch_size
    grown = batch_size / config.batch_size
    factor = {"none": 1.0, "sqrt": math.sqrt(grown), "linear": grown}[config.lr_scaling]
    return config.replace(batch_size=batch_size, learning_rate=config.learning_rate * factor)


def rank_config(config: Config, rank: int) -> Config:
    """Return a rank's settings: its share of those that count over all ranks."""
    whole, size = whole_config(config), config.workers
    drawn = whole.batch_size // size + (rank < whole.batch_size % size)
    capacity = whole.replace(envs=config.envs * size).replay_capacity
    least = (config.n_steps + 2) * config.envs + drawn
    return whole.replace(
        # Ranks that hold parts of one network learn from what all of them have drawn.
        batch_size=drawn * config.ranks_per_copy,
        buffer_size=max(least, -(-capacity // size)),
        train_freq=max(1, config.train_freq // size),
        seed=config.seed if rank == 0 else mix_seeds(config.seed, rank),
        step_latency_s=latency_of(config, rank),
        # One that hangs must be replaced before the other ranks lose their patience.
        env_timeout_s=min(config.env_timeout_s, config.worker_timeout_s / 2),
        replay_dir=os.path.join(config.replay_dir, f"rank-{rank}") if config.replay_dir else "",
    )


def build_rank(
    setup: Setup, group: Group, ranks_here: int, axis: Callable[..., Axis] = Axis
) -> RankParts:
    """Create the parts of one rank, and connect it; ``ranks_here`` share this machine's cores.

    ``axis`` connects the ranks along each axis of the mesh.
    """
    config, rank = setup.config, group.rank
    own, whole = rank_config(config, rank), whole_config(config)
    together = whole.replace(envs=config.envs * group.size)
    if group.size > 1:
        cores = max(1, usable_cores() // ranks_here)
        torch.set_num_threads(min(torch.get_num_threads(), cores))

    meshes, layouts = list[Mesh](), list[Layout]()  # none, or one if the network is split
    every = list[Axis]()  # one, of all ranks, once they are connected

    def place(own: Config, spec: EnvSpec, in_background: bool) -> Placement:
        device = learner_device(own, spec)
        group.connect(device)
        if config.ranks_per_copy > 1:
            meshes.append(Mesh.of(group, config, axis))
            every.append(meshes[0].every)
            own = own.replace(replay_device="cpu")  # whose samples the ranks of a copy gather
        else:
            every.append(axis(group, [range(group.size)]))
        if config.data:
            own = own.replace(replay_device="cpu")  # there is no ring; ``offline`` places the rows
        if device.type != "cpu" and not group.has_nccl and own.replay_device == "auto":
            own = own.replace(replay_device="cpu")  # ranks that share a GPU do not see who fits
        place = Placement.of(own, spec, in_background)
        if device.type == "cpu":
            return place
        # What the host computes or adds up cannot be recorded.
        on_device = config.gradient_compression not in ("top-k", "powersgd")
        is_recorded = place.capturable and group.has_nccl and on_device and not config.data
        is_recorded, ahead = is_recorded and not meshes, place.ahead and not meshes
        if group.has_nccl and not config.data:
            _check_alike(group, whole, f"replay on {place.replay.type}")
        why = ", because ranks share a GPU" if group.shares_gpus else ""
        how = "by NCCL" if group.has_nccl else f"by way of the host{why}"
        group.is_tuning = is_recorded
        notes = (*place.notes, f"gradients are added up {how}")
        return replace(place, ahead=ahead, capturable=is_recorded, notes=notes)

    def agree(choice: Choice) -> Choice:
        first = group.meet("tune", json.dumps(asdict(choice)), TUNED_S)[0]
        group.is_tuning = False
        return Choice(**json.loads(first))

    def memory(config: Config, spec: EnvSpec, place: Placement, values: Any) -> Memory:
        if not config.replay:
            return make_memory(config, spec, place, values)
        seed = Seeds.of(own.seed).memory
        peers = meshes[0].copy if meshes else None
        share = own.batch_size // (peers.size if peers else 1)
        to = place.device if peers else None
        ring = functools.partial(SharedReplay, every[0], peers=peers, share=share, to=to)
        return make_ring(config, spec, place, seed, ring)

    def network(spec: EnvSpec) -> QNetwork:
        """Return this rank's part of the network that rank 0 would have alone."""

        seed, device = Seeds.of(config.seed).network, learner_device(own, spec)
        axes = meshes[0].tensor, meshes[0].stages
        network, layout = make_part(own, spec, device, seed, *axes)
        layouts.append(layout)
        return network

    def inference(*given: Any) -> HostInference:
        return SharedInference(meshes[0].copy, *given)

    updaters: list[AllReduceUpdater] = []
    first = sum(rank_config(config, other).batch_size for other in range(rank))

    def updater(weights: FlatWeights, timers: Timers, capturable: bool = False) -> AllReduceUpdater:
        ranks: Ranks = every[0]
        if meshes:
            use_whole_norm(weights, layouts[0], meshes[0].copy)
            ranks = meshes[0].data
        local, exchange = make_updater(config, weights, capturable), make_exchange(config, weights)
        share = own.batch_size / whole.batch_size
        waits = weights.data.device.type != "cpu" and not group.has_nccl
        updaters.append(AllReduceUpdater(weights, local, ranks, exchange, share, timers, waits))
        return updaters[0]

    if config.data:
        # Every rank reads the same order and takes its own part of each batch.
        together = whole.replace(train_freq=whole.batch_size)
        offline_parts = offline.build(
            setup._replace(config=own),
            offline.Variant(
                place=place,
                updater=updater,
                parts=functools.partial(RankParts, group=group, whole=whole, together=together),
                order_seed=config.seed,
                share=BatchShare(first, own.batch_size, whole.batch_size),
            ),
        )
        return _finished(offline_parts, updaters[0], first)
    parts = pipeline.build(
        setup._replace(config=own),
        pipeline.Variant(
            place=place,
            memory=memory,
            updater=updater,
            network=network if config.ranks_per_copy > 1 else None,
            inference=inference if config.ranks_per_copy > 1 else HostInference,
            parts=functools.partial(RankParts, group=group, whole=whole, together=together),
            ladder=own_ladder(config, rank),
            counting=together,
            agree=agree,
        ),
    )
    finished = _finished(parts, updaters[0], first)
    if meshes:
        _use_split(finished, meshes[0], layouts[0])
    return finished


def _finished(parts: LoopParts, updater: AllReduceUpdater, first: int) -> RankParts:
    """Return the parts of a rank whose samples begin with number ``first`` of every batch."""
    assert isinstance(parts, RankParts)
    parts.updater = updater
    for module in parts.learner.online.modules():
        if isinstance(module, Dropout):
            module.first_sample = first  # so the ranks' masks are those of one process
    return parts


def _use_split(parts: RankParts, mesh: Mesh, layout: Layout) -> None:
    """Let a run evaluate and save a network of which this rank holds a part."""
    most = max(layout.local_size(part) for part in range(layout.ranks))
    parts.notes.append(
        f"the network is split among {layout.ranks} ranks: each holds at most {most:,} of "
        f"{layout.whole_size:,} weights"
    )
    parts.mesh = mesh
    parts.model = SplitModel(parts.learner, layout, parts.group, mesh.every, parts.spec)
    assert parts.evaluator is not None
    parts.evaluator = LeadingEvaluator(parts.model, parts.evaluator)


def _check_alike(group: Group, whole: Config, place: str) -> None:
    """Refuse ranks that would record updates of different forms."""
    places = group.meet("place its replay memory", place)
    if len(set(places)) > 1:
        found = ", ".join(f"rank {rank}: {words}" for rank, words in enumerate(places))
        raise ConfigError(f"replay fits on some GPUs only ({found}); set --replay-device cpu")
    if whole.batch_size % group.size:
        raise ConfigError(
            f"batch_size {whole.batch_size} must be a multiple of the {group.size} ranks on GPUs, "
            "which record equal updates; change one of them"
        )


@dataclass(kw_only=True)
class RankParts(LoopParts):
    """The parts of one rank. Its clock counts the env steps of all ranks."""

    group: Group
    whole: Config
    """The settings of all ranks as one learner."""
    together: Config
    """Those, with the environments of all ranks."""
    updater: AllReduceUpdater = field(init=False)
    mesh: Mesh | None = None
    """The axes of the ranks, if the network is split among some of them."""
    first_update: int = 0
    """Updates before this run."""
    began_processor_s: float = field(default_factory=time.process_time)
    """Processor time of this process before this run."""
    _others: list[StateDict] = field(default_factory=list)
    """What the other ranks continue from, in a run that is resumed."""
    _rings: list[StateDict] = field(default_factory=list)
    """Replay memories that are dealt out among another number of ranks."""

    def __post_init__(self) -> None:
        self.setup = self.setup._replace(config=self.whole)
        super().__post_init__()
        self.limiter = RateLimiter(self.together, self.clock, self.memory)

    # --- the state of all ranks ---------------------------------------------------------------

    def own_state(self) -> StateDict:
        """Return what only this rank has."""
        return {
            "memory": self.memory.state_dict(),
            "actor": self.collector.state_dict(),
            "objective": self.learner.state_dict()["objective"],
            "unsent": self.updater.exchange.state_dict(),
        }

    def load_own_state(self, state: StateDict) -> bool:
        """Restore; return False if the environments had to start new episodes."""
        if self.config.replay and not self.config.data:  # a dataset is checked where it is read
            check_transitions(state["memory"], self.spec)
        self.memory.load_state_dict(state["memory"])
        exchange = self.updater.exchange
        check_like(state["unsent"], exchange.state_dict(), "unsent", free=("kept",))
        exchange.load_state_dict(state["unsent"])
        if self.collector.load_state_dict(state["actor"]):
            return True
        self.memory.end_open_episodes()
        return False

    def state_dict(self) -> dict[str, StateDict]:
        """Return the sections of a checkpoint (rank 0): what all have, and a section per rank."""
        state, size = {**Parts.state_dict(self), "actor": {}}, self.group.size
        # The number of ranks is part of the names: a checkpoint shares files with the one before it
        # where a name and a version are the same, and a ring that was dealt out begins anew.
        state[f"rank-0-of-{size}"] = self.own_state()
        for rank in range(1, size):
            self.group.give_order(Order.SEND_STATE, rank)
            state[f"rank-{rank}-of-{size}"] = self.group.receive_state(rank)
        return state

    def load_state_dict(self, state: Mapping[str, StateDict]) -> bool:
        size = self.group.size
        most = 1 + 2 * self.clock.env_steps * self.config.gradient_steps
        check_like(state["learner"], self.model.state_dict(), "learner", most=most)
        self.model.load_state_dict(state["learner"])
        for hook in self.hooks:
            hook.load_state_dict(state)
        names = [name for name in state if name.startswith("rank-")]
        stored = [state[f"rank-{rank}-of-{len(names)}"] for rank in range(len(names))]
        if not stored:
            raise CheckpointError("there is no state of any rank")
        self.channel.restart(self.clock.updates)
        if self.config.data and len(stored) != size:  # all ranks are at the same row
            stored = [stored[0] | {"unsent": self.updater.exchange.state_dict()}] * size
        if len(stored) == size:
            self._others = stored[1:]
            return self.load_own_state(stored[0])
        if self.config.replay:  # deal the replay memories of all ranks out anew
            for one in stored:
                check_transitions(one["memory"], self.spec)
            self._rings = [in_order(one["memory"]) for one in stored]
            self._refill(deal(self._rings, 0, size))
        self.notes.append(
            f"the replay memories of {len(stored)} ranks are dealt out to {size}; priorities and "
            "unsent gradients begin anew"
        )
        return False

    def _refill(self, pieces: list[StateDict]) -> None:
        assert isinstance(self.memory, SharedReplay)
        self.memory.refill(pieces, self.spec.frame_stack)

    def report(self) -> dict[str, Any]:
        """Return what rank 0 shows of every rank."""
        stage = self.learner.online.stage
        return {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "seconds": Timers.merged(self.timers).seconds,
            "exchange_s": self.group.exchange_s,
            "processor_s": time.process_time() - self.began_processor_s,
            "device": device_id(self.device),
            "pipeline": stage.report() if isinstance(stage, Stage) else None,
        }

    def close(self) -> None:
        if isinstance(self.learner, RecordedLearner):
            self.learner.forget_recordings()  # NCCL cannot end before the graphs that use it
        super().close()

    # --- the start of all ranks ---------------------------------------------------------------

    def bring_in_step(self) -> None:
        """Give all other ranks the weights and clock of this one, and what they continue from."""
        self.first_update = self.clock.updates
        split = self.model if isinstance(self.model, SplitModel) else None
        learner = {} if split else self.model.state_dict()
        for rank in range(1, self.group.size):
            pieces = deal(self._rings, rank, self.group.size)
            start = {
                "clock": [self.clock.env_steps, self.clock.updates],
                "learner": split.take_part(rank) if split else learner,
                "own": self._others[rank - 1] if self._others else {},
                "pieces": {str(i): piece for i, piece in enumerate(pieces)},
            }
            self.group.give_order(Order.TAKE_STATE, rank)
            self.group.send_state(start, rank)
            # A large memory takes longer than the next order may.
            self.group.await_ranks(IN_STEP, [rank], TUNED_S)
        self._others, self._rings = [], []
        if split:
            split.forget_loaded()

    def get_in_step(self) -> None:
        """Take over what ``bring_in_step`` sends."""
        start = self.group.receive_state(0)
        self.clock.env_steps, self.clock.updates = start["clock"]
        own = start["own"]
        fractions = own.get("objective", self.learner.state_dict()["objective"])  # of IQN
        # Parts of a network that begins anew are there already.
        state = self.learner.state_dict() | start["learner"] | {"objective": fractions}
        self.learner.load_state_dict(state)
        self.channel.restart(self.clock.updates)
        if start["pieces"]:
            self._refill(list(start["pieces"].values()))
        if own:
            self.load_own_state(own)
        self.group.arrive(IN_STEP)
