"""One run: its folder, its clockwork (log, evaluate, checkpoint, stop) and its result.

In: a Config and a folder. Out: the files listed in docs/architecture.md and a ``Result``. The
engine advances the loop and asks ``keep_going`` between turns; everything periodic happens there.
"""

from __future__ import annotations

import dataclasses
import json
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from qfleet.agent.evaluation import Evaluation
from qfleet.config.config import Config
from qfleet.config.validation import validate
from qfleet.core.errors import CheckpointError, EnvironmentFault, QfleetError
from qfleet.core.files import atomic_write_text
from qfleet.core.signals import signals_request_stop
from qfleet.core.types import StateDict
from qfleet.engines import registry
from qfleet.engines.auto import settle
from qfleet.engines.parts import Parts
from qfleet.engines.registry import build
from qfleet.engines.torch_settings import TorchSettings
from qfleet.storage.checkpoint import Checkpoint, load_policy, save_checkpoint
from qfleet.storage.rundir import RunLock
from qfleet.storage.vacancy import check_vacant
from qfleet.telemetry.faults import FaultLog
from qfleet.telemetry.fleet import Processes
from qfleet.telemetry.fleet_plots import draw_fleet
from qfleet.telemetry.fleet_table import fleet_lines
from qfleet.telemetry.progress import Progress
from qfleet.telemetry.timeline import draw_timeline, draw_workers
from qfleet.telemetry.timers import Timers
from qfleet.telemetry.trace import Trace, merge_lanes, write_chrome_trace
from qfleet.telemetry.writers import Writers, drop_metrics_beyond
from qfleet.training import resize_request, tournament
from qfleet.training.best_policy import save_best
from qfleet.training.divergence import DivergenceGuard
from qfleet.training.early_stopping import EarlyStopping
from qfleet.training.evaluator import Evaluator
from qfleet.training.result import Result, learning_scalars, make_result, pipeline_scalars
from qfleet.training.stage_rates import Stages, measure_stages
from qfleet.training.standings import Standings


@dataclass(frozen=True)
class RunOptions:
    """How one invocation runs. Not part of the experiment: it changes no schedule."""

    stop_after: int | None = None
    """Stop once this many env steps are done in total; `qfleet resume` goes on."""
    max_wall_s: float | None = None
    """Stop after this many seconds; `qfleet resume` goes on."""
    display: Literal["live", "plain", "silent"] = "silent"
    """How progress is shown."""
    trace: bool = False
    """Record what every thread does, as trace.json (Chrome, Perfetto) and plots/timeline.png."""


# ruff: noqa: ARG002 (the arguments are for subclasses)
class Callback:
    """Hooks into a run. Override what you need; False from any of the first three ends the run."""

    def on_start(self, run: Run) -> bool | None:
        return None

    def on_log(self, run: Run, scalars: dict[str, float | None]) -> bool | None:
        return None

    def on_evaluation(self, run: Run, evaluation: Evaluation) -> bool | None:
        return None

    def on_end(self, run: Run, result: Result) -> bool | None:
        return None


