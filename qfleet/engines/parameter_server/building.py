"""The parts of a run whose work is done by workers: what is left for the process that supervises.

In: a configuration; out: ``Parts`` whose collector is the fleet, whose memory is elsewhere, and
whose learner holds the weights that are evaluated and saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from qfleet.accelerator.compiling import Compilable
from qfleet.agent.learner import Learner
from qfleet.agent.weights import SameWeights
from qfleet.config.config import Config
from qfleet.core.seeding import Seeds
from qfleet.core.types import Batch, Block, Clock, EnvSpec, StateDict
from qfleet.engines.cluster.ray_cluster import LEAST_BYTES_WITH_TORCH, check_memory
from qfleet.engines.factories import make_objective, make_updater
from qfleet.engines.loop import RateLimiter
from qfleet.engines.parameter_server.fleet import Fleet
from qfleet.engines.parameter_server.limits import several
from qfleet.engines.parts import Parts
from qfleet.engines.placement import Placement
from qfleet.engines.torch_settings import set_threads
from qfleet.envs.factory import make_envs
from qfleet.memory.sizing import check_fits
from qfleet.networks.factory import make_network
from qfleet.telemetry.faults import FaultLog
from qfleet.telemetry.timers import Timers
from qfleet.telemetry.trace import Trace


class Elsewhere:
    """The memory of a process that neither collects nor learns: workers have their own."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def extend(self, block: Block) -> None:
        raise AssertionError(f"{block.rows} rows came here; blocks stay with the workers")

    def can_sample(self) -> bool:
        return False

    def sample(self, count: int, beta: float | torch.Tensor) -> Batch:
        raise AssertionError(f"{count} samples (β {beta}) were asked for; workers have them")

    def update_priorities(self, index: torch.Tensor, priority: torch.Tensor) -> None:
        raise AssertionError(f"priorities {priority} of {index} came here; workers keep them")

    def generators(self) -> list[torch.Generator]:
        return []

    def compilables(self) -> list[Compilable]:
        return []

    def end_open_episodes(self) -> None:
        """There are none here."""

    def close(self) -> None:
        """There is nothing to let go of."""

    def state_dict(self) -> StateDict:
        return {}

    def load_state_dict(self, state: StateDict) -> None:
        """Workers begin with empty memories."""


def _check_here(config: Config, spec: EnvSpec) -> None:
    """What workers would refuse, each of them time and again; on other machines they must."""
    if config.address:
        return
    Placement.of(config, spec, in_background=False)
    # A worker sees its own memory alone, and all of them are on this machine.
    _check_memories(config, spec, config.buffer_size)
    check_memory(config.workers + config.servers, LEAST_BYTES_WITH_TORCH)


def _check_more(config: Config, spec: EnvSpec, workers: int) -> None:
    """Whether this machine has room for so many more workers, and for their memories."""
    if config.address:
        return
    check_memory(workers, LEAST_BYTES_WITH_TORCH)
    _check_memories(config, spec, workers * -(-config.buffer_size // config.workers))


def _check_memories(config: Config, spec: EnvSpec, transitions: int) -> None:
    if config.replay:
        check_fits(
            spec,
            config.envs,
            transitions,
            config.prioritized_replay,
            on_disk=Path(config.replay_dir) if config.replay_dir else None,
            compression=config.replay_compression,
        )


def build(
    config: Config,
    faults: FaultLog,
    restarted_at: int = 0,
    trace: Trace | None = None,
    members: Sequence[int] | None = None,
) -> Parts:
    """Create the parts of the supervising process; populations are refused by validation."""
    del members

    seeds, device = Seeds.of(config.seed), torch.device("cpu")
    envs = make_envs(config, 1, seeds.envs, training=False, on_fault=faults)
    spec = envs.spec
    envs.close()
    _check_here(config, spec)
    set_threads(config.threads, spec)
    clock, timers, memory = Clock(frame_skip=spec.frame_skip), Timers(), Elsewhere()
    online = make_network(config, spec, device, seeds.network)
    learner = Learner(
        config=config,
        online=online,
        target=make_network(config, spec, device, seeds.network) if config.replay else online,
        memory=memory,
        objective=make_objective(config, device, seeds.objective),
        make_updater=lambda weights: make_updater(config, weights, capturable=False),
        clock=clock,
        timers=timers,
        device=device,
        seed=seeds.learner,
    )
    servers = f"{config.servers} server{'s' if config.servers > 1 else ''}"
    parts = Parts(
        config=config,
        spec=spec,
        device=device,
        envs=[],
        env_seeds=[],
        memory=memory,
        learner=learner,
        limiter=RateLimiter(config, clock, memory),
        clock=clock,
        timers=[timers],
        faults=faults,
        seeds=seeds,
        notes=[f"{several(config.workers)} and {servers}, {config.update}"],
    )
    parts.channel = SameWeights()
    parts.fleet = Fleet(
        config,
        clock,
        timers,
        faults,
        learner.weights.data,
        restarted_at,
        trace is not None,
        lambda workers: _check_more(config, spec, workers),
    )
    parts.collector = parts.fleet
    return parts
