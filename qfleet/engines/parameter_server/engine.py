"""The parameter-server engine: workers collect and learn, servers hold the weights.

Every worker runs the loop of the serial engine in a process of its own. This process starts them,
has them train in short time slices, fetches weights to evaluate and save, and has neither a learner
nor a memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from qfleet.agent.weights import FlatWeights
from qfleet.config.config import Config
from qfleet.core.errors import ConfigError
from qfleet.core.types import Clock, EnvSpec, StateDict
from qfleet.data.manifest import Dataset
from qfleet.engines.cluster.processes_hook import ProcessesHook
from qfleet.engines.cluster.ray_cluster import LEAST_BYTES_WITH_TORCH, check_memory
from qfleet.engines.factories import check_replay_fits
from qfleet.engines.offline import EpochHook, make_evaluator_if_possible
from qfleet.engines.parameter_server import resize_request
from qfleet.engines.parameter_server.fleet import Fleet
from qfleet.engines.parameter_server.limits import count_workers
from qfleet.engines.parts import EngineHook, Parts, PolicyEvaluator, Setup
from qfleet.engines.placement import Placement
from qfleet.engines.torch_settings import set_threads
from qfleet.envs.factory import make_envs
from qfleet.networks.factory import has_batch_norm, make_network
from qfleet.networks.qnetwork import QNetwork
from qfleet.telemetry.timeline import draw_workers
from qfleet.telemetry.timers import Timers


def build(setup: Setup) -> Parts:
    """Create the parts of the supervising process."""
    config, seeds = setup.config, setup.seeds
    device, closing = torch.device("cpu"), contextlib.ExitStack()
    spec = _spec(setup)
    if not config.address:
        # Raises here what the workers would raise; those of a cluster may have other devices.
        Placement.of(config, spec, in_background=False)
    _check_room(config, spec, config.workers + config.servers, config.workers)
    set_threads(config.threads, spec)
    clock, timers = Clock(frame_skip=spec.frame_skip), Timers()
    network = make_network(config, spec, device, seeds.network)
    if has_batch_norm(network):
        raise ConfigError(
            f"network '{config.network}' has batch normalisation, whose statistics workers do not "
            "send; use layer normalisation, or another engine"
        )
    weights = FlatWeights(network)

    def check_more(extra: int) -> None:
        _check_room(config, spec, extra, extra)

    fleet = Fleet(setup, clock, timers, weights, check_more)
    servers = f"{config.servers} server{'s' if config.servers > 1 else ''}"
    notes = [f"{count_workers(config.workers)} and {servers}, {config.update}"]
    evaluator: PolicyEvaluator | None
    hooks: list[EngineHook] = [FleetHook(fleet, config)]
    if config.data:
        evaluator = make_evaluator_if_possible(setup, spec, network, device, closing, notes)
        hooks.append(EpochHook(clock, Dataset(config.data).manifest.transitions))
    else:
        evaluator = setup.make_evaluator(network, device, closing)
    return Parts(
        setup=setup,
        spec=spec,
        device=device,
        env_seeds=[],
        clock=clock,
        timers=[timers],
        driver=Timers(name="driver"),
        collector=fleet,
        evaluator=evaluator,
        model=FetchedModel(network, weights, fleet),
        notes=notes,
        hooks=hooks,
        draw_timeline=draw_workers,
        closing=closing,
    )


def _spec(setup: Setup) -> EnvSpec:
    """Return all that this process needs of an environment."""
    config = setup.config
    if config.data:
        return Dataset(config.data).spec
    envs = make_envs(config, 1, setup.seeds.envs, training=False, on_fault=setup.faults)
    envs.close()
    return envs.spec


def run(parts: Parts, keep_going: Callable[[], bool]) -> None:
    """Have the workers train until ``keep_going`` returns False or all steps are taken."""
    fleet = parts.collector
    assert isinstance(fleet, Fleet)
    fleet.run(keep_going, lambda: parts.model.lr_scale)


class FetchedModel:
    """A network whose weights are on servers; the fleet copies them into ``weights``."""

    def __init__(self, network: QNetwork, weights: FlatWeights, fleet: Fleet) -> None:
        self.online, self.weights, self._fleet = network, weights, fleet
        self.lr_scale = 1.0

    def read_metrics(self) -> dict[str, float]:
        return self._fleet.metrics()

    def state_dict(self) -> StateDict:
        return {
            "weights": self.weights.data,
            "buffers": self.weights.buffers(),
            "lr_scale": self.lr_scale,
        }

    def load_state_dict(self, state: StateDict) -> None:
        self.weights.data.copy_(state["weights"])
        for name, buffer in self.weights.buffers().items():
            buffer.copy_(state["buffers"][name])
        self.lr_scale = state["lr_scale"]


@dataclass
class FleetHook(ProcessesHook):
    """Also handles requests for more or fewer workers (``qfleet scale``)."""

    processes: Fleet

    def on_turn(self, folder: Path) -> str | None:
        return resize_request.handle(folder, self.processes.resize)


def _check_room(config: Config, spec: EnvSpec, processes: int, workers: int) -> None:
    """Check that this machine has memory for more processes, of which some are workers.

    A worker checks only its own replay memory.
    """
    if config.address:
        return
    if config.replay and not config.data:
        share = min(-(-config.buffer_size // config.workers), config.replay_capacity)
        check_replay_fits(config, spec, workers * share, torch.device("cpu"))
    check_memory(processes, LEAST_BYTES_WITH_TORCH)