class Run:
    """A run in progress; ``go`` sees it through."""

    def __init__(
        self,
        config: Config,
        folder: Path,
        options: RunOptions,
        callbacks: Sequence[Callback] = (),
        checkpoint: Checkpoint | None = None,
    ) -> None:
        config, self._chosen = settle(validate(config))
        self.config, self.folder = config, folder
        self._options, self._callbacks = options, callbacks
        self._progress = Progress(config.steps, mode=options.display)
        self._faults = FaultLog(notify=self._progress.message)
        # First of all: whoever runs here already must not lose a byte to us.
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = RunLock(folder)
        self._lock.__enter__()
        try:
            if checkpoint is None:
                # Again: until the lock was ours, somebody else may have trained here.
                check_vacant(folder)
        except BaseException:
            self._lock.close()
            raise
        resize_request.forget(folder)
        self._torch_settings = TorchSettings()
        # Envs that cannot go on where they were must not play their first episodes again.
        restarts = checkpoint is not None and checkpoint.parts["actor"].get("envs") is None
        restarted_at = checkpoint.env_steps if checkpoint is not None and restarts else 0
        # Agents that have stopped before the checkpoint do not come back.
        agents = checkpoint.parts.get("agents") if checkpoint is not None else None
        members = None if agents is None else agents["members"]
        try:
            self._trace = Trace() if options.trace else None
            self.parts: Parts = build(config, self._faults, restarted_at, self._trace, members)
        except BaseException:
            self._torch_settings.restore()
            self._lock.close()
            raise
        self._evaluator = Evaluator()
        self._marks = {"log": 0, "eval": 0, "checkpoint": 0, "round": 0}
        self._standings = Standings(config.population)
        self._going_on: list[int] | None = None
        """Agents that go on in a smaller batch, once the engine has let go of this one."""
        self.evaluation: Evaluation | None = None
        self._evaluated_at = -1
        self._early_stopping = EarlyStopping(config)
        self._divergence = DivergenceGuard(config, self._faults, folder)
        self._learning_since: tuple[float, int] | None = None
        """Time and env steps of this invocation's first update."""
        self._aside_s = 0.0
        """Seconds spent on evaluations and checkpoints since then."""
        self._end_to_end = 0.0
        """Env steps per second, learning, but for what was spent aside."""
        self.stages: Stages | None = None
        self._final: Result | None = None
        self._stop: str | None = None
        self._signal: int | None = None
        self._earlier_wall_s = 0.0
        self._started_s = time.monotonic()
        self._logged: tuple[float, int] = (self._started_s, 0)
        if checkpoint is not None:
            try:
                self._restore(checkpoint)
            except BaseException as error:
                self.close()
                if isinstance(error, KeyError):
                    raise CheckpointError(
                        f"'{checkpoint.path}' has no {error}: another qfleet wrote it"
                    ) from None
                raise

    # --- from start to result ------------------------------------------------------------------

    def go(self) -> Result:
        """Train until something says stop; leaves a result, and a checkpoint unless it failed."""
        try:
            with signals_request_stop(self._interrupt), self._progress:
                return self._go()
        finally:
            self.close()

    def _go(self) -> Result:
        resumed = self.parts.clock.env_steps
        self._writers = Writers(
            self.folder,
            tensorboard=self.config.tensorboard,
            track=self.config.track,
            config=dataclasses.asdict(self.config),
            resume_env_steps=resumed if resumed else None,
        )
        drop_metrics_beyond(self.folder / tournament.POPULATION_FILE, resumed)
        try:
            # After the writers, which may refuse: until then the folder is not a run's.
            if not resumed:
                # Of a start that failed; it would be taken for this run's end.
                (self.folder / "result.json").unlink(missing_ok=True)
            atomic_write_text(self.folder / "config.json", self.config.to_json())
            atomic_write_text(self.folder / "seeds.json", json.dumps(self.seeds(), indent=2))
            self._started_s = time.monotonic()
            self._logged = (self._started_s, resumed)
            self._tell([self._chosen, *self.parts.notes])
            self._progress.start(resumed)
            if not self._call("on_start"):
                self._stop = "callback"
            registry.run(self.parts, self._keep_going)
            while self._going_on is not None:
                self._narrow(self._going_on)
                registry.run(self.parts, self._keep_going)
            since_s, since_steps = self._learning_since or (self._started_s, resumed)
            working_s = max(time.monotonic() - since_s - self._aside_s, 1e-9)
            steps = self._standings.steps_of_all(self.parts.clock.env_steps)
            steps -= self._standings.steps_of_all(since_steps)
            self._end_to_end = steps / working_s
            self._finish()
            self._measure_stages()
        except QfleetError as error:
            self._stop = f"error: {error}"
            self._write_result()
            raise
        finally:
            self._faults.flush()
            self._writers.close()
        result = self._write_result()
        if self.parts.processes is not None:
            self._show_processes(self.parts.processes)
        if self._trace is not None:
            write_chrome_trace(self._trace, self.folder / "trace.json")
            draw = draw_timeline if self.parts.processes is None else draw_workers
            draw(self._trace, self.folder / "plots" / "timeline.png")
        self._call("on_end", result)
        return result

    def _show_processes(self, processes: Processes) -> None:
        """What many processes did, on the terminal and as pictures."""
        account = processes.account()
        if account is not None:
            self._tell(fleet_lines(account))
            draw_fleet(account, self.folder / "plots")
        if self._trace is not None:
            lanes = dict(processes.lanes())
            merge_lanes(self._trace, lanes, dict.fromkeys(lanes, 0.0))

    def close(self) -> None:
        self.parts.close()
        self._evaluator.close()
        self._torch_settings.restore()
        self._lock.close()

    @property
    def interrupted_by(self) -> int | None:
        """The signal that ended the run, if one did."""
        return self._signal

    def _interrupt(self, number: int) -> None:
        self._signal = number

    def alert(self, message: str) -> None:
        """Tell whoever watches the run, and count it."""
        self._faults("alert", message)

    def _tell(self, notes: Sequence[str | None]) -> None:
        if self._options.display != "silent":
            for note in filter(None, notes):
                self._progress.message(note)

    def seeds(self) -> dict[str, Any]:
        """Every seed of the run, by consumer, and the seed of each environment."""
        return {
            "run": self.config.seed,
            **dataclasses.asdict(self.parts.seeds),
            "each_env": self.parts.env_seeds,
        }

    def wall_s(self) -> float:
        return self._earlier_wall_s + time.monotonic() - self._started_s

    # --- the clockwork ----------------------------------------------------------------------

    def _keep_going(self) -> bool:
        """Asked by the engine whenever no update is owed: do what is due, then decide."""
        clock, config = self.parts.clock, self.config
        if self.parts.fleet is not None:
            self._tell([resize_request.handle(self.folder, self.parts.fleet.resize)])
        if self._learning_since is None and clock.updates > 0:
            self._learning_since = (time.monotonic(), clock.env_steps)
            self._aside_s = 0.0
        if self._due("log", config.log_interval):
            self._log()
        aside_s = time.monotonic()
        if config.eval_freq and self._due("eval", config.eval_freq):
            self._evaluate(record=True)
        if tournament.interval(config) and self._stop is None and clock.env_steps < config.steps:
            self._compete()
        if self._going_on is not None:
            self._aside_s += time.monotonic() - aside_s
            return False
        if self._stop is None:
            self._stop = self._reason_to_stop()
        if self._stop is None and self._due("checkpoint", config.checkpoint_freq):
            self._checkpoint()
        self._aside_s += time.monotonic() - aside_s
        return self._stop is None and clock.env_steps < config.steps

    def _compete(self) -> None:
        """A round of population-based training or of successive halving, if one is due.

        A halving that nobody can wait for stays due.
        """
        mark = self._marks["round"]
        if len(self.parts.members) == 1 or not self._due("round", tournament.interval(self.config)):
            return
        self._take_episodes()
        if self.config.pbt_interval:
            lines = tournament.exploit(
                self.parts, self._standings, self._divergence.bad(self.parts)
            )
            tournament.append_lines(self.folder, lines)
            return
        if self._evaluated_at != self.parts.clock.env_steps:
            self._evaluate(record=True)
        if self._evaluated_at != self.parts.clock.env_steps or self._stop is not None:
            self._marks["round"] = mark
            return
        bad = self._divergence.bad(self.parts)
        self._going_on = tournament.better_half(self.parts, self._standings, bad)
        line = tournament.stop_others(self.parts, self._standings, self._going_on)
        tournament.append_lines(self.folder, [line])

    def _narrow(self, agents: list[int]) -> None:
        """Go on with these agents alone."""
        self.parts = tournament.narrowed(self.parts, agents, self._trace)
        self._going_on = None
        self._tell([f"agents {', '.join(map(str, agents))} go on", *self.parts.notes])
        # The stages of these agents are measured in the end, and held against their own pace.
        self._learning_since = None

    def _due(self, what: str, interval: int) -> bool:
        """Has the clock passed another multiple of ``interval`` since this was last due?"""
        count = self.parts.clock.env_steps // interval
        if count <= self._marks[what]:
            return False
        self._marks[what] = count
        return True

    def _reason_to_stop(self) -> str | None:
        options = self._options
        if self._signal is not None:
            return signal.Signals(self._signal).name
        if self.parts.clock.env_steps >= self.config.steps:
            return "steps"
        if options.stop_after is not None and self.parts.clock.env_steps >= options.stop_after:
            return "stop_after"
        if self._is_out_of_time():
            return "max_wall"
        return None

    def _is_out_of_time(self) -> bool:
        """Return whether a signal or the time limit asks this run to stop."""
        elapsed_s = time.monotonic() - self._started_s
        limit_s = self._options.max_wall_s
        return self._signal is not None or (limit_s is not None and elapsed_s >= limit_s)

    def _take_episodes(self) -> None:
        episodes = self.parts.collector.take_episodes()
        self._standings.add_episodes(episodes, self.parts.members, self.config.envs)

    def _log(self) -> None:
        clock = self.parts.clock
        self._take_episodes()
        now = time.monotonic()
        then, steps_then = self._logged
        self._logged = (now, clock.env_steps)
        metrics = self.parts.read_metrics()
        steps = self._standings.steps_of_all(clock.env_steps)
        steps -= self._standings.steps_of_all(steps_then)
        scalars: dict[str, float | None] = {
            **self._standings.rollout_scalars(self.parts.members),
            "rollout/exploration_rate": self.parts.collector.exploration_rate(),
            # Of all agents together, where there are several.
            "time/fps": steps / max(now - then, 1e-9),
            "time/env_steps": clock.env_steps,
            "time/frames": clock.frames,
            "time/time_elapsed": self.wall_s(),
            **learning_scalars(self.parts, metrics),
        }
        scalars |= pipeline_scalars(self.parts, self.wall_s())
        shares = Timers.merged(self.parts.timers).shares(self.wall_s())
        scalars |= {f"time/share_{stage}": share for stage, share in shares.items()}
        self._writers.write(clock.env_steps, scalars)
        if self.evaluation is not None:
            scalars["eval/mean_reward"] = self.evaluation.mean
        self._progress.update(clock.env_steps, scalars, shares)
        self._divergence.look(self.parts, metrics)
        if not self._call("on_log", scalars):
            self._stop = "callback"

    def _evaluate(self, record: bool) -> None:
        """Play the greedy policy. ``record`` False only reports: it decides nothing."""
        config, clock = self.config, self.parts.clock
        evaluation = self._evaluator.play(self.parts, self._is_out_of_time)
        if evaluation is None:
            return
        self.evaluation, self._evaluated_at = evaluation, clock.env_steps
        members = self.parts.members
        better = self._standings.add_evaluation(evaluation, members, counts=record)
        if not record:
            return
        self._writers.write(
            clock.env_steps,
            {
                "eval/mean_reward": evaluation.mean,
                "eval/std_reward": evaluation.std,
                "eval/mean_ep_length": evaluation.mean_length,
                **self._standings.evaluation_scalars(members),
            },
        )
        verdict = self._early_stopping.weigh(evaluation.mean)
        self._stop = verdict.stop or self._stop
        save_best(self.folder, self.parts, self._standings, better, self._faults)
        if verdict.lower_rate:
            self.parts.learner.lr_scale *= config.lr_plateau_factor
            scale = self.parts.learner.lr_scale
            self._progress.message(f"plateau: learning rate scaled to {scale:g}")
        if not self._call("on_evaluation", evaluation):
            self._stop = "callback"

    def _finish(self) -> None:
        """Last evaluation and last checkpoint. A signal wants out: it gets the checkpoint only."""
        self._stop = self._stop or self._reason_to_stop() or "steps"
        complete = self._stop not in ("stop_after", "max_wall", "SIGINT", "SIGTERM")
        if self._logged[1] != self.parts.clock.env_steps:
            self._log()
        if self._evaluated_at != self.parts.clock.env_steps and not self._is_out_of_time():
            reason = self._stop
            self._evaluate(record=complete)
            self._stop = reason
        if self._early_stopping.best_return is None and self.evaluation is not None:
            members = self.parts.members
            save_best(self.folder, self.parts, self._standings, members, self._faults)
        self._checkpoint()

    def _measure_stages(self) -> None:
        """What each stage could do alone, where the host's clock does not tell."""
        apart = len(self.parts.timers) > 1 or self.parts.measure_collecting is not None
        if not apart or self._signal is not None:
            return
        # What happens while measuring is no part of the run: neither its faults nor its time.
        self._faults.close()
        self._final = self._result()
        try:
            self.stages = measure_stages(self.parts, self._end_to_end)
        except EnvironmentFault:
            return
        self._final = dataclasses.replace(self._final, rates=self.stages.as_dict())
        if self._options.display != "silent":
            self._progress.message(self.stages.table())

    # --- what is kept -----------------------------------------------------------------------

    def _checkpoint(self) -> None:
        if self._divergence.bad(self.parts) == set(self.parts.members):
            return  # never let a diverged checkpoint push a good one out
        try:
            save_checkpoint(
                self.folder / "checkpoints",
                self.parts.clock.env_steps,
                self._state(),
                {
                    "config": dataclasses.asdict(self.config),
                    "layout": self.parts.learner.weights.describe(),
                },
                keep=self.config.keep_checkpoints,
            )
        except CheckpointError as error:
            # A full disk must not cost the training that is still possible.
            self._faults("checkpoint", str(error))

    def _state(self) -> dict[str, StateDict]:
        parts = self.parts
        agents = {} if parts.agents is None else {"agents": parts.agents.state_dict()}
        return {
            **agents,
            "learner": parts.learner.state_dict(),
            "memory": parts.memory.state_dict(),
            "actor": parts.collector.state_dict(),
            "run": {
                "env_steps": parts.clock.env_steps,
                "updates": parts.clock.updates,
                "marks": self._marks,
                "standings": self._standings.state_dict(),
                "watch": self._divergence.state_dict(),
                "judge": self._early_stopping.state_dict(),
                "evaluation": None
                if self.evaluation is None
                else dataclasses.asdict(self.evaluation),
                "evaluated_at": self._evaluated_at,
                "wall_s": self.wall_s(),
                "timers": {str(i): timers.state_dict() for i, timers in enumerate(parts.timers)},
                "faults": self._faults.state_dict(),
            },
        }

    def _restore(self, checkpoint: Checkpoint) -> None:
        parts, state = self.parts, checkpoint.parts
        own = state["run"]
        parts.clock.env_steps, parts.clock.updates = own["env_steps"], own["updates"]
        parts.learner.load_state_dict(state["learner"])
        parts.memory.load_state_dict(state["memory"])
        if parts.agents is not None:
            parts.agents.load_state_dict(state["agents"])
        self._early_stopping.load_state_dict(own["judge"])
        self._standings.load_state_dict(own["standings"])
        self._divergence.load_state_dict(own["watch"])
        if not parts.collector.load_state_dict(state["actor"], parts.clock.env_steps):
            parts.memory.end_open_episodes()
            self._progress.message(
                "the checkpoint has no state of the envs: open episodes were cut and restarted"
            )
            self._respect_best()
        parts.channel.restart(parts.clock.updates)
        self._marks = dict(own["marks"])
        if own["evaluation"] is not None:
            self.evaluation = Evaluation(**own["evaluation"])
        self._evaluated_at = own["evaluated_at"]
        self._earlier_wall_s = own["wall_s"]
        for timers, spent in zip(parts.timers, own["timers"].values(), strict=False):
            timers.load_state_dict(spent)
        self._faults.load_state_dict(own["faults"])

    def _respect_best(self) -> None:
        """A policy that was found after the checkpoint will not be found again: do not lose it."""
        try:
            kept = load_policy(self.folder / "best").meta["return"]
        except CheckpointError:
            return
        if kept is not None:
            best = self._early_stopping.best_return
            best = kept if best is None else max(kept, best)
            # Envs of a population always go on where they were: this is a run of one agent.
            self._early_stopping.best_return = self._standings.agents[0].best = best

    def _result(self) -> Result:
        return make_result(
            self.parts,
            wall_s=self.wall_s(),
            evaluation=self.evaluation,
            best_return=self._early_stopping.best_return,
            standings=self._standings,
            stopped_by=self._stop or "steps",
        )

    def _write_result(self) -> Result:
        result = self._final or self._result()
        text = json.dumps(dataclasses.asdict(result), indent=2)
        atomic_write_text(self.folder / "result.json", text)
        return result

    def _call(self, method: str, *arguments: Any) -> bool:
        """Run a callback method of everybody; False if anybody said stop."""
        answers = [getattr(callback, method)(self, *arguments) for callback in self._callbacks]
        return all(answer is not False for answer in answers)
