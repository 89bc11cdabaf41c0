"""One run: its folder, its clockwork (log, evaluate, checkpoint, stop) and its result.

In: a Config and a folder. Out: the files listed in docs/architecture.md and a ``Result``. The
engine advances the loop and asks ``keep_going`` between turns; everything periodic happens there.
"""

from __future__ import annotations

import dataclasses
import json
import math
import signal
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from qfleet import schedules
from qfleet.accounts import make_result, pipeline_scalars
from qfleet.build import Parts, TorchSettings, build
from qfleet.callbacks import Callback
from qfleet.config import Config
from qfleet.core import StateDict, VectorEnv
from qfleet.engines import ENGINES
from qfleet.envs import make_envs
from qfleet.errors import CheckpointError, DivergedError, EnvironmentFault, QfleetError
from qfleet.evaluation import Evaluation, evaluate_policy
from qfleet.judge import Judge
from qfleet.plan import settle
from qfleet.result import Result
from qfleet.signals import Signals
from qfleet.stages import Stages, measure_stages
from qfleet.storage.checkpoint import (
    Checkpoint,
    list_checkpoints,
    load_policy,
    save_checkpoint,
    save_policy,
)
from qfleet.storage.rundir import RunLock, atomic_write_text
from qfleet.telemetry.faults import FaultLog
from qfleet.telemetry.progress import Progress
from qfleet.telemetry.timeline import draw_timeline
from qfleet.telemetry.timers import Timers
from qfleet.telemetry.trace import Trace, write_chrome_trace
from qfleet.telemetry.writers import Writers
from qfleet.tensor_evaluation import as_evaluation

EPISODE_WINDOW = 100
EXPLODING_LOGS = 3
"""Consecutive log intervals of exploding Q-values after which the run stops."""


@dataclass(frozen=True)
class Sitting:
    """How this sitting goes. Never part of the experiment: it changes no schedule."""

    stop_after: int | None = None
    """Stop once this many env steps are done in total; `qfleet resume` goes on."""
    max_wall_s: float | None = None
    """Stop once this sitting has lasted this long; `qfleet resume` goes on."""
    display: Literal["live", "plain", "silent"] = "silent"
    """How progress is shown."""
    trace: bool = False
    """Record what every thread does, as trace.json (Chrome, Perfetto) and plots/timeline.png."""


