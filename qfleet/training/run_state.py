"""The state of a run: what its hooks and users' callbacks read and change."""

from __future__ import annotations

import contextlib
import json
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from qfleet.agent.evaluation import Evaluation
from qfleet.config.config import Config
from qfleet.core.errors import ConfigError, one_line
from qfleet.core.files import atomic_write_text
from qfleet.core.types import StateDict
from qfleet.engines.parts import Parts
from qfleet.engines.stage_rates import Stages
from qfleet.storage.locks import RunLock
from qfleet.storage.rundir import RESERVE
from qfleet.storage.state_checks import check_like
from qfleet.telemetry.faults import FaultLog
from qfleet.telemetry.progress import Progress
from qfleet.telemetry.usage import Usage, UsageMeter
from qfleet.telemetry.writers import Writers
from qfleet.training.callbacks import Callbacks, Hook, as_callbacks
from qfleet.training.divergence import DivergenceGuard
from qfleet.training.standings import Standings

RESERVED_BYTES = 32 * 1024
"""Size of a file that is removed to make room for the result on a full disk."""


@dataclass(frozen=True)
class RunOptions:
    """How one invocation runs. Not part of the experiment: it changes no schedule."""

    stop_after: int | None = None
    """Stop once this many env steps are done in total; `qfleet resume` continues."""
    max_wall_s: float | None = None
    """Stop after this many seconds; `qfleet resume` continues."""
    display: Literal["live", "plain", "silent"] = "silent"
    """How progress is shown."""
    trace: bool = False
    """Record what every thread does, as trace.json (Chrome, Perfetto) and plots/timeline.png."""
    stage_rates: bool = False
    """Measure at the end what each stage could do alone, for some seconds, if stages overlap."""
    note: str | None = None
    """A line to show when training begins."""


