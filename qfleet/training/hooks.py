"""The periodic work of a run, one hook each: engine, log, evaluate, compete, stop, save, publish.

``standard_hooks`` lists them in the order in which they run. Their interface is that of users'
callbacks, plus the last call of a run (``on_finish``) and the state that a checkpoint keeps.
"""

from __future__ import annotations

import time
from dataclasses import asdict

from qfleet.config.config import Config
from qfleet.core.errors import CheckpointError
from qfleet.core.types import StateDict
from qfleet.storage.checkpoint import save_checkpoint
from qfleet.storage.spec_json import spec_to_json
from qfleet.telemetry.timers import Timers
from qfleet.training import tournament
from qfleet.training.callbacks import Hook
from qfleet.training.evaluate import Evaluate
from qfleet.training.publish import Publish
from qfleet.training.result import learning_scalars
from qfleet.training.run_state import RunState
from qfleet.training.validate_data import Validate


def standard_hooks(config: Config) -> list[Hook]:
    """Return the hooks of a run, in the order in which they run."""
    evaluate = Evaluate(config, Save())
    first = [HandleEngine(), Log(), evaluate, Validate(config, evaluate.plateau)]
    return [*first, Compete(evaluate), Stop(), Save(), Publish()]


class HandleEngine(Hook):
    """Calls the hooks that the engine has added."""

    def on_step(self, run: RunState) -> None:
        for hook in run.parts.hooks:
            if line := hook.on_turn(run.folder):
                run.show([line])


class Log(Hook):
    """Writes scalars every ``log_interval`` env steps, and looks for signs of divergence."""

    _logged: tuple[float, int]
    """Time and env steps of the newest log."""

    def on_start(self, run: RunState) -> None:
        self._logged = (run.started_s, run.parts.clock.env_steps)

    def on_step(self, run: RunState) -> None:
        if run.due("log", run.config.log_interval):
            self._log(run)

    def on_finish(self, run: RunState) -> None:
        if self._logged[1] != run.parts.clock.env_steps:
            self._log(run)

    def _log(self, run: RunState) -> None:
        parts, standings, clock = run.parts, run.standings, run.parts.clock
        run.keep_folder()
        run.take_episodes()
        run.meter.keep_up()
        now_s, wall_s = time.monotonic(), run.wall_s()
        then_s, steps_then = self._logged
        self._logged = (now_s, clock.env_steps)
        metrics = parts.model.read_metrics()
        # Of all agents of a population together.
        steps = standings.steps_of_all(clock.env_steps) - standings.steps_of_all(steps_then)
        timers = Timers.merged(parts.timers)
        scalars: dict[str, float | None] = {
            **standings.rollout_scalars(parts.members),
            "rollout/exploration_rate": parts.collector.exploration_rate(),
            "time/fps": steps / max(now_s - then_s, 1e-9),
            "time/env_steps": clock.env_steps,
            "time/frames": clock.frames,
            "time/time_elapsed": wall_s,
            **learning_scalars(parts, metrics),
        }
        for hook in parts.hooks:
            scalars |= hook.scalars(wall_s)
        scalars |= {f"time/share_{stage}": share for stage, share in timers.shares(wall_s).items()}
        run.writers.write(clock.env_steps, scalars)
        if run.evaluation is not None:
            scalars["eval/mean_reward"] = run.evaluation.mean
        run.progress.update(clock.env_steps, scalars, timers.usage(wall_s))
        run.divergence.check(parts, metrics)
        run.call("on_log", scalars)

    def state_dict(self, run: RunState) -> StateDict:
        return {"watch": run.divergence.state_dict()}

    def load_state_dict(self, run: RunState, state: StateDict) -> None:
        run.divergence.load_state_dict(state["watch"])


class Compete(Hook):
    """Runs the rounds of a population: population-based training, or successive halving."""

    def __init__(self, evaluate: Evaluate) -> None:
        self._evaluate = evaluate

    def on_step(self, run: RunState) -> None:
        config, parts, clock = run.config, run.parts, run.parts.clock
        interval = config.pbt_interval or config.halving_interval
        if not interval or run.stopped_by is not None or clock.env_steps >= config.steps:
            return
        if len(parts.members) == 1 or not run.due("round", interval):
            return
        run.take_episodes()
        if config.pbt_interval:
            bad = run.divergence.bad(parts)
            lines = tournament.exploit(parts, run.standings, bad)
            tournament.append_lines(run.folder, lines, run.faults)
        else:
            self._halve(run)

    def _halve(self, run: RunState) -> None:
        env_steps = run.parts.clock.env_steps
        if run.evaluated_at != env_steps:
            self._evaluate.evaluate(run)
        if run.evaluated_at != env_steps or run.stopped_by is not None:
            run.postpone("round")  # until after a resume: there was no time to evaluate
            return
        bad = run.divergence.bad(run.parts)
        run.survivors = tournament.better_half(run.parts, run.standings, bad)
        line = tournament.stop_others(run.parts, run.standings, run.survivors)
        tournament.append_lines(run.folder, [line], run.faults)


class Stop(Hook):
    """Stops at the configured number of steps, at a signal and at the limits of the options."""

    def on_step(self, run: RunState) -> None:
        if run.survivors is None and (reason := run.reason_to_stop()):
            run.stop(reason)


class Save(Hook):
    """Writes a checkpoint every ``checkpoint_freq`` env steps and at the end."""

    def on_step(self, run: RunState) -> None:
        going_on = run.survivors is None and run.stopped_by is None
        if going_on and run.due("checkpoint", run.config.checkpoint_freq):
            self.on_finish(run)

    def on_finish(self, run: RunState) -> None:
        if run.divergence.bad(run.parts) == set(run.parts.members):
            return  # a diverged checkpoint must not replace a good one
        run.keep_folder()
        with run.not_training("save"):
            self._save(run)

    def _save(self, run: RunState) -> None:
        try:
            save_checkpoint(
                run.folder / "checkpoints",
                run.parts.clock.env_steps,
                run.state_dict(),
                {
                    "config": asdict(run.config),
                    "spec": spec_to_json(run.parts.spec),
                    "layout": run.parts.model.weights.describe(),
                },
                keep=run.config.keep_checkpoints,
            )
        except CheckpointError as error:
            # A full disk must not stop the training.
            run.faults("checkpoint", str(error))
