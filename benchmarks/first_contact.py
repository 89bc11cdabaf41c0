"""What a new user gets with no option but the id: the return after training with the defaults.

    python benchmarks/first_contact.py --jobs 4                  every installed row, 5 seeds
    python benchmarks/first_contact.py --rows taxi --seeds 2
    python benchmarks/first_contact.py --rows highway --jobs 5   needs `pip install highway-env`
    python benchmarks/first_contact.py --rows minigrid           needs `pip install minigrid`

Rows: single ids, and Pendulum-v1 with discretised actions, hover.py with MultiDiscrete ones.

Every run is `qfleet train ID --seed S` in a process of its own, then `qfleet evaluate` of its best
policy on episodes with other seeds. The score is the interquartile mean over the seeds; beside it
is the score to reach: that of Stable-Baselines3 for highway-env, of a nearly optimal policy
elsewhere.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from qfleet.telemetry.aggregate import iqm


class Row(NamedTuple):
    line: tuple[str, ...]
    """What the user types behind ``qfleet train``."""
    to_reach: float
    episodes: int = 100
    package: str = "gymnasium"


ROWS = {
    "frozenlake": Row(("FrozenLake-v1",), 0.70),
    "taxi": Row(("Taxi-v4",), 7.0),
    "cliffwalking": Row(("CliffWalking-v1",), -13.0),
    "acrobot": Row(("Acrobot-v1",), -100.0),
    "mountaincar": Row(("MountainCar-v0",), -120.0),
    "lunarlander": Row(("LunarLander-v3",), 200.0, package="Box2D"),
    "pendulum": Row(("Pendulum-v1", "--discretize-actions", "5"), -200.0),
    "hover": Row(("benchmarks.hover:Hover",), -3.5),
    "minigrid": Row(("minigrid:MiniGrid-Empty-5x5-v0",), 0.9, package="minigrid"),
    "highway": Row(
        ("highway_env:highway-fast-v0", "--steps", "20000"), 19.7, 20, package="highway_env"
    ),
}


def qfleet(*line: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "qfleet.cli.main", *line, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"qfleet {' '.join(line)} failed:\n{done.stderr}")
    said: dict[str, Any] = json.loads(done.stdout)
    return said


def play(row: Row, seed: int, more: list[str], root: Path) -> dict[str, float]:
    folder = root / f"{row.line[0].replace(':', '-').replace('/', '-')}-{seed}"
    start_s = time.monotonic()
    qfleet("train", *row.line, "--seed", str(seed), "--run-dir", str(folder), *more)
    train_s = time.monotonic() - start_s
    played = qfleet("evaluate", str(folder), "--episodes", str(row.episodes), "--trust")
    found = {"seed": seed, "return": played["return_mean"], "train_s": train_s}
    print(f"  {row.line[0]} {found}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--more", default="", help="further options of qfleet train")
    parser.add_argument("--json", type=Path, help="write every seed's return there")
    options = parser.parse_args()
    rows = {name: ROWS[name] for name in options.rows}
    for name, row in list(rows.items()):
        if importlib.util.find_spec(row.package) is None:
            print(f"{name:<13} left out: {row.package} is not installed", flush=True)
            del rows[name]
    if options.jobs > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    found: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as pool:
        pending = {
            name: [
                pool.submit(play, row, seed, options.more.split(), Path(folder))
                for seed in range(options.seeds)
            ]
            for name, row in rows.items()
        }
        for name, runs in pending.items():
            found[name] = [run.result() for run in runs]
            returns = [run["return"] for run in found[name]]
            score, reach = iqm(returns), rows[name].to_reach
            print(
                f"{name:<13} IQM {score:8.2f}  to reach {reach:7.2f}  "
                f"{'reached' if score >= reach else 'MISSED '}  seeds "
                + " ".join(f"{value:.2f}" for value in sorted(returns))
                + f"  {sum(run['train_s'] for run in found[name]) / len(returns):.0f} s each",
                flush=True,
            )
            if options.json:
                options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
