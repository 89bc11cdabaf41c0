"""Config → objects: the only place that names concrete classes."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from qfleet.accelerator.fused_cnn import fuse
from qfleet.accelerator.graphs import seconds_per_call, why_no_graphs
from qfleet.accelerator.inference import Traffic
from qfleet.accelerator.streams import has_streams
from qfleet.accelerator.tuning import (
    TIMED_CALLS,
    Choice,
    Tuning,
    apply_choice,
    candidates,
    copy_state,
    may_compile,
    tune,
    tuning_key,
)
from qfleet.acting import HostInference
from qfleet.actor import Actor
from qfleet.algorithms.objective import Objective
from qfleet.apex.account import Account
from qfleet.apex.broadcast import Broadcast
from qfleet.apex.fleet import ActorFleet
from qfleet.collectors import Ahead, Inline
from qfleet.config import Config
from qfleet.core import Batch, Block, Clock, EnvSpec, Memory, Updater, VectorEnv
from qfleet.envs import make_envs, make_tensors
from qfleet.envs.device.protocol import TensorEnv
from qfleet.envs.device.vector import check_tensor_env
from qfleet.envs.seeding import env_seeds, mix_seeds
from qfleet.errors import ConfigError
from qfleet.learner import Learner
from qfleet.loop import RateLimiter, rows_per_block
from qfleet.memory import PrioritizedSampler, Ring, Rollout, Sampler, UniformSampler, check_fits
from qfleet.networks import QNetwork, build_network
from qfleet.networks.population import Population
from qfleet.placement import (
    Placement,
    free_device_bytes,
    inference_rate,
    is_image,
    place_inference,
)
from qfleet.population import Agents, agent_seeds
from qfleet.telemetry.faults import FaultLog
from qfleet.telemetry.fleet import Processes
from qfleet.telemetry.timers import Timers
from qfleet.telemetry.trace import Trace
from qfleet.tensor_actor import TensorActor
from qfleet.tensor_evaluation import TensorEvaluator
from qfleet.updaters.fused import FusedUpdater, has_kernels
from qfleet.updaters.local import LocalUpdater
from qfleet.updaters.optimisers import make_optimiser
from qfleet.weights import DeviceMailbox, FlatWeights, Mailbox, SameWeights

if TYPE_CHECKING:
    from qfleet.parameter_server.fleet import Fleet

BLOCKS_AHEAD = 4
"""Blocks an actor in a thread fills in turn: one under way, the others on their way to the ring."""
RECORDED_UPDATES = 32
"""Most updates in one launch: enough to hide the launch, few enough to record in a second."""
ModelTransform = Callable[[QNetwork], QNetwork]


@dataclass(frozen=True)
class Seeds:
    """One independent stream per consumer, all from ``config.seed``."""

    network: int
    memory: int
    actor: int
    learner: int
    objective: int
    envs: int
    eval_envs: int

    @classmethod
    def of(cls, seed: int) -> Seeds:
        children = np.random.SeedSequence(seed).spawn(7)
        return cls(*(int(child.generate_state(1, np.uint32)[0]) for child in children))


@dataclass
class Parts:
    """The parts of one run, where its engine wants them."""

    config: Config
    spec: EnvSpec
    device: torch.device
    envs: list[VectorEnv]
    """One or more groups; none on the device engine, whose environments are no such objects."""
    env_seeds: list[int]
    """Of each environment."""
    memory: Memory
    learner: Learner
    limiter: RateLimiter
    clock: Clock
    timers: list[Timers]
    """One per thread; the first is the learner's."""
    faults: FaultLog
    seeds: Seeds
    collector: Inline | Ahead | TensorActor | Fleet | ActorFleet = dataclasses.field(init=False)
    channel: SameWeights | Mailbox | DeviceMailbox | Broadcast = dataclasses.field(init=False)
    traffic: Traffic | None = None
    """What crossed to the device, where actions are chosen there."""
    notes: list[str] = dataclasses.field(default_factory=list)
    """What was chosen for this machine, and why, for whoever watches."""
    tuning: Tuning | None = None
    """What was tried on the accelerator, and chosen."""
    learner_only: float | None = None
    """Env steps per second that learning alone allows, where it was measured at the start."""
    measure_inference: Callable[[], float] | None = None
    """The same for choosing actions; to be called when nothing else runs."""
    measure_collecting: Callable[[], float] | None = None
    """The same for environments and actions together, where they cannot be told apart."""
    agents: Agents | None = None
    """Of a population."""
    members: Sequence[int] = (0,)
    """Numbers of the agents that train here, one a row; agent 0 where there is no population."""
    evaluator: TensorEvaluator | None = None
    """Plays evaluations on the device, where the environments are tensors."""
    account: Account | None = None
    """Of what actors and replay shards in processes did and cost."""
    fleet: Fleet | None = None
    """Workers and servers, where they do the work; it is the collector too."""

    @property
    def processes(self) -> Processes | None:
        """Who can say what many processes did; None where one does everything."""
        return self.account if self.fleet is None else self.fleet

    def read_metrics(self) -> dict[str, float]:
        """Numbers of the newest update, or of the workers' newest ones."""
        return self.learner.read_metrics() if self.fleet is None else self.fleet.metrics()

    def close(self) -> None:
        self.collector.close()
        for group in self.envs:
            group.close()
        self.memory.close()


