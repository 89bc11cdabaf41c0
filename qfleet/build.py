"""Config → objects: the only place that names concrete classes."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from qfleet.actor import Actor
from qfleet.algorithms.objective import Objective
from qfleet.config import Config
from qfleet.core import Clock, EnvSpec, Memory, Updater, VectorEnv, WeightsChannel
from qfleet.envs import make_envs
from qfleet.envs.seeding import mix_seeds
from qfleet.errors import ConfigError
from qfleet.learner import Learner
from qfleet.loop import RateLimiter, rows_per_block
from qfleet.memory import PrioritizedSampler, Ring, Sampler, UniformSampler, check_fits
from qfleet.networks import QNetwork, build_network
from qfleet.networks.torsos import image_layout
from qfleet.telemetry.faults import FaultLog
from qfleet.telemetry.timers import Timers
from qfleet.updaters.local import LocalUpdater
from qfleet.updaters.optimisers import make_optimiser
from qfleet.weights import FlatWeights, SameWeights

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
    """The parts of one run, placed by no engine yet."""

    config: Config
    spec: EnvSpec
    device: torch.device
    envs: VectorEnv
    actor: Actor
    memory: Memory
    learner: Learner
    channel: WeightsChannel
    limiter: RateLimiter
    clock: Clock
    timers: Timers
    faults: FaultLog
    seeds: Seeds


class TorchSettings:
    """torch's process-wide settings that a run changes, to be given back at its end."""

    def __init__(self) -> None:
        self._threads = torch.get_num_threads()
        self._mkldnn = bool(torch.backends.mkldnn.enabled)

    def restore(self) -> None:
        torch.set_num_threads(self._threads)
        torch.backends.mkldnn.set_flags(self._mkldnn)  # type: ignore[no-untyped-call]


def build(config: Config, faults: FaultLog, restarted_at: int = 0) -> Parts:
    """All parts of a run; ``restarted_at`` (env steps) gives restarted envs new episodes."""
    seeds = Seeds.of(config.seed)
    env_seed = seeds.envs if not restarted_at else mix_seeds(seeds.envs, restarted_at)
    envs = make_envs(config, config.envs, env_seed, training=True, on_fault=faults)
    memory: Ring | None = None
    try:
        spec = envs.spec
        device = resolve_device(config.device, spec)
        set_threads(config.threads, spec)
        memory = make_memory(config, spec, torch.device("cpu"), seeds.memory)
        network = make_network(config, spec, device, seeds.network)
        target = make_network(config, spec, device, seeds.network)
        clock, timers, channel = Clock(frame_skip=spec.frame_skip), Timers(), SameWeights()
        learner = Learner(
            config=config,
            online=network,
            target=target,
            memory=memory,
            objective=make_objective(config, device, seeds.objective),
            make_updater=lambda weights: make_updater(config, weights),
            clock=clock,
            timers=timers,
            device=device,
            seed=seeds.learner,
        )
        actor = Actor(
            envs=envs,
            network=network,
            channel=channel,
            config=config,
            clock=clock,
            timers=timers,
            device=device,
            max_rows=rows_per_block(config),
            seed=seeds.actor,
        )
    except BaseException:
        envs.close()
        if memory is not None:
            memory.close()
        raise
    return Parts(
        config=config,
        spec=spec,
        device=device,
        envs=envs,
        actor=actor,
        memory=memory,
        learner=learner,
        channel=channel,
        limiter=RateLimiter(config, clock, memory),
        clock=clock,
        timers=timers,
        faults=faults,
        seeds=seeds,
    )


def make_network(config: Config, spec: EnvSpec, device: torch.device, seed: int) -> QNetwork:
    """The network with weights drawn from ``seed``, passed through the model transform."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = build_network(spec, config)
    return model_transform(config)(network.to(device))


def model_transform(config: Config) -> ModelTransform:
    """What is done to a network from outside once it is built; the network never knows."""

    def compiled(network: QNetwork) -> QNetwork:
        network.compile()
        network.allows_shortcuts = False
        return network

    return compiled if config.compile else lambda network: network


def make_memory(config: Config, spec: EnvSpec, device: torch.device, seed: int) -> Ring:
    directory = Path(config.replay_dir) if config.replay_dir else None
    check_fits(spec, config.envs, config.buffer_size, config.prioritized_replay, on_disk=directory)
    generator = torch.Generator(device=device).manual_seed(seed)
    sampler: Sampler
    if config.prioritized_replay:
        sampler = PrioritizedSampler(
            config.buffer_size // config.envs,
            config.envs,
            config.prioritized_replay_alpha,
            config.prioritized_replay_eps,
            device,
            generator,
        )
    else:
        sampler = UniformSampler(generator)
    return Ring(
        spec,
        config.envs,
        config.buffer_size,
        config.n_steps,
        config.gamma,
        sampler,
        device,
        directory,
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
        generator=torch.Generator(device=device).manual_seed(seed),
    )


def make_updater(config: Config, weights: FlatWeights) -> Updater:
    optimiser = make_optimiser(config.optimizer, weights.data, config.optimizer_eps)
    return LocalUpdater(weights, optimiser, config.max_grad_norm)


def is_image(spec: EnvSpec) -> bool:
    return image_layout(spec.obs_shape) is not None


def resolve_device(name: str, spec: EnvSpec) -> torch.device:
    """``auto``: the accelerator for images; small vectors are quicker on the CPU."""
    if name == "auto":
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        return accelerator if accelerator is not None and is_image(spec) else torch.device("cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"device '{name}' is not usable here ({reason}); try cpu") from None
    return device


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
