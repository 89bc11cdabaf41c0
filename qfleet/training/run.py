"""One run: its folder, the loop that its engine advances, and its result.

In: a Config and a folder. Out: the files listed in docs/architecture.md and a ``Result``. The
engine advances the loop and calls ``keep_going`` between turns, which calls the hooks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

from qfleet.agent.policy import Policy
from qfleet.config.config import Config
from qfleet.config.validation import validate
from qfleet.core.errors import (
    CheckpointError,
    ClusterLost,
    ConfigError,
    EnvironmentFault,
    QfleetError,
    RunBusyError,
    one_line,
)
from qfleet.core.files import atomic_write_text, change_folder, writing
from qfleet.core.signals import signals_request_stop
from qfleet.core.urls import is_url
from qfleet.engines import registry
from qfleet.engines.auto import settle
from qfleet.engines.cluster.liveness import RUN_AGAIN
from qfleet.engines.parameter_server import resize_request
from qfleet.engines.torch_settings import TorchSettings
from qfleet.networks.factory import describe_choice
from qfleet.storage.checkpoint import Checkpoint, list_checkpoints, load_policy
from qfleet.storage.locks import RunLock
from qfleet.storage.rundir import RESERVE
from qfleet.storage.state_checks import check_like, reading
from qfleet.storage.vacancy import check_regular_files, check_vacant
from qfleet.telemetry.faults import FaultLog
from qfleet.telemetry.figures import load_early
from qfleet.telemetry.progress import Progress
from qfleet.telemetry.trace import Trace, write_chrome_trace
from qfleet.telemetry.usage import UsageMeter
from qfleet.telemetry.writers import Writers, drop_metrics_beyond
from qfleet.training import tournament
from qfleet.training.callbacks import Callbacks
from qfleet.training.evaluate import Evaluate
from qfleet.training.hooks import Save, standard_hooks
from qfleet.training.result import Result, make_result
from qfleet.training.run_state import RunOptions, RunState


class Run(RunState):
    """A run in progress; ``go`` trains to its end."""

    def __init__(
        self,
        config: Config,
        folder: Path,
        options: RunOptions,
        callbacks: Callbacks = (),
        checkpoint: Checkpoint | None = None,
        initial: Policy | None = None,
    ) -> None:
        """``checkpoint``: continue from there. ``initial``: start with the policy's weights."""
        # Absolute: an environment may change the working directory.
        folder, began_in = folder.absolute(), Path.cwd()
        with Progress(config.steps, mode=options.display) as progress:
            faults = FaultLog(progress.message)
            config, self._chosen = settle(validate(config), progress.preparing, faults)
        for name in ("replay_dir", "record", "data", "validation_data"):
            if (place := getattr(config, name)) and not is_url(place):
                config = config.replace(**{name: str(Path(place).absolute())})
        super().__init__(config, folder, options, standard_hooks(config), callbacks)
        self._learning_since: tuple[float, int] | None = None
        """Time and env steps of this invocation's first update."""
        self._began_at = 0
        """Env steps at the start of this invocation."""
        self._final: Result | None = None
        # Before anything is written: another run may be training in this folder.
        folder.mkdir(parents=True, exist_ok=True)
        self._trace = Trace() if options.trace else None
        with contextlib.ExitStack() as opened:
            opened.callback(change_folder, began_in)
            self.lock = opened.enter_context(RunLock(folder))
            opened.callback(TorchSettings().restore)
            opened.callback(self._count_closing_faults)
            if checkpoint is None:
                check_vacant(folder)  # again: another run may have ended before the lock was ours
            check_regular_files(folder)
            resize_request.forget(folder)
            opened.callback(self.progress.stop)
            self._build(checkpoint)
            opened.callback(lambda: self.parts.close())  # the parts of that moment
            self.meter = UsageMeter(self.parts.device)
            if checkpoint is not None:
                self._restore(checkpoint)
            elif initial is not None:
                self.parts.start_from(initial.weights)
            self._opened = opened.pop_all()

    def _build(self, checkpoint: Checkpoint | None) -> None:
        restarted_at, members = 0, None
        if checkpoint is not None:
            # Envs without a stored state must not repeat their first episodes.
            restarts = checkpoint.parts.get("actor", {}).get("envs") is None
            restarted_at = checkpoint.env_steps if restarts else 0
            # Without agents that had stopped before the checkpoint.
            members = checkpoint.parts.get("agents", {}).get("members")
            if members is not None:
                check_like(members, (0,), "agents/members", most=self.config.population - 1)
        self.parts = registry.build(
            self.config,
            self.faults,
            restarted_at,
            self._trace,
            members,
            report=self.progress.preparing,
        )

    def _restore(self, checkpoint: Checkpoint) -> None:
        with reading(f"cannot load '{checkpoint.path}' (edited, or of another version of qfleet)"):
            if checkpoint.parts["run"]["env_steps"] != checkpoint.env_steps:
                raise CheckpointError(f"run/env_steps is not {checkpoint.env_steps}")
            is_exact = self.load_state_dict(checkpoint.parts)
        if not is_exact:
            self.progress.message(
                "the checkpoint has no state of the envs: open episodes were cut and restarted"
            )
        elif self.parts.background is None or self.config.population > 1:
            return
        # Keep a better policy that was saved after the checkpoint: this run may not find it again.
        try:
            meta = load_policy(self.folder / "best").meta
            best = meta.get("return")
            check_like(best, None, "return")
        except CheckpointError:
            return
        if is_exact and meta.get("env_steps", 0) > checkpoint.env_steps:
            return  # it will: of weights that are not yet learnt
        for hook in self._hooks:
            if isinstance(hook, Evaluate) and best is not None:
                hook.keep_best(self, best)

    def go(self) -> Result:
        """Train until the run stops; write its result and a last checkpoint."""
        try:
            with signals_request_stop(self._interrupt), self.progress:
                self._open()
                try:
                    self._start()
                    engine = registry.engine(self.config.engine)
                    engine.run(self.parts, self._keep_going)
                    while self.survivors is not None:
                        self._narrow(self.survivors)
                        engine.run(self.parts, self._keep_going)
                    self._finish()
                except RunBusyError:
                    raise  # the folder belongs to another run
                except Exception as error:
                    if isinstance(error, ClusterLost):
                        loss = str(error).removesuffix(RUN_AGAIN)
                        error.args = (f"{loss}; {self._keep_rest()}",)
                    why = error if isinstance(error, QfleetError) else one_line(error)
                    self.stopped_by = f"error: {why}"
                    with contextlib.suppress(ConfigError):  # the first error counts
                        self._write_result()
                    raise
                finally:
                    self.faults.flush()
                    self.writers.close()
                self._end()
        finally:
            self.close()
        assert self._final is not None
        return self._final

    def _open(self) -> None:
        resumed = self.parts.clock.env_steps
        with writing("the run", self.folder):
            self.writers = Writers(
                self.folder,
                tensorboard=self.config.tensorboard,
                track=self.config.track,
                config=dataclasses.asdict(self.config),
                resume_env_steps=resumed if resumed else None,
                on_fault=self.faults,
            )
            drop_metrics_beyond(self.folder / tournament.POPULATION_FILE, resumed)

    def _start(self) -> None:
        resumed = self.parts.clock.env_steps
        # After the writers were made, which may fail: a failed start must not change the folder.
        with writing("the run", self.folder):
            if not resumed:
                # Remove the result of an earlier start that failed.
                (self.folder / "result.json").unlink(missing_ok=True)
            self.write_head()
        self.started_s = time.monotonic()
        for hook in self._hooks:
            hook.on_start(self)
        network = describe_choice(self.config, self.parts.spec)
        self.show([self.options.note, self._chosen, network, *self.parts.notes])
        self.progress.start(resumed)
        if self.parts.device.type != "cpu":
            load_early()
        self._began_at = resumed
        self.call("on_start")

    def _keep_going(self) -> bool:
        """Call the hooks; return whether to continue. Called whenever no update is owed."""
        clock = self.parts.clock
        if self._learning_since is None and clock.updates > 0:
            self._learning_since = (time.monotonic(), clock.env_steps)
            self.not_training_s = 0.0
        for hook in self._hooks:
            hook.on_step(self)
        self.call("on_step")
        unfinished = clock.env_steps < self.config.steps
        return self.stopped_by is None and self.survivors is None and unfinished

    def call(self, method: str, *arguments: Any) -> None:
        """Call this method of the users' callbacks; if one fails, keep a checkpoint first."""
        try:
            super().call(method, *arguments)
        except Exception:
            # Here, because an engine that has ended cannot be asked for its state.
            if self._final is None:
                try:
                    self._keep_rest()
                except RunBusyError:
                    raise  # the folder belongs to another run
                except QfleetError:
                    pass  # the first error counts
            raise

    def _narrow(self, agents: list[int]) -> None:
        """Continue with these agents alone."""
        self.parts = tournament.narrowed(self.parts, agents, self._trace)
        self.survivors = None
        self.show([f"agents {', '.join(map(str, agents))} continue", *self.parts.notes])
        # The rates of the stages are measured with these agents, so the run's rate is too.
        self._learning_since = None

    def _finish(self) -> None:
        since_s, since_steps = self._learning_since or (self.started_s, self._began_at)
        working_s = max(time.monotonic() - since_s - self.not_training_s, 1e-9)
        steps = self.standings.steps_of_all(self.parts.clock.env_steps)
        end_to_end = (steps - self.standings.steps_of_all(since_steps)) / working_s
        self.stop(self.reason_to_stop() or "steps")
        for hook in self._hooks:
            hook.on_finish(self)
        run_s = time.monotonic() - self.started_s
        self._write_result()
        if self.interrupted_by is None:
            # The measurements are not part of the run: their faults and time do not count.
            self.faults.ignores = True
            self._measure(run_s, end_to_end)
            self.faults.ignores = False

    def _keep_rest(self) -> str:
        """Save what this process has of a run that an error ends; return what to do now."""
        if self.parts.clock.env_steps > self._began_at:
            Save().on_finish(self)
        if saved := list_checkpoints(self.folder / "checkpoints"):
            return f"checkpoint {saved[-1]} is kept; continue with: qfleet resume {self.folder}"
        return "no step was taken yet; run it again"

    def _measure(self, run_s: float, end_to_end: float) -> None:
        """Measure what the result compares the run with, and each stage if that was asked for."""
        for hook in self.parts.hooks:
            lines = hook.on_finish(run_s, lambda: self.interrupted_by is not None)
            assert self._final is not None
            self._final = dataclasses.replace(self._final, **hook.result())
            self.show(lines)
        if self.options.stage_rates:
            self._measure_stages(end_to_end)

    def _measure_stages(self, end_to_end: float) -> None:
        """Measure each stage alone, if the engine's stages overlap."""
        for hook in self.parts.hooks:
            try:
                self.stages = self.stages or hook.measure(end_to_end)
            except EnvironmentFault:
                return
        if self.stages is not None and self._final is not None:
            self._final = dataclasses.replace(self._final, rates=self.stages.as_dict())
            self.show([self.stages.table()])

    def _end(self) -> None:
        result, plots = self._write_result(), self.folder / "plots"
        try:
            for engine_hook in self.parts.hooks:
                self.show(engine_hook.on_end(self.folder, self._trace))
            if self._trace is not None:
                write_chrome_trace(self._trace, self.folder / "trace.json")
                self.parts.draw_timeline(self._trace, plots / "timeline.png")
        except ConfigError as error:  # the disk is full; the result is there
            self.progress.message(str(error))
        self.call("on_end", result)

    def _result(self) -> Result:
        return make_result(
            self.parts,
            wall_s=self.wall_s(),
            run_s=time.monotonic() - self.started_s,
            evaluation=self.evaluation,
            best_return=self.best_return,
            standings=self.standings,
            stopped_by=self.stopped_by or "steps",
            usage=self.usage(),
        )

    def _write_result(self) -> Result:
        self._final = self._final or self._result()
        text = json.dumps(dataclasses.asdict(self._final), indent=2)
        with writing("the result", self.folder):
            (self.folder / RESERVE).unlink(missing_ok=True)
            atomic_write_text(self.folder / "result.json", text)
        return self._final

    def _count_closing_faults(self) -> None:
        """Add faults of environments that were closed to the result."""
        if self._final is not None and self._final.faults != self.faults.counts:
            self._final = dataclasses.replace(self._final, faults=self.faults.counts)
            with contextlib.suppress(ConfigError):  # an earlier error counts
                self._write_result()

    def _interrupt(self, number: int) -> None:
        self.interrupted_by = number
        self.progress.acknowledge("stopping after this block; another signal stops at once")

    def close(self) -> None:
        self._opened.close()
