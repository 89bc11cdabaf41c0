"""The parts of a run, as a run sees them: what engines build and what they add by hooks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from qfleet.accelerator.stream_timer import StreamTimer
from qfleet.agent.background_evaluation import BackgroundEvaluator
from qfleet.agent.evaluation import Evaluation, GiveUp, HostEvaluator
from qfleet.agent.learner import Learner
from qfleet.agent.weights import FlatWeights, SavedWeights
from qfleet.config.config import Config
from qfleet.core.errors import CheckpointError
from qfleet.core.seeding import Seeds, mix_seeds
from qfleet.core.types import (
    Clock,
    Collector,
    EnvSpec,
    EpisodeSource,
    Memory,
    StateDict,
    VectorEnv,
    WeightsChannel,
)
from qfleet.data.recorder import RecordingCollector, make_recorder
from qfleet.engines.loop import RateLimiter
from qfleet.engines.stage_rates import Stages
from qfleet.envs.factory import make_envs
from qfleet.envs.registry import ale_game
from qfleet.memory.columns import check_transitions
from qfleet.networks.qnetwork import QNetwork
from qfleet.storage.state_checks import check_like
from qfleet.telemetry.faults import FaultLog
from qfleet.telemetry.timeline import draw_timeline
from qfleet.telemetry.timers import Timers
from qfleet.telemetry.trace import Trace
from qfleet.telemetry.usage import Usage


class Setup(NamedTuple):
    """The input of an engine's ``build``."""

    config: Config
    faults: FaultLog
    restarted_at: int = 0
    """Env steps at which environments without a stored state start new episodes."""
    trace: Trace | None = None
    members: Sequence[int] | None = None
    """Agents of a population that train; None: all."""
    thorough: bool = False
    """Measure every choice for the accelerator instead of taking the usual one."""
    report: Callable[[str], None] = lambda _: None
    """Called with what is being done, if it may take seconds."""

    @property
    def seeds(self) -> Seeds:
        return Seeds.of(self.config.seed)

    def make_envs(self, closing: contextlib.ExitStack) -> list[VectorEnv]:
        """Return the environments to train in, in groups of (almost) equal size."""
        config, seed, envs = self.config, self.seeds.envs, list[VectorEnv]()
        seed = mix_seeds(seed, self.restarted_at) if self.restarted_at else seed
        groups = max(1, config.env_groups)
        if ale_game(config.env):  # a fifth of a second each
            self.report(f"creating {config.envs} environments")
        for group in range(groups):
            size = config.envs // groups + (group < config.envs % groups)
            group_seed = mix_seeds(seed, group) if group else seed
            envs.append(make_envs(config, size, group_seed, training=True, on_fault=self.faults))
            closing.callback(envs[-1].close)
        return envs

    def make_timers(self, lane: str) -> Timers:
        return Timers(self.trace.lane(lane) if self.trace else None, lane)

    def make_evaluator(
        self,
        network: QNetwork,
        device: torch.device,
        closing: contextlib.ExitStack | None,
        apart: bool = False,
    ) -> HostEvaluator:
        """``closing`` None: the caller closes it. ``apart``: training goes on meanwhile."""
        seed = self.seeds.eval_envs
        evaluator = HostEvaluator(self.config, network, device, seed, self.faults, apart)
        if closing is not None:
            closing.callback(evaluator.close)
        return evaluator


class Model(Protocol):
    """The network that a run trains: what is evaluated, saved and resumed."""

    online: QNetwork

    @property
    def weights(self) -> SavedWeights: ...

    @property
    def lr_scale(self) -> float: ...

    @lr_scale.setter
    def lr_scale(self, scale: float) -> None: ...

    def read_metrics(self) -> dict[str, float]:
        """Return numbers of the newest update; none before the first one."""
        ...

    def state_dict(self) -> StateDict: ...

    def load_state_dict(self, state: StateDict) -> None: ...


class PolicyEvaluator(Protocol):
    """Plays the evaluations of a run with the weights that it has at that moment."""

    def play(self, give_up: GiveUp) -> Evaluation | None:
        """Return the episodes, agent-major; None if ``give_up`` returned True before their end."""
        ...


# ruff: noqa: ARG002 (the arguments are for subclasses)
class EngineHook:
    """What an engine adds to a run. Every method does nothing unless it is overridden."""

    def on_turn(self, folder: Path) -> str | None:
        """Called between turns of the loop. A returned line is shown."""
        return None

    def scalars(self, wall_s: float) -> Mapping[str, float | None]:
        """Return further scalars for the log."""
        return {}

    def result(self) -> Mapping[str, Any]:
        """Return fields of ``Result`` that only this engine knows."""
        return {}

    def usage(self, here: Usage) -> Usage:
        """Return what all processes have used; ``here``: this process and its children."""
        return here

    def measure(self, end_to_end: float) -> Stages | None:
        """Return what each stage can do alone, at the end. The environments are unusable after.

        ``end_to_end`` is the rate that the run reached, in env steps per second.
        """
        return None

    def on_finish(self, run_s: float, give_up: Callable[[], bool]) -> Sequence[str]:
        """Called once all is trained and saved, after ``run_s`` seconds; return lines to show.

        It may measure for some seconds, until ``give_up`` returns True. Not called if the run was
        interrupted.
        """
        return ()

    def on_end(self, folder: Path, trace: Trace | None) -> Sequence[str]:
        """Called after the last checkpoint, with the run's trace if there is one; shown lines."""
        return ()

    def state_dict(self) -> Mapping[str, StateDict]:
        """Return further sections of a checkpoint."""
        return {}

    def load_state_dict(self, state: Mapping[str, StateDict]) -> None:
        """Restore from all sections of a checkpoint."""