class TorchSettings:
    """torch's process-wide settings that a run changes, to be given back at its end."""

    def __init__(self) -> None:
        self._threads = torch.get_num_threads()
        self._mkldnn = bool(torch.backends.mkldnn.enabled)
        self._precision = torch.get_float32_matmul_precision()
        self._cudnn = (torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark)

    def restore(self) -> None:
        torch.set_num_threads(self._threads)
        torch.backends.mkldnn.set_flags(self._mkldnn)  # type: ignore[no-untyped-call]
        torch.set_float32_matmul_precision(self._precision)
        torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark = self._cudnn


def build(
    config: Config,
    faults: FaultLog,
    restarted_at: int = 0,
    trace: Trace | None = None,
    members: Sequence[int] | None = None,
    remote: Callable[[FlatWeights, Timers], Updater] | None = None,
) -> Parts:
    """All parts of a run; ``restarted_at`` (env steps) gives restarted envs new episodes.

    ``members``: which agents of a population; None: all. ``remote`` makes the updater of a worker,
    whose weights are on servers; None: the one that the configuration asks for.
    """
    if config.engine == "actors":
        from qfleet.apex.building import build_actors  # it needs what is defined here

        return build_actors(config, faults, restarted_at, trace)
    if config.engine == "parameter-server":
        # Here, because workers build their parts by this very function.
        from qfleet.parameter_server.parts import build_supervisor

        return build_supervisor(config, faults, restarted_at, trace)
    members = range(config.population) if members is None else members
    seeds = Seeds.of(config.seed)
    env_seed = seeds.envs if not restarted_at else mix_seeds(seeds.envs, restarted_at)
    with contextlib.ExitStack() as made:
        tensor_env = make_tensors(config) if config.engine == "device" else None
        envs = [] if tensor_env else make_groups(config, env_seed, faults)
        for group in envs:
            made.callback(group.close)
        spec = tensor_env.spec if tensor_env else envs[0].spec
        in_background = any(group.in_background for group in envs)
        place = Placement.of(config, spec, in_background)
        set_threads(config.threads, spec)
        memory: Memory
        if config.replay:
            memory = make_memory(config, spec, place, seeds.memory)
        else:
            # The memory asks the learner for values and the learner the memory for samples.
            memory = make_rollout(
                config, spec, place, lambda obs: learner.best_values(obs), members
            )
        made.callback(memory.close)
        clock = Clock(frame_skip=spec.frame_skip)
        timers = [Timers(trace.lane("learner") if trace else None)]
        online = make_networks(config, spec, place.device, members)
        fused = fuse(config, spec, online, place.device) if config.engine == "device" else None
        learner = Learner(
            config=config,
            online=online,
            target=make_network(config, spec, place.device, seeds.network)
            if config.replay or config.target_network
            else online,
            memory=memory,
            objective=make_objective(config, place.device, seeds.objective),
            make_updater=lambda weights: (
                remote(weights, timers[0])
                if remote
                else make_updater(config, weights, place.unasked)
            ),
            clock=clock,
            timers=timers[0],
            device=place.device,
            seed=seeds.learner,
            # A population's learning rates are a tensor wherever it learns.
            unasked=place.unasked or config.population > 1,
            fused=fused,
        )
        parts = Parts(
            config=config,
            spec=spec,
            device=place.device,
            envs=envs,
            env_seeds=[seed for group in envs for seed in group.seeds],
            memory=memory,
            learner=learner,
            limiter=RateLimiter(config, clock, memory),
            clock=clock,
            timers=timers,
            faults=faults,
            seeds=seeds,
            notes=list(place.notes),
            members=members,
        )
        if place.unasked:
            choice = prepare_learner(parts, memory)
        else:
            choice = Choice("fp32" if config.precision == "auto" else config.precision, False)
            if config.precision != "auto":
                apply_choice(choice, learner.networks, [])
        if tensor_env is not None:
            _act_on_the_device(parts, tensor_env, place)
        elif place.ahead or (config.engine == "pipeline" and config.lockstep):
            _act_in_a_thread(parts, place, choice, trace)
        else:
            _act_in_turn(parts)
        made.pop_all()
    return parts


