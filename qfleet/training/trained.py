"""What training returns: a run or several seeds on disk, with their policy, metrics and plots."""

from __future__ import annotations

import functools
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from qfleet.agent.policy import Policy, load_run_policy
from qfleet.config.config import Config
from qfleet.core.errors import ConfigError
from qfleet.core.files import atomic_write_text
from qfleet.telemetry.aggregate import bootstrap_ci, iqm
from qfleet.telemetry.formatting import format_score
from qfleet.telemetry.plots import draw_curves, learning_curve
from qfleet.telemetry.runs import (
    EVAL_RETURN,
    ROLLOUT_RETURN,
    RunData,
    group_runs,
    read_run,
    seed_folders,
)
from qfleet.training.result import Result


class History(dict[str, NDArray[np.float64]]):
    """Metric name → its finite values, as logged; ``steps`` has the env steps of each value."""

    def __init__(self, run: RunData) -> None:
        series = {name: run.series(name) for name in sorted(run.metric_names())}
        super().__init__({name: np.array(values) for name, (_, values) in series.items()})
        self.steps = {name: np.array(steps) for name, (steps, _) in series.items()}

    def frame(self) -> Any:
        """Return a pandas DataFrame: a row per env step, a column per metric, NaN for no value."""
        try:
            import pandas
        except ImportError:
            raise ConfigError("history.frame() needs pandas: `pip install pandas`") from None
        columns = {
            name: dict(zip(self.steps[name].tolist(), values.tolist(), strict=True))
            for name, values in self.items()
        }
        return pandas.DataFrame(columns).rename_axis("env_steps").sort_index()

    def __repr__(self) -> str:
        return f"History({len(self)} metrics: {', '.join(self)})"


@dataclass(frozen=True)
class Trained:
    """A finished (or interrupted) run."""

    folder: Path
    config: Config
    result: Result
    curve: Path | None
    """Image of the learning curve."""
    interrupted_by: int | None = None
    """The signal that stopped the run, if one did."""
    url: str | None = None
    """Where the run is published, if ``run_dir`` was a URL; ``folder`` is the local copy."""

    def policy(self, which: Literal["best", "last"] | None = None) -> Policy:
        return load_run_policy(self.folder, which, trust=True)

    @functools.cached_property
    def history(self) -> History:
        """The metrics that were logged, as arrays: ``history["eval/mean_reward"]``."""
        return History(read_run(self.folder))

    def plot(self, metric: str = EVAL_RETURN) -> Any:
        """Return a matplotlib Figure of one metric over env steps; notebooks show it."""
        return draw_curves(group_runs([read_run(self.folder)]), metric)

    def __repr__(self) -> str:
        best = self.result.best_eval_return
        score = "" if best is None else f", best return {format_score(best)}"
        task = f"{self.config.env}, {self.config.algo}, {self.result.env_steps:,} steps{score}"
        return f"Trained({task}, folder='{self.folder}')"


@dataclass(frozen=True)
class TrainedSeeds:
    """Several seeds of one experiment and their aggregate."""

    folder: Path
    runs: list[Trained]
    aggregate: dict[str, Any]
    curve: Path | None


def draw_learning_curve(folder: Path) -> Path | None:
    """Draw the returns of a run or of its seeds.

    None if each has at most one, which the summary says in less time, or if the disk is full.
    """
    try:
        runs = [read_run(path) for path in seed_folders(folder)]
        metrics = (EVAL_RETURN, ROLLOUT_RETURN) if len(runs) == 1 else (EVAL_RETURN,)
        if all(len(run.series(metric)[0]) < 2 for run in runs for metric in metrics):
            return None
        return learning_curve(group_runs(runs), EVAL_RETURN, folder / "plots/learning_curve.png")
    except ConfigError as error:
        print(f"qfleet: {error}", file=sys.stderr)
        return None


def aggregate_seeds(folder: Path, runs: list[Trained]) -> TrainedSeeds:
    """Write ``aggregate.json`` and the learning curve of several seeds."""
    scores = [
        run.result.eval_return_mean for run in runs if run.result.eval_return_mean is not None
    ]
    low, high = bootstrap_ci(scores) if scores else (None, None)
    aggregate = {
        "env_id": runs[0].config.env,
        "algo": runs[0].config.algo,
        "engine": runs[0].config.engine,
        "seeds": [run.config.seed for run in runs],
        "eval_return_mean": [run.result.eval_return_mean for run in runs],
        "best_eval_return": [run.result.best_eval_return for run in runs],
        "eval_return_iqm": iqm(scores) if scores else None,
        "eval_return_iqm_ci95": [low, high],
        "wall_s": sum(run.result.wall_s for run in runs),
        "env_steps": sum(run.result.env_steps for run in runs),
    }
    atomic_write_text(folder / "aggregate.json", json.dumps(aggregate, indent=2))
    return TrainedSeeds(folder, runs, aggregate, draw_learning_curve(folder))
