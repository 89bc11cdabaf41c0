"""Does a lower precision learn as well, and how much faster is it? Scores and rates beside fp32.

    python benchmarks/precision.py --tasks cartpole --precisions fp32 bf16    on a CPU
    python benchmarks/precision.py --seeds 5                                  on a GPU
    python benchmarks/precision.py --jobs 4                                   four runs at a time

Every task is trained with its preset, several seeds for each precision. The table shows the score
of the last evaluation (interquartile mean over the seeds and its 95 % interval), the mean over all
evaluations minus that of fp32, and the updates per second, the start and evaluations included,
relative to those of fp32 (which means little with several jobs).
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

import qfleet
from qfleet.telemetry.aggregate import bootstrap_ci, iqm

TASKS: dict[str, tuple[str, dict[str, Any]]] = {
    "cartpole": ("CartPole-v1", {"eval_freq": 2500, "n_eval_episodes": 20}),
    "minatar": (
        "MinAtar/Breakout-v1",
        {"steps": 500_000, "eval_freq": 50_000, "n_eval_episodes": 50, "algo": "dqn"},
    ),
    "pong": ("ALE/Pong-v5", {"preset": "pong", "eval_freq": 100_000, "n_eval_episodes": 10}),
}


class Curve(qfleet.Callback):
    """The returns of all evaluations."""

    def __init__(self) -> None:
        self.returns: list[float] = []

    def on_evaluation(self, run: Any, evaluation: Any) -> None:
        self.returns.append(evaluation.mean)


def train(task: str, precision: str, seed: int, given: dict[str, Any]) -> dict[str, Any]:
    env, fields = TASKS[task]
    curve = Curve()
    with tempfile.TemporaryDirectory() as folder:
        result = qfleet.train(
            env, run_dir=Path(folder) / "run", seed=seed, precision=precision, tensorboard=False,
            checkpoint_freq=10**9, callbacks=[curve], **fields | given,
        ).result  # fmt: skip
    return {
        "task": task, "precision": precision, "seed": seed, "curve": curve.returns,
        "score": result.eval_return_mean, "updates_per_s": result.updates / result.wall_s,
    }  # fmt: skip


def show(task: str, rows: list[dict[str, Any]]) -> None:
    base = [row for row in rows if row["precision"] == "fp32"]
    for precision in dict.fromkeys(row["precision"] for row in rows):
        own = [row for row in rows if row["precision"] == precision]
        scores = [row["score"] for row in own]
        low, high = bootstrap_ci(scores)
        line = f"{task:<9} {precision:<5} {iqm(scores):8.1f}  ({low:.1f} to {high:.1f})"
        if base:
            areas, speeds = (
                [statistics.fmean(number(row) for row in some) for some in (own, base)]
                for number in (lambda r: statistics.fmean(r["curve"]), lambda r: r["updates_per_s"])
            )
            line += f"  curve {areas[0] - areas[1]:+.1f}  updates/s {speeds[0] / speeds[1]:.2f}×"
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    names = ["fp32", "tf32", "bf16", "fp16"] if torch.cuda.is_available() else ["fp32", "bf16"]
    parser.add_argument("--precisions", nargs="+", default=names)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=None, help="env steps; default: the preset's")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    given: dict[str, Any] = {} if options.steps is None else {"steps": options.steps}
    given["compile"] = "off"  # which saves minutes of start and does not change the precision
    given["device"] = "cuda" if torch.cuda.is_available() else "cpu"
    rows = []
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        for task in options.tasks:
            # Precisions in turn: a slow minute hits all.
            runs = [(p, seed) for seed in range(options.seeds) for p in options.precisions]
            for row in as_completed([pool.submit(train, task, *run, given) for run in runs]):
                rows.append(row.result())
                if options.json:
                    options.json.write_text(json.dumps(rows))
            rows.sort(key=lambda row: (row["seed"], options.precisions.index(row["precision"])))
            show(task, [row for row in rows if row["task"] == task])


if __name__ == "__main__":
    main()
