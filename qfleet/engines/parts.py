"""What a run consists of, whichever engine it has; ``build`` makes it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from qfleet.agent.device_evaluation import TensorEvaluator
from qfleet.agent.device_inference import Traffic
from qfleet.agent.learner import Learner
from qfleet.agent.population import Agents
from qfleet.config.config import Config
from qfleet.core.seeding import Seeds
from qfleet.core.types import Clock, Collector, EnvSpec, Memory, VectorEnv, WeightsChannel
from qfleet.engines.loop import RateLimiter
from qfleet.engines.tuning import Tuning
from qfleet.telemetry.faults import FaultLog
from qfleet.telemetry.fleet import Processes
from qfleet.telemetry.timers import Timers


class WorkerFleet(Processes, Protocol):
    """Workers in processes of their own that collect and learn."""

    def run(self, keep_going: Callable[[], bool], lr_scale: Callable[[], float]) -> None:
        """Train until ``keep_going`` returns False or all steps are taken."""
        ...

    def resize(self, workers: int) -> None:
        """Change the number of workers of the running fleet."""
        ...

    def metrics(self) -> dict[str, float]:
        """Return the numbers of the workers' newest updates."""
        ...

    def pids(self) -> dict[str, int]:
        """Return the process ids of workers and servers, by name."""
        ...


class ProcessAccount(Processes, Protocol):
    """What actors and replay shards in processes did and cost."""

    def counts(self) -> dict[str, Any]: ...

    def communication(self) -> dict[str, int | None]: ...


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
    collector: Collector = dataclasses.field(init=False)
    channel: WeightsChannel = dataclasses.field(init=False)
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
    account: ProcessAccount | None = None
    """Of what actors and replay shards in processes did and cost."""
    fleet: WorkerFleet | None = None
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
