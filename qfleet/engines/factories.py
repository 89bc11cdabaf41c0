"""Config in, one part of a run out: environments, networks, memory, objective, updater."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from qfleet.agent.population import agent_seeds
from qfleet.agent.updaters.fused import FusedUpdater, has_kernels
from qfleet.agent.updaters.local import LocalUpdater
from qfleet.agent.updaters.optimisers import make_optimiser
from qfleet.agent.weights import FlatWeights
from qfleet.algorithms.objective import Objective
from qfleet.config.config import Config
from qfleet.core.seeding import Seeds, mix_seeds
from qfleet.core.types import EnvSpec, Updater, VectorEnv
from qfleet.engines.placement import Placement, free_device_bytes
from qfleet.envs.factory import make_envs
from qfleet.memory.ring import Ring
from qfleet.memory.rollout import Rollout
from qfleet.memory.samplers import PrioritizedSampler, Sampler, UniformSampler
from qfleet.memory.sizing import check_fits
from qfleet.networks.factory import make_network
from qfleet.networks.population import Population
from qfleet.networks.qnetwork import QNetwork
from qfleet.telemetry.faults import FaultLog


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


def make_networks(
    config: Config, spec: EnvSpec, device: torch.device, members: Sequence[int] | None = None
) -> QNetwork:
    """The learner's network, or those of a population's agents, all or some, as one."""
    members = range(config.population) if members is None else members
    seeds = [Seeds.of(seed).network for seed in agent_seeds(config, members)]
    networks = [make_network(config, spec, device, seed) for seed in seeds]
    return networks[0] if config.population == 1 else Population(networks)


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
    capturable = place.capturable and device.type == place.device.type
    sampler: Sampler
    if config.prioritized_replay:
        sampler = PrioritizedSampler(
            config.buffer_size // config.envs,
            config.envs,
            config.prioritized_replay_alpha,
            config.prioritized_replay_eps,
            device,
            generator,
            capturable,
        )
    else:
        sampler = UniformSampler(generator, capturable)
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
        capturable,
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


def make_updater(config: Config, weights: FlatWeights, capturable: bool) -> Updater:
    if capturable and has_kernels(config.optimizer, weights.data.device):
        return FusedUpdater(weights, config.optimizer_eps, config.max_grad_norm)
    optimiser = make_optimiser(config.optimizer, weights.data, config.optimizer_eps)
    return LocalUpdater(weights, optimiser, config.max_grad_norm)
