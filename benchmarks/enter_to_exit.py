"""What a user waits for: whole commands beside what nobody can avoid, and rates beside each other.

    python benchmarks/enter_to_exit.py                     all rows (3 minutes on 2 slow cores)
    python benchmarks/enter_to_exit.py --rows tiny --rounds 9
    python benchmarks/enter_to_exit.py --rows prioritized

tiny: `qfleet train CartPole-v1` for 300 steps, Enter to exit, beside a Python that only imports
torch and gymnasium. prioritized: env steps per second of prioritised replay beside uniform replay,
with the preset's settings and with one update per 4 steps. The sides take turns; ratios are of
medians.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import qfleet

UNTIMED = {"eval_freq": 0, "checkpoint_freq": 10**9, "tensorboard": False, "device": "cpu"}
SETTINGS: dict[str, dict[str, Any]] = {
    "preset": {},
    "one update per 4 steps": {"preset": "none", "train_freq": 4, "learning_starts": 100},
}


def seconds_of(*command: str) -> float:
    # As a user's shell has it: compiled modules are kept.
    environ = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    began_s = time.perf_counter()
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, env=environ, check=False
    )
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed: {done.stderr}")
    return time.perf_counter() - began_s


def tiny(rounds: int) -> dict[str, float]:
    imports, whole = [], []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds + 1):
            imports.append(seconds_of("-c", "import torch, gymnasium"))
            options = f"--preset none --steps 300 --device cpu --run-dir {folder}/{number}"
            command = ["-m", "qfleet.cli.main", "train", "CartPole-v1", *options.split()]
            whole.append(seconds_of(*command))
    medians = [statistics.median(times[1:]) for times in (imports, whole)]  # the first fills caches
    print(f"tiny: {medians[1]:.2f} s, imports {medians[0]:.2f} s: {medians[1] / medians[0]:.2f}")
    return {"imports_s": medians[0], "train_s": medians[1], "ratio": medians[1] / medians[0]}


def steps_per_s(folder: Path, algo: str, fields: dict[str, Any]) -> float:
    trained = qfleet.train(
        "CartPole-v1", algo=algo, steps=20_000, run_dir=folder, **fields, **UNTIMED
    )
    assert trained.result.env_steps_per_s is not None
    return trained.result.env_steps_per_s


def prioritized(rounds: int) -> dict[str, dict[str, float]]:
    found = {}
    for name, fields in SETTINGS.items():
        rates: dict[str, list[float]] = {"dqn": [], "prioritized-dqn": []}
        with tempfile.TemporaryDirectory() as folder:
            for number in range(rounds):
                for algo, own in rates.items():
                    own.append(steps_per_s(Path(folder) / f"{algo}-{number}", algo, fields))
        uniform, ours = (statistics.median(own) for own in rates.values())
        print(f"prioritized, {name}: {ours:,.0f} of {uniform:,.0f} steps/s: {ours / uniform:.2f}")
        found[name] = {"uniform": uniform, "prioritized": ours, "ratio": ours / uniform}
    return found


ROWS = {"tiny": tiny, "prioritized": prioritized}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    figures = {name: ROWS[name](arguments.rounds) for name in arguments.rows}
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
