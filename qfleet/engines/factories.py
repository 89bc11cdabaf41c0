"""Factories that engines share: each makes one part of a run from its configuration."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from qfleet.accelerator.streams import has_streams
from qfleet.agent.learner import Learner
from qfleet.agent.population import agent_seeds
from qfleet.agent.recorded_learner import RecordedLearner
from qfleet.agent.updaters.fused import FusedUpdater, has_kernels
from qfleet.agent.updaters.local import LocalUpdater
from qfleet.agent.updaters.optimisers import make_optimiser
from qfleet.agent.weights import FlatWeights
from qfleet.algorithms.objective import Objective
from qfleet.algorithms.offline_objective import OfflineObjective
from qfleet.config.config import Config
from qfleet.core.seeding import Seeds
from qfleet.core.types import Clock, EnvSpec, Memory, Updater
from qfleet.engines.placement import Placement, free_device_bytes
from qfleet.engines.tuning import AUTOCAST, Choice, apply_choice
from qfleet.memory.agent_rings import AgentRings
from qfleet.memory.host_sampler import HostPrioritizedSampler
from qfleet.memory.packed_ring import PackedRing
from qfleet.memory.ring import Ring
from qfleet.memory.rollout import Rollout
from qfleet.memory.samplers import PrioritizedSampler, UniformSampler
from qfleet.memory.sizing import check_fits
from qfleet.networks.factory import make_network
from qfleet.networks.fused_cnn import fuse
from qfleet.networks.population import Population
from qfleet.networks.qnetwork import QNetwork
from qfleet.telemetry.timers import Timers


def make_networks(
    config: Config, spec: EnvSpec, device: torch.device, members: Sequence[int] | None = None
) -> QNetwork:
    """Return the learner's network, or those of a population's agents (None: all) as one."""
    members = range(config.population) if members is None else members
    seeds = [Seeds.of(seed).network for seed in agent_seeds(config, members)]
    networks = [make_network(config, spec, device, seed) for seed in seeds]
    return networks[0] if config.population == 1 else Population(networks)


def make_memory(
    config: Config,
    spec: EnvSpec,
    place: Placement,
    state_values: Callable[[Tensor], Tensor],
    members: Sequence[int] = (0,),
) -> Ring | AgentRings | Rollout:
    """Return a replay ring per agent, or a rollout, which uses ``state_values`` for its returns."""
    seeds = [Seeds.of(seed).memory for seed in agent_seeds(config, members)]
    if config.replay:
        if config.population == 1:
            return make_ring(config, spec, place, seeds[0])
        # When half of the agents stop, the memories of the others are copied.
        most = len(seeds) + (-(-len(seeds) // 2) if config.halving_interval else 0)
        check_replay_fits(config, spec, config.replay_capacity, place.replay, memories=most)
        rings = {
            agent: make_ring(config, spec, place, seed)
            for agent, seed in zip(members, seeds, strict=True)
        }
        return AgentRings(rings, config.batch_size)
    return Rollout(
        spec,
        config.envs * len(members),
        config.train_freq // config.envs,
        config.gamma,
        config.td_lambda,
        state_values,
        seeds,
        place.replay,
        batch_size=config.batch_size,
        epochs=config.gradient_steps * config.batch_size // config.train_freq,
    )


def make_ring(
    config: Config,
    spec: EnvSpec,
    place: Placement,
    seed: int,
    ring_factory: Callable[..., Ring] = Ring,
) -> Ring:
    device = place.replay
    if ring_factory is Ring and device.type != place.device.type:
        ring_factory = functools.partial(PackedRing, to=place.device)
    capacity = config.replay_capacity
    check_replay_fits(config, spec, capacity, device)
    capturable = place.capturable and device.type == place.device.type
    return ring_factory(
        spec,
        config.envs,
        capacity,
        config.n_steps,
        config.gamma,
        make_sampler(config, capacity, device, seed, capturable),
        device,
        Path(config.replay_dir) if config.replay_dir else None,
        config.replay_compression,
        capturable,
    )


def check_replay_fits(
    config: Config, spec: EnvSpec, transitions: int, device: torch.device, memories: int = 1
) -> None:
    """Raise MemoryRefusedError unless these ``memories``, each of ``transitions``, fit."""
    check_fits(
        spec,
        config.envs,
        transitions,
        config.prioritized_replay,
        budget_bytes=None if device.type == "cpu" else free_device_bytes(device),
        on_disk=Path(config.replay_dir) if config.replay_dir else None,
        compression=config.replay_compression,
        memories=memories,
    )


def make_sampler(
    config: Config, capacity: int, device: torch.device, seed: int, capturable: bool = False
) -> PrioritizedSampler | UniformSampler:
    """Return the sampler of a ring of ``capacity`` transitions."""
    generator = torch.Generator(device=device).manual_seed(seed)
    if not config.prioritized_replay:
        return UniformSampler(generator, capturable)
    on_host = device.type == "cpu" and not capturable
    return (HostPrioritizedSampler if on_host else PrioritizedSampler)(
        capacity // config.envs,
        config.envs,
        config.prioritized_replay_alpha,
        config.prioritized_replay_eps,
        device,
        generator,
        capturable,
    )


def make_objective(config: Config, device: torch.device, seed: int) -> Objective:
    kind: Callable[..., Objective] = Objective
    if config.cql_alpha or config.bcq_threshold or config.loss == "cross-entropy":
        kind = functools.partial(
            OfflineObjective, cql_alpha=config.cql_alpha, imitates=config.bcq_threshold > 0
        )
    return kind(
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


def make_updater(config: Config, weights: FlatWeights, capturable: bool) -> Updater:
    eps, decay, factors = config.optimizer_eps, config.weight_decay, weights.rate_factors(config)
    is_plain = not decay and factors is None  # which is all that the kernels can do
    if capturable and is_plain and has_kernels(config.optimizer, weights.data.device):
        return FusedUpdater(weights, eps, config.max_grad_norm)
    optimiser = make_optimiser(config.optimizer, weights.data, eps, decay, factors)
    return LocalUpdater(weights, optimiser, config.max_grad_norm)


def make_learner(
    config: Config,
    spec: EnvSpec,
    place: Placement,
    memory: Memory,
    clock: Clock,
    timers: Timers,
    *,
    members: Sequence[int] = (0,),
    updater_factory: Callable[[FlatWeights], Updater] | None = None,
    network_factory: Callable[[], QNetwork] | None = None,
    draw_stage: str | None = None,
    use_kernels: bool = False,
) -> Learner:
    """Return the learner: ``RecordedLearner`` on accelerators and for populations.

    Exchanges inside of a network cannot be recorded, so one with a ``network_factory`` is plain.

    ``updater_factory``, ``network_factory``: default: those of the configuration. ``use_kernels``:
    let our own kernels replace the network if they can.
    """
    device, seeds = place.device, Seeds.of(config.seed)
    plain = functools.partial(make_networks, config, spec, device, members)
    build = network_factory or plain
    online = build()
    target = build() if config.replay or config.target_network else online
    target.share_statistics(online)
    for network in (online, target):  # first: the learner chooses a gradient that fits
        network.autocast_dtype = AUTOCAST.get(config.precision)
    objective = make_objective(config, device, seeds.objective)
    local = functools.partial(make_updater, config, capturable=place.capturable)
    factory = updater_factory or local
    seed = seeds.learner
    given = (config, online, target, memory, objective, factory, clock, timers, device, seed)
    if (device.type == "cpu" and config.population == 1) or network_factory is not None:
        return Learner(*given, draw_stage=draw_stage)
    return RecordedLearner(
        *given,
        draw_stage=draw_stage,
        # The learning rates of a population are a tensor on every device.
        capturable=place.capturable or config.population > 1,
        fused=fuse(config, spec, online, device) if use_kernels else None,
    )


def evaluates_in_background(config: Config, device: torch.device) -> bool:
    """Return whether evaluations are played while the training goes on.

    Not on a CPU, where both would share the cores, and not where training depends on the result.
    """
    depends = config.lr_plateau_patience or config.pbt_interval or config.halving_interval
    has_it = config.engine in ("pipeline", "device") or config.has_learner_replay
    has_it = has_it and not config.lockstep
    return has_it and has_streams(device) and config.eval_freq > 0 and not depends


def copy_network(
    config: Config,
    spec: EnvSpec,
    weights: FlatWeights,
    choice: Choice,
    members: Sequence[int] = (0,),
) -> tuple[QNetwork, FlatWeights]:
    """Return a network like that of ``weights``, for evaluations beside training, and its own."""
    network = make_networks(config, spec, weights.data.device, members).eval()
    apply_choice(choice, [network], [])
    return network, FlatWeights(network)