class RunState:
    """What hooks and callbacks of a run share."""

    parts: Parts
    writers: Writers
    lock: RunLock
    meter: UsageMeter
    """Of this process and its children, from the end of the preparation on."""

    def __init__(
        self,
        config: Config,
        folder: Path,
        options: RunOptions,
        hooks: Sequence[Hook],
        callbacks: Callbacks,
    ) -> None:
        self.config, self.folder, self.options = config, folder, options
        self._hooks, self._callbacks = hooks, as_callbacks(callbacks)
        self.progress = Progress(config.steps, mode=options.display)
        self.faults = FaultLog(notify=self.progress.message)
        self.standings = Standings(config.population)
        self.divergence = DivergenceGuard(config, self.faults, folder)
        self.evaluation: Evaluation | None = None
        """The newest evaluation."""
        self.evaluated_at = -1
        """Env steps of the newest evaluation."""
        self.best_return: float | None = None
        self.survivors: list[int] | None = None
        """Agents of a population that continue in a smaller batch, once the engine has stopped."""
        self.stages: Stages | None = None
        """The rate of each stage alone; None until it is measured."""
        self.stopped_by: str | None = None
        self.interrupted_by: int | None = None
        """The signal that requested a stop, if one did."""
        self.not_training_s = 0.0
        """Seconds spent on evaluations and checkpoints."""
        self.earlier_wall_s = 0.0
        """Seconds of the invocations before a resume."""
        self.earlier_usage = Usage()
        """What these invocations used."""
        self.started_s = time.monotonic()
        self._marks = {"log": 0, "eval": 0, "checkpoint": 0, "round": 0}

    def due(self, what: str, interval: int) -> bool:
        """Return whether the clock has passed another multiple of ``interval`` since the last."""
        count = self.parts.clock.env_steps // interval
        if count <= self._marks[what]:
            return False
        self._marks[what] = count
        return True

    def postpone(self, what: str) -> None:
        """Make ``what`` due again at once."""
        self._marks[what] -= 1

    def settle(self, what: str) -> None:
        """Take ``postpone`` back: it is done."""
        self._marks[what] += 1

    def stop(self, reason: str) -> None:
        """End the run after this turn; the first reason counts."""
        self.stopped_by = self.stopped_by or reason

    def reason_to_stop(self) -> str | None:
        env_steps, options = self.parts.clock.env_steps, self.options
        if self.interrupted_by is not None:
            return signal.Signals(self.interrupted_by).name
        if env_steps >= self.config.steps:
            return "steps"
        if options.stop_after is not None and env_steps >= options.stop_after:
            return "stop_after"
        return "max_wall" if self.is_out_of_time() else None

    def is_out_of_time(self) -> bool:
        """Return whether a signal or the time limit has requested a stop."""
        elapsed_s, limit_s = time.monotonic() - self.started_s, self.options.max_wall_s
        return self.interrupted_by is not None or (limit_s is not None and elapsed_s >= limit_s)

    def wall_s(self) -> float:
        """Return the seconds of the run so far, earlier invocations included."""
        return self.earlier_wall_s + time.monotonic() - self.started_s

    def usage(self) -> Usage:
        """Return what all processes of the run have used, earlier invocations included."""
        now = self.meter.read()
        for hook in self.parts.hooks:
            now = hook.usage(now)
        return self.earlier_usage.plus(now)

    @contextlib.contextmanager
    def not_training(self, stage: str) -> Iterator[None]:
        """Count the time spent inside as not spent on training, but on this stage."""
        began_s = time.perf_counter()
        yield
        ended_s = time.perf_counter()
        (self.parts.driver or self.parts.timers[0]).add(stage, began_s, ended_s)
        self.not_training_s += ended_s - began_s

    def take_episodes(self) -> None:
        """Add the episodes that have finished to the standings."""
        episodes = self.parts.collector.take_episodes()
        self.standings.add_episodes(episodes, self.parts.members, self.config.envs)

    def call(self, method: str, *arguments: Any) -> None:
        """Call this method of the users' callbacks; the run stops if one returns False."""
        answers = [getattr(callback, method)(self, *arguments) for callback in self._callbacks]
        if any(isinstance(answer, (bool, np.bool_)) and not answer for answer in answers):
            self.stop("callback")

    def show(self, lines: Sequence[str | None]) -> None:
        if self.options.display != "silent":
            for line in filter(None, lines):
                self.progress.message(line)

    def alert(self, message: str) -> None:
        """Show a message and count it as a fault of kind ``alert``."""
        self.faults("alert", message)

    def keep_folder(self) -> None:
        """Create the folder of the run again if it was deleted.

        Raise RunBusyError if another run has begun there: this one must not write into it.
        """
        if self.lock.is_in_place():
            return
        lost = f"'{self.folder}' was deleted: what it held is lost"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.lock.renew()
            self.write_head()
            self.faults("folder", f"{lost}; it was made again")
        except (OSError, ConfigError) as error:
            self.faults("folder", f"{lost}, and it cannot be made again: {one_line(error)}")

    def write_head(self) -> None:
        """Write what ``resume`` needs beside a checkpoint, and what explains the run."""
        atomic_write_text(self.folder / "config.json", self.config.to_json())
        atomic_write_text(self.folder / "seeds.json", json.dumps(self.seeds(), indent=2))
        atomic_write_text(self.folder / RESERVE, "\0" * RESERVED_BYTES)

    def seeds(self) -> dict[str, Any]:
        """Return every seed of the run, by consumer, and the seed of each environment."""
        return {
            "run": self.config.seed,
            **asdict(self.parts.setup.seeds),
            "each_env": self.parts.env_seeds,
        }

    # --- checkpoints --------------------------------------------------------------------------

    def state_dict(self) -> dict[str, StateDict]:
        """Return the sections of a checkpoint."""
        return {**self.parts.state_dict(), "run": self._own_state()}

    def _own_state(self) -> StateDict:
        clock, own = self.parts.clock, dict[str, Any]()
        for hook in self._hooks:
            own |= hook.state_dict(self)
        timers = {str(i): timers.state_dict() for i, timers in enumerate(self.parts.threads)}
        return {
            "env_steps": clock.env_steps,
            "updates": clock.updates,
            "marks": self._marks,
            "standings": self.standings.state_dict(),
            **own,
            "wall_s": self.wall_s(),
            "usage": asdict(self.usage()),
            "timers": timers,
            "faults": self.faults.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, StateDict]) -> bool:
        """Restore; return False if the environments had to start new episodes."""
        # Checkpoints of older versions do not say what was used.
        own, clock = {"usage": asdict(Usage()), **state["run"]}, self.parts.clock
        # Twice: the workers of a parameter server report their env steps after their updates.
        most = 2 * own["env_steps"] * self.config.gradient_steps
        # These are checked as they load.
        free = ("standings", "evaluation", "timers", "faults", "wall_s", "usage")
        check_like(own, self._own_state(), "run", most=most, free=free)
        check_like(own["usage"], asdict(Usage()), "run/usage")
        clock.env_steps, clock.updates = own["env_steps"], own["updates"]
        restored = self.parts.load_state_dict(state)
        self.standings.load_state_dict(own["standings"])
        for hook in self._hooks:
            hook.load_state_dict(self, own)
        # The intervals may have been changed.
        intervals = {"log": self.config.log_interval, "checkpoint": self.config.checkpoint_freq}
        passed = {what: clock.env_steps // every for what, every in intervals.items()}
        self._marks = {k: min(mark, passed.get(k, mark)) for k, mark in own["marks"].items()}
        self.earlier_wall_s = float(own["wall_s"])
        self.earlier_usage = Usage(**own["usage"])
        for timers, spent in zip(self.parts.threads, own["timers"].values(), strict=False):
            timers.load_state_dict(spent)
        self.faults.load_state_dict(own["faults"])
        return restored