Hook = TypeVar("Hook", bound=EngineHook)


@dataclass(kw_only=True)
class Parts:
    """The parts of a run that every engine has."""

    setup: Setup
    spec: EnvSpec
    device: torch.device
    env_seeds: list[int]
    """The seed of each environment."""
    clock: Clock
    timers: list[Timers]
    """One per thread; the first is the learner's, or the mean of all workers of a cluster."""
    collector: EpisodeSource
    model: Model
    evaluator: PolicyEvaluator | None
    """None: the environment cannot be made, so nothing is evaluated (offline training)."""
    closing: contextlib.ExitStack
    """Closes what the engine has opened."""
    notes: list[str] = field(default_factory=list)
    """Choices for this machine and their reasons; shown at the start."""
    hooks: list[EngineHook] = field(default_factory=list)
    members: Sequence[int] = (0,)
    """Numbers of the agents that train here; agent 0 if there is no population."""
    device_times: Mapping[str, StreamTimer] = field(default_factory=dict)
    """Stage → the accelerator's time for it, if it is measured."""
    draw_timeline: Callable[[Trace, Path], object] = draw_timeline
    driver: Timers | None = None
    """Of this process, if ``timers`` are those of workers."""

    @property
    def config(self) -> Config:
        return self.setup.config

    @property
    def faults(self) -> FaultLog:
        return self.setup.faults

    @property
    def background(self) -> BackgroundEvaluator | None:
        """The evaluator, if it plays while the training goes on."""
        return self.evaluator if isinstance(self.evaluator, BackgroundEvaluator) else None

    @property
    def threads(self) -> list[Timers]:
        """All timers; those of the thread that saves are the first or the last."""
        return [*self.timers, *([] if self.driver is None else [self.driver])]

    def resources(self, wall_s: float, run_s: float) -> dict[str, dict[str, float]]:
        """Return the shares of stages and idle of every thread and the accelerator: each adds to 1.

        ``wall_s``: seconds of the run; ``run_s``: those of this invocation, which the accelerator
        was timed in.
        """
        shares = {timers.name: timers.usage(wall_s) for timers in self.threads}
        if self.device_times:
            busy = {stage: timer.seconds / run_s for stage, timer in self.device_times.items()}
            # Work on several streams overlaps.
            total = max(1.0, sum(busy.values()))
            own = {stage: share / total for stage, share in busy.items() if share > 0}
            shares[self.device.type] = {**own, "idle": max(0.0, 1.0 - sum(own.values()))}
        return shares

    def find(self, kind: type[Hook]) -> Hook | None:
        """Return the engine's hook of this class, if it has one."""
        return next((hook for hook in self.hooks if isinstance(hook, kind)), None)

    def state_dict(self) -> dict[str, StateDict]:
        """Return the sections of a checkpoint."""
        state = {
            "learner": self.model.state_dict(),
            "memory": {},
            "actor": self.collector.state_dict(),
        }
        for hook in self.hooks:
            state |= hook.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, StateDict]) -> bool:
        """Restore; return False if the environments had to start new episodes.

        The clock must have been restored before.
        """
        self.model.load_state_dict(state["learner"])
        for hook in self.hooks:
            hook.load_state_dict(state)
        return self.collector.load_state_dict(state["actor"])

    def start_from(self, weights: FlatWeights) -> None:
        """Begin a new run with copies of these weights instead of random ones."""
        self.model.weights.copy_from(weights)

    def close(self) -> None:
        self.closing.close()


@dataclass(kw_only=True)
class LoopParts(Parts):
    """The parts of a run whose loop of collecting and learning advances in this process."""

    collector: Collector
    memory: Memory
    learner: Learner
    channel: WeightsChannel
    model: Model = field(init=False)
    limiter: RateLimiter = field(init=False)

    def __post_init__(self) -> None:
        self.model = self.learner
        # Actors in processes record for themselves.
        if self.config.record and self.config.engine != "actors":
            envs = self.config.envs * len(self.members)
            recorder = make_recorder(self.config, self.spec, envs, self.faults)
            self.collector = RecordingCollector(self.collector, recorder)
            self.closing.callback(recorder.close)
        self.limiter = RateLimiter(self.config, self.clock, self.memory)

    def state_dict(self) -> dict[str, StateDict]:
        return {**super().state_dict(), "memory": self.memory.state_dict()}

    def load_state_dict(self, state: Mapping[str, StateDict]) -> bool:
        most = 1 + 2 * self.clock.env_steps * self.config.gradient_steps
        check_like(state["learner"], self.model.state_dict(), "learner", most=most)
        stored = state["memory"]
        for one in stored.get("rings", {"": stored}).values():
            if "position" not in one:  # a dataset is checked where it is read
                check_transitions(one, self.spec)
        self.memory.load_state_dict(stored)
        rows = stored.get("total_rows", stored.get("written"))  # None: several rings, of actors
        if rows is not None and rows * self.limiter.envs != self.clock.env_steps:
            raise CheckpointError(f"memory: {rows} rows are not {self.clock.env_steps} env steps")
        restored = super().load_state_dict(state)
        if not restored:
            self.memory.end_open_episodes()
        self.channel.restart(self.clock.updates)
        return restored

    def start_from(self, weights: FlatWeights) -> None:
        super().start_from(weights)
        self.learner.move_target(1.0)
        online, target = self.learner.networks[0], self.learner.networks[-1]
        for theirs, ours in zip(target.torsos, online.torsos, strict=True):
            theirs.load_state_dict(ours.state_dict())  # its buffers
        self.channel.restart(self.clock.updates)
