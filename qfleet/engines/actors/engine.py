"""The actors engine (Ape-X): many actors and replay shards in processes, one learner here.

It is the serial loop with its parts placed otherwise: blocks come from the actor that is done first
and go to its shard without passing through this process, and shards draw samples while the learner
learns. With ``--servers 0`` blocks come here, and the learner is prepared as in the pipeline
engine. The ordinary rate limiter holds the replay ratio, where blocks enter the memory.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable

import torch

from qfleet.agent.learner import Learner
from qfleet.agent.recorded_learner import RecordedLearner
from qfleet.agent.schedules import rows_per_block
from qfleet.config.config import Config
from qfleet.core.cores import usable_cores
from qfleet.core.errors import ConfigError
from qfleet.core.seeding import env_seeds
from qfleet.core.types import Clock, EnvSpec
from qfleet.engines import serial
from qfleet.engines.actors.account import Account
from qfleet.engines.actors.broadcast import Broadcast
from qfleet.engines.actors.fleet import ActorFleet
from qfleet.engines.actors.learner_replay import LearnerReplay
from qfleet.engines.actors.remote_actor import actor_seed
from qfleet.engines.actors.replay import (
    BLOCKS_PER_ACTOR,
    PREFETCHED,
    NothingToSample,
    ShardedReplay,
)
from qfleet.engines.actors.shares import ring_capacity
from qfleet.engines.cluster.processes_hook import ProcessesHook
from qfleet.engines.cluster.ray_cluster import (
    LEAST_BYTES_WITH_TORCH,
    STORE_BYTES,
    Cluster,
    check_memory,
    check_store,
    open_cluster,
)
from qfleet.engines.evaluators import make_host_evaluator
from qfleet.engines.factories import check_replay_fits, make_learner, make_ring
from qfleet.engines.parts import LoopParts, Setup
from qfleet.engines.placement import Placement
from qfleet.engines.recording import prepare_learner
from qfleet.engines.torch_settings import set_threads
from qfleet.engines.tuning import Choice, apply_precision
from qfleet.envs.factory import make_envs
from qfleet.memory.ring import Ring
from qfleet.networks.factory import make_network
from qfleet.telemetry.timeline import draw_workers
from qfleet.telemetry.timers import Timers
from qfleet.telemetry.trace import Trace

VERSIONS = 4
"""Versions of the weights that the object store holds: the newest, and those still being read."""
BURST_BYTES = 64 * 2**20
"""Largest size of the samples drawn at once, except for a single larger batch."""


def build(setup: Setup) -> LoopParts:
    """Create the parts, and the cluster that actors and replay shards are on."""
    config, faults, seeds = setup.config, setup.faults, setup.seeds
    # Errors of the environment are raised here, before a cluster is started.
    probe = make_envs(config, 1, seeds.envs, training=False, on_fault=faults)
    spec = probe.spec
    probe.close()
    all_envs = config.replace(envs=config.workers * config.envs)
    place = Placement.of(all_envs, spec, in_background=True)
    if config.servers:
        _check_rings(config, spec)
    if not config.address:
        check_memory(config.workers + config.servers, LEAST_BYTES_WITH_TORCH)
    _set_threads(config, spec)
    clock = Clock(frame_skip=spec.frame_skip)
    # A trace of its own, merged with the actors' at the end: a trace has room for a limited number
    # of spans, and all lanes must reach the same moment.
    lane = Trace().lane("learner") if setup.trace else None
    timers = Timers(lane, "learner")
    account = Account(config.workers, config.servers, timers, lane)
    network = make_network(config, spec, torch.device("cpu"), 0)
    needed = store_bytes(config, spec, sum(weight.nbytes for weight in network.parameters()))
    with contextlib.ExitStack() as made:
        cluster = made.enter_context(_open(config, needed))
        contents, lower = "samples, blocks and weights", "--batch-size, --workers or --block-rows"
        check_store(cluster, cluster.store_bytes(), needed, contents, lower)
        notes, all_timers = [*place.notes, _note(config, cluster, place)], [timers]
        memory: ShardedReplay | LearnerReplay
        if config.servers:
            memory = ShardedReplay(cluster, config, spec, faults, account, seeds.memory)
            learner = make_learner(
                config, spec, place, memory, clock, timers, draw_stage="communicate"
            )
            choice = apply_precision(config, learner.networks)
            learner.burst_updates = min(learner.burst_updates, _batches_at_once(config, spec))
        else:
            ring = make_ring(all_envs, spec, place, seeds.memory)
            memory = LearnerReplay(cluster, config, ring, faults, account)
            made.callback(memory.close)
            learner = make_learner(config, spec, place, memory, clock, timers)
            choice, note = _prepare(setup, spec, learner, ring, place)
            timers.load_state_dict({})  # trials are not part of the run
            notes += [note] if note else []
        channel = Broadcast(cluster, learner.weights, account)
        actors = ActorFleet(cluster, setup, spec, channel, clock, timers, account)
        if config.record:
            made.callback(actors.finish_recordings)
        each = [actor_seed(seeds.envs, i, 0, setup.restarted_at) for i in range(config.workers)]
        return LoopParts(
            setup=setup,
            spec=spec,
            device=place.device,
            env_seeds=[seed for own in each for seed in env_seeds(own, config.envs)],
            clock=clock,
            timers=all_timers,
            collector=actors,
            evaluator=make_host_evaluator(setup, spec, place, learner, choice, all_timers, made),
            memory=memory,
            learner=learner,
            channel=channel,
            notes=notes,
            hooks=[ProcessesHook(account, config)],
            draw_timeline=draw_workers,
            closing=made.pop_all(),
        )


def run(parts: LoopParts, keep_going: Callable[[], bool]) -> None:
    """Advance the loop until ``keep_going`` returns False, then wait for the device."""
    while True:
        try:
            return serial.run(parts, keep_going)
        except NothingToSample:
            # All shards died in the middle of a burst, which was reported: collect first.
            continue


def _prepare(
    setup: Setup, spec: EnvSpec, learner: Learner, ring: Ring, place: Placement
) -> tuple[Choice, str]:
    """Tune and record the learner's updates on an accelerator; return the choice and a note."""
    if not place.capturable:
        return apply_precision(setup.config, learner.networks), ""
    assert isinstance(learner, RecordedLearner), "devices with streams record updates"
    prepared = prepare_learner(setup, spec, learner, ring, place.device)
    return prepared.tuning.choice, prepared.note