class Run:
    """A run in progress; ``go`` sees it through."""

    def __init__(
        self,
        config: Config,
        folder: Path,
        sitting: Sitting,
        callbacks: Sequence[Callback] = (),
        checkpoint: Checkpoint | None = None,
    ) -> None:
        config, self._chosen = settle(config.validate())
        self.config, self.folder = config, folder
        self._sitting, self._callbacks = sitting, callbacks
        self._progress = Progress(config.steps, mode=sitting.display)
        self._faults = FaultLog(notify=self._progress.message)
        # First of all: whoever runs here already must not lose a byte to us.
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = RunLock(folder)
        self._lock.__enter__()
        self._torch_settings = TorchSettings()
        # Envs that cannot go on where they were must not play their first episodes again.
        restarts = checkpoint is not None and checkpoint.parts["actor"].get("envs") is None
        restarted_at = checkpoint.env_steps if checkpoint is not None and restarts else 0
        try:
            self._trace = Trace() if sitting.trace else None
            self.parts: Parts = build(config, self._faults, restarted_at, self._trace)
        except BaseException:
            self._torch_settings.restore()
            self._lock.close()
            raise
        self._eval_envs: VectorEnv | None = None
        self._marks = {"log": 0, "eval": 0, "checkpoint": 0}
        self._recent: deque[tuple[float, int]] = deque(maxlen=EPISODE_WINDOW)
        self.evaluation: Evaluation | None = None
        self._evaluated_at = -1
        self._judge = Judge(config)
        self._exploding = 0
        self._learning_since: tuple[float, int] | None = None
        """When this sitting's first update was made: time and env steps."""
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

    # --- the sitting ------------------------------------------------------------------------

    def go(self) -> Result:
        """Train until something says stop; leaves a result, and a checkpoint unless it failed."""
        try:
            with Signals(self._interrupt), self._progress:
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
        try:
            # After the writers, which may refuse: until then the folder is not a run's.
            atomic_write_text(self.folder / "config.json", self.config.to_json())
            atomic_write_text(self.folder / "seeds.json", json.dumps(self.seeds(), indent=2))
            self._started_s = time.monotonic()
            self._logged = (self._started_s, resumed)
            if self._sitting.display != "silent":
                for note in [self._chosen, *self.parts.notes]:
                    if note:
                        self._progress.message(note)
            self._progress.start(resumed)
            if not self._call("on_start"):
                self._stop = "callback"
            ENGINES[self.config.engine](self.parts, self._keep_going)
            since_s, since_steps = self._learning_since or (self._started_s, resumed)
            working_s = max(time.monotonic() - since_s - self._aside_s, 1e-9)
            steps = self.config.population * (self.parts.clock.env_steps - since_steps)
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
        if self._trace is not None:
            write_chrome_trace(self._trace, self.folder / "trace.json")
            draw_timeline(self._trace, self.folder / "plots" / "timeline.png")
        self._call("on_end", result)
        return result

    def close(self) -> None:
        self.parts.close()
        if self._eval_envs is not None:
            self._eval_envs.close()
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
        if self._learning_since is None and clock.updates > 0:
            self._learning_since = (time.monotonic(), clock.env_steps)
            self._aside_s = 0.0
        if self._due("log", config.log_interval):
            self._log()
        aside_s = time.monotonic()
        if config.eval_freq and self._due("eval", config.eval_freq):
            self._evaluate(record=True)
        if self._stop is None:
            self._stop = self._reason_to_stop()
        if self._stop is None and self._due("checkpoint", config.checkpoint_freq):
            self._checkpoint()
        self._aside_s += time.monotonic() - aside_s
        return self._stop is None and clock.env_steps < config.steps

    def _due(self, what: str, interval: int) -> bool:
        """Has the clock passed another multiple of ``interval`` since this was last due?"""
        count = self.parts.clock.env_steps // interval
        if count <= self._marks[what]:
            return False
        self._marks[what] = count
        return True

    def _reason_to_stop(self) -> str | None:
        sitting = self._sitting
        if self._signal is not None:
            return signal.Signals(self._signal).name
        if self.parts.clock.env_steps >= self.config.steps:
            return "steps"
        if sitting.stop_after is not None and self.parts.clock.env_steps >= sitting.stop_after:
            return "stop_after"
        if self._is_out_of_time():
            return "max_wall"
        return None

    def _is_out_of_time(self) -> bool:
        """Whether someone waits for this sitting to end: a signal or the wall clock."""
        elapsed_s = time.monotonic() - self._started_s
        limit_s = self._sitting.max_wall_s
        return self._signal is not None or (limit_s is not None and elapsed_s >= limit_s)

    def _log(self) -> None:
        clock, config = self.parts.clock, self.config
        for episode in self.parts.collector.take_episodes():
            self._recent.append((episode.reward, episode.length))
        now = time.monotonic()
        then, steps_then = self._logged
        self._logged = (now, clock.env_steps)
        metrics = self.parts.learner.read_metrics()
        returns, lengths = zip(*self._recent, strict=True) if self._recent else ((), ())
        scalars: dict[str, float | None] = {
            "rollout/ep_rew_mean": float(np.mean(returns)) if returns else None,
            "rollout/ep_len_mean": float(np.mean(lengths)) if lengths else None,
            "rollout/exploration_rate": self.parts.collector.exploration_rate(),
            # Of all agents together, where there are several.
            "time/fps": config.population * (clock.env_steps - steps_then) / max(now - then, 1e-9),
            "time/env_steps": clock.env_steps,
            "time/frames": clock.frames,
            "time/time_elapsed": self.wall_s(),
            "train/n_updates": clock.updates,
            "train/learning_rate": schedules.learning_rate(config, clock.env_steps)
            * self.parts.learner.lr_scale,
            "train/loss": metrics.get("loss"),
            "train/grad_norm": metrics.get("grad_norm"),
            "train/q_mean": metrics.get("q_mean"),
            "train/abs_q_max": metrics.get("abs_q_max"),
        }
        scalars |= pipeline_scalars(self.parts, self.wall_s())
        shares = Timers.merged(self.parts.timers).shares(self.wall_s())
        scalars |= {f"time/share_{stage}": share for stage, share in shares.items()}
        self._writers.write(clock.env_steps, scalars)
        if self.evaluation is not None:
            scalars["eval/mean_reward"] = self.evaluation.mean
        self._progress.update(clock.env_steps, scalars, shares)
        self._watch(metrics)
        if not self._call("on_log", scalars):
            self._stop = "callback"

    def _watch(self, metrics: dict[str, float]) -> None:
        """Stop a run whose data or values have gone bad instead of training on."""
        clock, limit = self.parts.clock, self.config.max_fault_rate
        for kind in ("env_reward", "env_observation"):
            self._faults.check_rate(kind, clock.env_steps, limit)
        if not metrics:
            return
        new_skips = int(metrics["skipped"]) - self._faults.counts.get("gradient", 0)
        for _ in range(new_skips):
            self._faults("gradient", f"update near {clock.updates}: gradient not finite, skipped")
        self._faults.check_rate("gradient", clock.updates, limit)
        largest = metrics["abs_q_max"]
        if math.isfinite(largest) and largest <= self.config.max_abs_q:
            self._exploding = 0
            return
        self._exploding += 1
        self._faults("exploding_q", f"|Q| or its target reached {largest:.3g}")
        if self._exploding >= EXPLODING_LOGS:
            saved = list_checkpoints(self.folder / "checkpoints")
            good = f"the last good checkpoint is {saved[-1]}" if saved else "no checkpoint yet"
            raise DivergedError(
                f"Q-values exploded: {largest:.3g} exceeds --max-abs-q {self.config.max_abs_q:.3g};"
                f" {good}. Scale or clip rewards (--clip-rewards) or lower --learning-rate"
            )

    def _evaluate(self, record: bool) -> None:
        """Play the greedy policy. ``record`` False only reports: it decides nothing."""
        config, clock = self.config, self.parts.clock
        evaluation = self._play()
        if evaluation is None:
            return
        self.evaluation, self._evaluated_at = evaluation, clock.env_steps
        if not record:
            return
        self._writers.write(
            clock.env_steps,
            {
                "eval/mean_reward": evaluation.mean,
                "eval/std_reward": evaluation.std,
                "eval/mean_ep_length": evaluation.mean_length,
            },
        )
        verdict = self._judge.weigh(evaluation.mean)
        self._stop = verdict.stop or self._stop
        if verdict.is_best:
            self._save_best()
        if verdict.lower_rate:
            self.parts.learner.lr_scale *= config.lr_plateau_factor
            scale = self.parts.learner.lr_scale
            self._progress.message(f"plateau: learning rate scaled to {scale:g}")
        if not self._call("on_evaluation", evaluation):
            self._stop = "callback"

    def _play(self) -> Evaluation | None:
        """An evaluation's episodes; None if someone waits for this sitting to end."""
        config, parts = self.config, self.parts
        if parts.evaluator is not None:
            network = parts.learner.online.eval()
            try:
                return as_evaluation(parts.evaluator.play(self._is_out_of_time))
            finally:
                network.train()
        if self._eval_envs is None:
            count = min(config.n_eval_episodes, 16)
            seed = parts.seeds.eval_envs
            self._eval_envs = make_envs(config, count, seed, training=False, on_fault=self._faults)
        return evaluate_policy(
            parts.learner.online,
            self._eval_envs,
            config.n_eval_episodes,
            config.eval_eps,
            parts.device,
            parts.seeds.eval_envs,
            give_up=self._is_out_of_time,
        )

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
        if self._judge.best_return is None and self.evaluation is not None:
            self._save_best()
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
        if self._sitting.display != "silent":
            self._progress.message(self.stages.table())

    # --- what is kept -----------------------------------------------------------------------

    def _save_best(self) -> None:
        learner = self.parts.learner.state_dict()
        policy = {"weights": learner["weights"], "buffers": learner["buffers"]}
        meta = {
            "env_steps": self.parts.clock.env_steps,
            "layout": self.parts.learner.weights.describe(),
            "return": None if self.evaluation is None else self.evaluation.mean,
        }
        try:
            save_policy(self.folder / "best", {"policy": policy}, meta)
        except CheckpointError as error:
            self._faults("checkpoint", str(error))

    def _checkpoint(self) -> None:
        metrics = self.parts.learner.read_metrics()
        if metrics and not metrics["abs_q_max"] <= self.config.max_abs_q:
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
        return {
            "learner": parts.learner.state_dict(),
            "memory": parts.memory.state_dict(),
            "actor": parts.collector.state_dict(),
            "run": {
                "env_steps": parts.clock.env_steps,
                "updates": parts.clock.updates,
                "marks": self._marks,
                "recent": [list(episode) for episode in self._recent],
                "judge": self._judge.state_dict(),
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
        self._judge.load_state_dict(own["judge"])
        if not parts.collector.load_state_dict(state["actor"], parts.clock.env_steps):
            parts.memory.end_open_episodes()
            self._progress.message(
                "the checkpoint has no state of the envs: open episodes were cut and restarted"
            )
            self._respect_best()
        parts.channel.restart(parts.clock.updates)
        self._marks = dict(own["marks"])
        self._recent.extend((reward, length) for reward, length in own["recent"])
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
            self._judge.best_return = max(kept, self._judge.best_return or kept)

    def _result(self) -> Result:
        return make_result(
            self.parts,
            wall_s=self.wall_s(),
            evaluation=self.evaluation,
            best_return=self._judge.best_return,
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
