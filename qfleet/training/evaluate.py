"""Evaluation during a run: the greedy policy is played at intervals, and the best one is kept.

On accelerators it is played in a thread (``agent/background_evaluation.py``): training goes on, and
the result counts as soon as it is there, for the env steps at which it began. A run that stops
early by it has therefore made some more steps.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict

from qfleet.agent.background_evaluation import BackgroundEvaluator
from qfleet.agent.evaluation import Evaluation
from qfleet.agent.weights import SavedWeights
from qfleet.config.config import Config
from qfleet.core.errors import EnvironmentFault
from qfleet.core.types import StateDict
from qfleet.storage.state_checks import check_like
from qfleet.training.best_policy import save_best
from qfleet.training.callbacks import Hook
from qfleet.training.early_stopping import EarlyStopping
from qfleet.training.plateau import Plateau
from qfleet.training.run_state import RunState


class Evaluate(Hook):
    """Plays the greedy policy every ``eval_freq`` env steps, keeps the best, and stops early."""

    def __init__(self, config: Config, save: Hook) -> None:
        """``save`` writes a checkpoint before a failing environment ends the run."""
        self._early_stopping, self._save, self.plateau = EarlyStopping(config), save, Plateau()
        self._begun_at: int | None = None
        """Env steps of the evaluation under way in the background."""

    def on_step(self, run: RunState) -> None:
        interval, background = run.config.eval_freq, run.parts.background
        if not interval or run.parts.evaluator is None:
            return
        if background is not None and self._begun_at is not None:
            next_is_due = run.parts.clock.env_steps // interval > self._begun_at // interval
            if not (background.is_done or next_is_due):
                return
            self._end_background(run, background)
        if not run.due("eval", interval):
            return
        run.postpone("eval")  # a resume repeats an evaluation that was cut short
        if background is None:
            self.evaluate(run)
            if run.evaluated_at == run.parts.clock.env_steps:
                run.settle("eval")
        elif run.stopped_by is None:
            self._begun_at = run.parts.clock.env_steps
            background.start(lambda _: run.is_out_of_time())

    def on_finish(self, run: RunState) -> None:
        if run.parts.evaluator is None:
            return
        if run.parts.background is not None and self._begun_at is not None:
            self._end_background(run, run.parts.background)
        # With the patience of another metric, no evaluation has stopped the run.
        by_patience = run.stopped_by == "patience" and run.config.plateau_metric == "return"
        stopped_early = run.stopped_by == "target_return" or by_patience
        if (
            run.evaluated_at != run.parts.clock.env_steps
            and not run.is_out_of_time()
            and not stopped_early
        ):
            # An interrupted run only reports: resumed, it evaluates when an uninterrupted one does.
            complete = run.stopped_by not in ("stop_after", "max_wall", "SIGINT", "SIGTERM")
            self.evaluate(run, counts=complete)
        if run.evaluated_at != run.parts.clock.env_steps and run.stopped_by == "steps":
            # Not finished: a resume evaluates.
            run.stopped_by = run.reason_to_stop() if run.interrupted_by else "max_wall"
        if run.best_return is None and run.evaluation is not None:
            self._save_best(run, run.parts.members, run.parts.model.weights)

    def evaluate(self, run: RunState, counts: bool = True) -> None:
        """Play the greedy policy. ``counts`` False: only report, stop nothing and keep nothing."""
        parts = run.parts
        assert parts.evaluator is not None
        episodes = run.config.n_eval_episodes * len(parts.members)
        with run.not_training("evaluate" if parts.background is None else "idle"):
            try:
                with run.progress.evaluating(episodes) as show:
                    evaluation = parts.evaluator.play(
                        lambda done: show(done) or run.is_out_of_time()
                    )
            except EnvironmentFault:
                self._save.on_finish(run)
                raise
            if evaluation is not None:
                self._add(run, evaluation, parts.clock.env_steps, parts.model.weights, counts)

    def _end_background(self, run: RunState, background: BackgroundEvaluator) -> None:
        """Wait for the evaluation in the background, and count it."""
        assert self._begun_at is not None
        begun_at, self._begun_at = self._begun_at, None
        try:
            with run.not_training("idle"):
                evaluation = background.result()
        except EnvironmentFault:
            self._save.on_finish(run)
            raise
        if evaluation is not None:
            run.settle("eval")
            self._add(run, evaluation, begun_at, background.weights, counts=True)

    def _add(
        self,
        run: RunState,
        evaluation: Evaluation,
        env_steps: int,
        weights: SavedWeights,
        counts: bool,
    ) -> None:
        """Report an evaluation of ``weights``, as they were after ``env_steps``."""
        config, parts, standings = run.config, run.parts, run.standings
        episodes = config.n_eval_episodes * len(parts.members)
        if line := evaluation.why_ended(episodes, config.eval_max_steps):
            run.progress.message(line)
        run.evaluation, run.evaluated_at = evaluation, env_steps
        better = standings.add_evaluation(evaluation, parts.members, counts=counts)
        if not counts:
            return
        scalars = {
            "eval/mean_reward": evaluation.mean,
            "eval/std_reward": evaluation.std,
            "eval/mean_ep_length": evaluation.mean_length,
            **standings.evaluation_scalars(parts.members),
        }
        run.writers.write(env_steps, scalars)
        _, stops, lower_rate = self._early_stopping.add(evaluation.mean)
        run.best_return = self._early_stopping.best
        if config.target_return is not None and evaluation.mean >= config.target_return:
            run.stop("target_return")
        self._save_best(run, better, weights)
        if config.plateau_metric == "return":  # otherwise epochs count (``validate_data.py``)
            if stops:
                run.stop("patience")
            if lower_rate:
                self.plateau.reached(run)
        run.call("on_evaluation", evaluation)

    def _save_best(self, run: RunState, better: Iterable[int], weights: SavedWeights) -> None:
        if run.config.plateau_metric != "return":
            return  # the best epoch is kept instead (``validate_data.py``)
        save_best(
            run.folder, run.parts, run.standings, better, run.faults, weights, run.evaluated_at
        )

    def keep_best(self, run: RunState, best_return: float) -> None:
        """Keep a policy with this return, found after the checkpoint that a run resumes from."""
        best = self._early_stopping.best
        run.best_return = best_return if best is None else max(best_return, best)
        self._early_stopping.best = run.standings.agents[0].best = run.best_return

    def state_dict(self, run: RunState) -> StateDict:
        evaluation = run.evaluation
        return {
            "judge": self._early_stopping.state_dict(),
            "evaluation": None if evaluation is None else asdict(evaluation),
            "evaluated_at": run.evaluated_at,
            **self.plateau.state_dict(run),
        }

    def load_state_dict(self, run: RunState, state: StateDict) -> None:
        self._early_stopping.load_state_dict(state["judge"])
        run.best_return = self._early_stopping.best
        if state["evaluation"] is not None:
            like = {"returns": (0.0,), "lengths": (0,), "unfinished": 0}
            check_like({"unfinished": 0} | state["evaluation"], like, "evaluation")
            run.evaluation = Evaluation(**state["evaluation"])
        run.evaluated_at = state["evaluated_at"]
        self.plateau.load_state_dict(run, state)