def _set_threads(config: Config, spec: EnvSpec) -> None:
    """Give the learner the cores that the actors leave: on a shared core both would wait."""
    left = usable_cores() - (0 if config.address else config.workers)
    set_threads(config.threads, spec)
    if not config.threads:
        torch.set_num_threads(max(1, min(torch.get_num_threads(), left)))


def _open(config: Config, needed_bytes: int) -> contextlib.AbstractContextManager[Cluster]:
    return open_cluster(
        config.workers + config.servers,
        config.address or None,
        store_bytes=max(STORE_BYTES, needed_bytes),
        timeout_s=max(config.worker_timeout_s, 60.0),
    )


def _note(config: Config, cluster: Cluster, place: Placement) -> str:
    where = "this machine" if not config.address else f"the cluster at {cluster.address}"
    actors = f"{config.workers} actors of {config.envs} envs"
    if not config.servers:
        return f"{actors} on {where}, replay in the learner's process"
    shards = f"{config.servers} replay shard{'s' if config.servers > 1 else ''}"
    on_device = place.device.type != "cpu" and not config.address
    advice = f" (--servers 0 keeps it beside the learner on {place.device})" if on_device else ""
    return f"{actors} and {shards} on {where}{advice}"


def _check_rings(config: Config, spec: EnvSpec) -> None:
    """Check that each actor's ring holds its blocks, and that all rings fit in memory."""
    rows = config.n_steps + spec.frame_stack + rows_per_block(config)
    if ring_capacity(config) < rows * config.envs:
        raise ConfigError(
            f"buffer_size {config.buffer_size} gives each of {config.workers} actors "
            f"{ring_capacity(config)} transitions, too few for {rows} rows of {config.envs} envs; "
            f"use at least {rows * config.envs * config.workers}"
        )
    if not config.address:
        transitions = config.workers * ring_capacity(config)
        check_replay_fits(config, spec, transitions, torch.device("cpu"))


def _frame_bytes(spec: EnvSpec) -> int:
    return math.prod(spec.frame_shape) * spec.torch_dtype.itemsize


def _batch_bytes(config: Config, spec: EnvSpec) -> int:
    return 2 * config.batch_size * spec.frame_stack * _frame_bytes(spec)


def _batches_at_once(config: Config, spec: EnvSpec) -> int:
    return max(1, BURST_BYTES // _batch_bytes(config, spec))


def store_bytes(config: Config, spec: EnvSpec, weight_bytes: int) -> int:
    """Return the bytes that may be in the cluster's object store at one time."""
    at_once = min(_batches_at_once(config, spec), 32)
    samples = (PREFETCHED + 1) * at_once * _batch_bytes(config, spec)
    block = rows_per_block(config) * config.envs * _frame_bytes(spec)
    blocks = (BLOCKS_PER_ACTOR + 2) * config.workers * block
    return samples + blocks + VERSIONS * weight_bytes