def _act_in_turn(parts: Parts) -> None:
    """The learner's network acts, in the learner's thread."""
    config, seed = parts.config, parts.seeds.actor
    inference = HostInference(parts.learner.online, parts.device, parts.spec.obs_dtype, seed)
    actor = Actor(
        parts.envs,
        inference,
        config,
        parts.timers[0],
        rows_per_block(config),
        seed,
        # Groups in flight have begun the next block when one is handed over.
        blocks=min(2, len(parts.envs)),
    )
    parts.channel = SameWeights()
    parts.collector = Inline(actor, parts.channel)


def _act_on_the_device(parts: Parts, env: TensorEnv, place: Placement) -> None:
    """The learner's network acts, on environments that are where it is."""
    config, device, learner = parts.config, parts.device, parts.learner
    check_tensor_env(env, device)
    every = [Seeds.of(seed) for seed in agent_seeds(config, range(config.population))]
    seeds_of_envs = [env_seeds(own.envs, config.envs) for own in every]
    # Those of agents that have stopped too: they are what the run began with.
    parts.env_seeds = [seed for own in seeds_of_envs for seed in own]
    parts.channel = SameWeights()
    started_s = time.monotonic()
    compiled = place.unasked and may_compile(config, device)
    # Steps are tried before they are recorded; a torso's own buffers must not remember that.
    kept = [(buffer, buffer.clone()) for buffer in learner.online.buffers()]
    actor = parts.collector = TensorActor(
        env,
        torch.tensor([seeds_of_envs[agent] for agent in parts.members]).view(-1),
        learner.q_values,
        config,
        device,
        [every[agent].actor for agent in parts.members],
        rows_per_block(config),
        channel=parts.channel,
        timers=parts.timers[0],
        resample_noise=learner.online.resample_noise,
        compiled=compiled,
        compile_values=not learner.is_fused,
    )
    if config.population > 1:
        assert isinstance(parts.memory, Rollout)
        parts.agents = Agents(config, parts.members, learner, parts.memory, actor)
    # All agents of a population play the same episodes.
    seed = parts.seeds.eval_envs
    parts.evaluator = TensorEvaluator(
        learner.q_values,
        env,
        torch.tensor(env_seeds(seed, config.n_eval_episodes)),
        config.eval_eps,
        device,
        seed,
        config.graphs,
        agents=len(parts.members),
    )
    if place.unasked:
        learner.online.eval()
        parts.evaluator.prepare()  # now, not in the middle of the run
        learner.online.train()
        for buffer, before in kept:
            buffer.copy_(before)
        # Where nobody waits for the device, the seconds that the host spends say nothing.
        parts.measure_collecting = actor.rate
        recorded = config.graphs and why_no_graphs(device) is None
        how = f"{rows_per_block(config)} steps a launch" if recorded else "not recorded"
        if compiled:
            failure = actor.compile_failure
            how += ", compiled" if failure is None else f", not compiled ({failure})"
        parts.notes.append(f"steps on {device}: {how} ({time.monotonic() - started_s:.0f} s)")


