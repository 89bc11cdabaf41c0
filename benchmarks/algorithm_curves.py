"""Learning curves of every row of the algorithm table: CartPole-v1, several seeds, IQM and 95 % CI.

    python benchmarks/algorithm_curves.py --jobs 2            train, then draw docs/images/*.png
    python benchmarks/algorithm_curves.py --draw-only         draw from benchmarks/data/curves.jsonl

Every evaluation of every run is one line of the data file, which is kept in the repository: the
pictures can be drawn again without training. Runs that are in the file already are not repeated.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import queue
import tempfile
import time
from pathlib import Path
from typing import Any

from qfleet.config.algorithms import ALGORITHMS
from qfleet.config.presets import resolve
from qfleet.config.validation import validate
from qfleet.telemetry.aggregate import bootstrap_ci, iqm
from qfleet.telemetry.plots import learning_curve
from qfleet.telemetry.runs import RunData

DATA = Path(__file__).parent / "data" / "curves.jsonl"
IMAGES = Path(__file__).parents[1] / "docs" / "images"
# The same for every row with replay: the cartpole preset with a quarter of its batch, so that
# twelve rows times five seeds are affordable, and 1-step returns where the row does not say more.
SAME_WITH_REPLAY = {"batch_size": 64}
# Slowest first, so that parallel workers finish together.
SLOWEST_FIRST = ("munchausen-iqn", "iqn", "rainbow", "c51", "qr-dqn", "prioritized-dqn")


# Rows that play: those of offline training have curves of their own (benchmarks/offline.py).
PLAYING = [row for row in ALGORITHMS if row not in ("behaviour-cloning", "cql", "bcq")]


def train(algo: str, seed: int, fields: dict[str, Any]) -> dict[str, Any]:
    import qfleet

    points: list[tuple[int, float]] = []

    class Record(qfleet.Callback):
        def on_evaluation(self, run: Any, evaluation: Any) -> None:
            points.append((run.parts.clock.env_steps, evaluation.mean))

    same = SAME_WITH_REPLAY if ALGORITHMS[algo].get("replay", True) else {}
    config, _ = resolve(
        "CartPole-v1",
        algo,
        fields={
            "eval_freq": 2000, "n_eval_episodes": 20, "tensorboard": False, "seed": seed,
            "checkpoint_freq": 10**9, "n_steps": ALGORITHMS[algo].get("n_steps", 1),
            **same, **fields,
        },
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        trained = qfleet.train(
            config=validate(config), run_dir=Path(folder) / "run", callbacks=[Record()]
        )
    return {"algo": algo, "seed": seed, "points": points, "wall_s": trained.result.wall_s}


def worker(jobs: Any, data: Path, fields: dict[str, Any], deadline: float) -> None:
    while time.time() < deadline:
        try:
            algo, seed = jobs.get(timeout=1)
        except queue.Empty:
            return
        line = json.dumps(train(algo, seed, fields)) + "\n"
        # One write of one line, appended: workers need no lock.
        descriptor = os.open(data, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.write(descriptor, line.encode())
        os.close(descriptor)


def read(data: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in data.read_text().splitlines()] if data.exists() else []


def draw(data: Path, images: Path) -> None:
    groups: dict[str, list[RunData]] = {}
    order = list(ALGORITHMS)
    for row in sorted(read(data), key=lambda row: (order.index(row["algo"]), row["seed"])):
        metrics = [{"env_steps": x, "eval/mean_reward": y} for x, y in row["points"]]
        config = {"env": "CartPole-v1", "algo": row["algo"], "seed": row["seed"]}
        run = RunData(Path("."), f"{row['algo']}/seed-{row['seed']}", config, None, metrics)
        groups.setdefault(row["algo"], []).append(run)
    for algo, runs in groups.items():
        learning_curve({algo: runs}, "eval/mean_reward", images / f"{algo}.png")
        finals = [run.metrics[-1]["eval/mean_reward"] for run in runs]
        low, high = bootstrap_ci(finals)
        print(
            f"{algo:<18} {len(runs)} seeds   final IQM {iqm(finals):6.1f}  "
            f"95 % {low:6.1f} to {high:6.1f}   at least 475: {sum(f >= 475 for f in finals)}"
        )
    learning_curve(groups, "eval/mean_reward", images / "algorithms.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--algos", nargs="+", default=PLAYING)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--images", type=Path, default=IMAGES)
    parser.add_argument("--fields", default="{}", help="configuration fields as JSON")
    parser.add_argument("--deadline-s", type=float, default=1e9, help="start no run after this")
    parser.add_argument("--draw-only", action="store_true")
    parser.add_argument("--train-only", action="store_true")
    options = parser.parse_args()
    if not options.draw_only:
        options.data.parent.mkdir(parents=True, exist_ok=True)
        done = {(row["algo"], row["seed"]) for row in read(options.data)}
        context = multiprocessing.get_context("spawn")
        jobs = context.Queue()
        slow = [algo for algo in SLOWEST_FIRST if algo in options.algos]
        for algo in slow + [algo for algo in options.algos if algo not in slow]:
            for seed in range(options.seeds):
                if (algo, seed) not in done:
                    jobs.put((algo, seed))
        fields = {"threads": 1, **json.loads(options.fields)}
        arguments = (jobs, options.data, fields, time.time() + options.deadline_s)
        workers = [context.Process(target=worker, args=arguments) for _ in range(options.jobs)]
        for process in workers:
            process.start()
        for process in workers:
            process.join()
    if not options.train_only:
        draw(options.data, options.images)


if __name__ == "__main__":
    main()