def _act_in_a_thread(parts: Parts, place: Placement, choice: Choice, trace: Trace | None) -> None:
    """A network of the actor's own acts, in a thread, while the learner learns."""
    config, seeds = parts.config, parts.seeds

    def network_on(device: torch.device) -> QNetwork:
        network = make_network(config, parts.spec, device, seeds.network)
        if device.type != "cpu":
            apply_choice(choice, [network], [])
        return network

    acting = place_inference(
        config,
        parts.spec,
        [group.num_envs for group in parts.envs],
        place,
        parts.learner.weights,
        network_on,
        choice.compiled,
        seeds.actor,
    )
    timers = Timers(trace.lane("collector") if trace else None)
    parts.timers.append(timers)
    parts.channel, parts.traffic = acting.channel, acting.traffic
    parts.notes.append(acting.note)
    parts.measure_inference = lambda: inference_rate(
        acting.inference, parts.spec, parts.envs[0].num_envs
    )
    actor = Actor(
        parts.envs,
        acting.inference,
        config,
        timers,
        rows_per_block(config),
        seeds.actor,
        blocks=BLOCKS_AHEAD,
    )
    parts.collector = Ahead(
        actor,
        acting.channel,
        config,
        parts.clock,
        parts.timers[0],
        lockstep=config.lockstep,
        # Two threads that each take every core get in each other's way: on two cores Pong's updates
        # ran at 0.94 of their rate beside inference on two, and at 1.01 beside inference on one.
        tensor_threads=max(1, torch.get_num_threads() // 2)
        if place.ahead and place.device.type == "cpu"
        else None,
        block_ready=acting.block_ready,
    )


def prepare_learner(parts: Parts, memory: Memory) -> Choice:
    """Tune the learner for its device and record its bursts; its state is as before."""
    config, learner, device = parts.config, parts.learner, parts.device
    saved = copy_state({"learner": learner.state_dict(), "memory": memory.state_dict()})
    at_once = updates_at_once(config, learner.most_at_once)
    samples = None
    if memory.device.type != device.type:
        samples = blank_batch(parts.spec, at_once * config.batch_size, device)
        # A memory on the host refuses to be sampled while it is empty.
        memory.extend(blank_block(parts.spec, config.envs, config.n_steps + 1))
    learner.limit_bursts(at_once)
    record_them = config.graphs and why_no_graphs(device) is None

    in_force: Choice | None = None

    def time_update(choice: Choice) -> float:
        nonlocal in_force
        if choice != in_force:
            in_force = None
            # Code for another choice is of no use, and torch.compile keeps only so many versions.
            torch.compiler.reset()
            apply_choice(choice, learner.networks, learner.compilables())
            if record_them:
                learner.record(at_once, samples)
            in_force = choice
        learner.burst(at_once)
        return seconds_per_call(lambda: learner.burst(at_once), device, TIMED_CALLS) / at_once

    started_s = time.monotonic()
    key = tuning_key(config, device, learner.weights.describe(), at_once)
    key |= {"population": len(parts.members), "fused": learner.is_fused}
    options, compiles = candidates(config, device), may_compile(config, device)
    if learner.is_fused:
        # Kernels of our own have their precision already, and leave little to compile: 2 of 34 µs
        # an update, which costs several seconds at the start to get.
        options = [Choice("fp32" if config.precision == "fp32" else "tf32", compiled=False)]
        compiles = config.compile == "on"
    tuning = tune(options, compiles, time_update, key)
    update_s = time_update(tuning.choice)
    learner.load_state_dict(saved["learner"])
    memory.load_state_dict(saved["memory"])
    parts.timers[0].load_state_dict({})  # what was tried out is no part of the run
    failures = {f.name: f.failure for f in learner.compilables() if f.failure is not None}
    parts.tuning = dataclasses.replace(tuning, failed={**tuning.failed, **failures})
    parts.learner_only = len(parts.members) / update_s / config.updates_per_env_step
    how = "known" if tuning.from_cache else "tuned"
    recorded = f"{at_once} updates a launch" if record_them else "not recorded"
    parts.notes.append(
        f"updates on {device}: {tuning.choice}, {recorded}, {update_s * 1e6:.0f} µs each "
        f"({how}, {time.monotonic() - started_s:.0f} s)"
    )
    return tuning.choice


def updates_at_once(config: Config, most: int) -> int:
    """Updates in a recorded burst: an even share of those that a block brings.

    Without replay it is all of a rollout's: its returns and its order are found at its start.
    """
    if not config.replay:
        return config.gradient_steps
    owed = max(1, rows_per_block(config) * config.envs * config.gradient_steps // config.train_freq)
    launches = -(-owed // min(most, RECORDED_UPDATES))
    return owed // launches


def blank_block(spec: EnvSpec, envs: int, rows: int) -> Block:
    number = torch.zeros((rows, envs), dtype=torch.int64)
    obs = torch.zeros((rows, envs, *spec.frame_shape), dtype=spec.torch_dtype)
    return Block(obs, number, number.float(), number.to(torch.uint8))


def blank_batch(spec: EnvSpec, size: int, device: torch.device) -> Batch:
    """Where a burst's samples are copied to, for recorded updates."""
    obs = torch.zeros((size, *spec.obs_shape), dtype=spec.torch_dtype, device=device)
    number = torch.zeros(size, dtype=torch.int64, device=device)
    real = torch.zeros(size, device=device)
    return Batch(obs, number, real, real.clone(), obs.clone(), real.clone(), number.clone())


def make_groups(config: Config, seed: int, faults: FaultLog) -> list[VectorEnv]:
    """The environments, in groups of (almost) equal size."""
    groups = max(1, config.env_groups)
    envs: list[VectorEnv] = []
    try:
        for group in range(groups):
            size = config.envs // groups + (group < config.envs % groups)
            group_seed = mix_seeds(seed, group) if group else seed
            envs.append(make_envs(config, size, group_seed, training=True, on_fault=faults))
    except BaseException:
        for made in envs:
            made.close()
        raise
    return envs


def make_network(config: Config, spec: EnvSpec, device: torch.device, seed: int) -> QNetwork:
    """The network with weights drawn from ``seed``, passed through the model transform."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = build_network(spec, config)
    return model_transform(config, device)(network.to(device))


def make_networks(
    config: Config, spec: EnvSpec, device: torch.device, members: Sequence[int] | None = None
) -> QNetwork:
    """The learner's network, or those of a population's agents, all or some, as one."""
    members = range(config.population) if members is None else members
    seeds = [Seeds.of(seed).network for seed in agent_seeds(config, members)]
    networks = [make_network(config, spec, device, seed) for seed in seeds]
    return networks[0] if config.population == 1 else Population(networks)


def model_transform(config: Config, device: torch.device) -> ModelTransform:
    """What is done to a network from outside once it is built; the network never knows."""

    def compiled(network: QNetwork) -> QNetwork:
        network.compile()
        network.allows_shortcuts = False
        return network

    # On an accelerator whole updates are compiled, in which the network is one part.
    whole_updates = config.engine in ("pipeline", "device") and has_streams(device)
    in_itself = config.compile == "on" and not whole_updates
    return compiled if in_itself else lambda network: network


def make_memory(config: Config, spec: EnvSpec, place: Placement, seed: int) -> Ring:
    directory = Path(config.replay_dir) if config.replay_dir else None
    device = place.replay
    check_fits(
        spec,
        config.envs,
        config.buffer_size,
        config.prioritized_replay,
        budget_bytes=None if device.type == "cpu" else free_device_bytes(device),
        on_disk=directory,
        compression=config.replay_compression,
    )
    generator = torch.Generator(device=device).manual_seed(seed)
    unasked = place.unasked and device.type == place.device.type
    sampler: Sampler
    if config.prioritized_replay:
        sampler = PrioritizedSampler(
            config.buffer_size // config.envs,
            config.envs,
            config.prioritized_replay_alpha,
            config.prioritized_replay_eps,
            device,
            generator,
            unasked,
        )
    else:
        sampler = UniformSampler(generator, unasked)
    return Ring(
        spec,
        config.envs,
        config.buffer_size,
        config.n_steps,
        config.gamma,
        sampler,
        device,
        directory,
        config.replay_compression,
        unasked,
    )


def make_rollout(
    config: Config,
    spec: EnvSpec,
    place: Placement,
    values: Callable[[Tensor], Tensor],
    members: Sequence[int],
) -> Rollout:
    return Rollout(
        spec,
        config.envs * len(members),
        config.train_freq // config.envs,
        config.gamma,
        config.td_lambda,
        values,
        [Seeds.of(seed).memory for seed in agent_seeds(config, members)],
        place.replay,
        batch_size=config.batch_size,
        epochs=config.gradient_steps * config.batch_size // config.train_freq,
    )


def make_objective(config: Config, device: torch.device, seed: int) -> Objective:
    return Objective(
        head=config.head,
        double=config.double,
        munchausen=config.munchausen,
        loss_kind=config.loss,
        iqn_samples=config.iqn_samples,
        munchausen_alpha=config.munchausen_alpha,
        munchausen_tau=config.munchausen_tau,
        munchausen_clip=config.munchausen_clip,
        value_weight=config.value_weight,
        entropy_weight=config.entropy_weight,
        generator=torch.Generator(device=device).manual_seed(seed),
    )


def make_updater(config: Config, weights: FlatWeights, unasked: bool) -> Updater:
    if unasked and has_kernels(config.optimizer, weights.data.device):
        return FusedUpdater(weights, config.optimizer_eps, config.max_grad_norm)
    optimiser = make_optimiser(config.optimizer, weights.data, config.optimizer_eps)
    return LocalUpdater(weights, optimiser, config.max_grad_norm)


def set_threads(threads: int, spec: EnvSpec) -> None:
    """Small networks gain nothing from more than two threads and lose on many cores."""
    cores = os.cpu_count() or 1
    if threads > 4 * cores:
        raise ConfigError(f"threads {threads} is far more than this machine's {cores} cores")
    automatic = cores if is_image(spec) else min(2, cores)
    torch.set_num_threads(threads or automatic)
    # oneDNN's product with a transposed operand takes half as long again as the BLAS's own at the
    # size of small MLPs (ARM: 224 against 156 µs for 64×256×256). Convolutions do want it.
    torch.backends.mkldnn.set_flags(is_image(spec))  # type: ignore[no-untyped-call]
