"""What a user waits for: whole commands beside what nobody can avoid, and rates beside each other.

    python benchmarks/enter_to_exit.py                     the rows of CPUs (3 minutes on 2 cores)
    python benchmarks/enter_to_exit.py --rows tiny --rounds 9
    python benchmarks/enter_to_exit.py --rows prioritized
    python benchmarks/enter_to_exit.py --rows cartpole minatar pong    on a GPU

tiny: `qfleet train CartPole-v1` for 300 steps, Enter to exit, beside a Python that only imports
torch and gymnasium. prioritized: env steps per second of prioritised replay beside uniform replay,
with the preset's settings and with one update per 4 steps. The sides take turns; ratios are of
medians.

cartpole, minatar, pong: whole commands on a GPU, first with empty caches of torch, Triton and
qfleet, then with what that run has left there. "start" is the time before the first step and after
the last line; beside it are the imports alone and, for pong, the imports with the creation of its
games alone.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import qfleet

UNTIMED = {"eval_freq": 0, "checkpoint_freq": 10**9, "tensorboard": False, "device": "cpu"}
SETTINGS: dict[str, dict[str, Any]] = {
    "preset": {},
    "one update per 4 steps": {"preset": "none", "train_freq": 4, "learning_starts": 100},
}


def seconds_of(*command: str, **variables: str) -> float:
    # As a user's shell has it: compiled modules are kept.
    environ = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"} | variables
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


GPU_COMMANDS = {
    "cartpole": "CartPole-v1 --preset cartpole-pqn --engine device",
    "minatar": "MinAtar/Breakout-v1 --preset minatar-pqn",
    "pong": "ALE/Pong-v5 --preset pong --stop-after 60000",
}
GAMES = """
from qfleet.config.config import Config
from qfleet.engines.auto import settle
from qfleet.engines.parts import Setup
from qfleet.telemetry.faults import FaultLog
import contextlib
config, _ = settle(Config(env="ALE/Pong-v5", engine="pipeline"))
with contextlib.ExitStack() as closing:
    for group in Setup(config, FaultLog()).make_envs(closing):
        group.reset()
"""


def command_on_a_gpu(name: str, rounds: int) -> dict[str, float]:
    del rounds
    # As pip leaves packages: compiled. Python may have to do that first, which takes 10 s.
    seconds_of("-c", "import torch, gymnasium, torch._inductor.compile_fx")
    found = {"imports_s": seconds_of("-c", "import torch, gymnasium")}
    if name == "pong":
        found["imports_and_games_s"] = seconds_of("-c", GAMES)
    with tempfile.TemporaryDirectory() as folder:
        caches = {
            "XDG_CACHE_HOME": f"{folder}/cache",
            "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
            "TRITON_CACHE_DIR": f"{folder}/triton",
        }
        for cache in ("cold", "warm"):
            words = ["train", *GPU_COMMANDS[name].split(), "--run-dir", f"{folder}/{cache}"]
            found[f"{cache}_s"] = seconds_of("-m", "qfleet.cli.main", *words, **caches)
            result = json.loads(Path(folder, cache, "result.json").read_text())
            found[f"{cache}_start_s"] = found[f"{cache}_s"] - result["wall_s"]
    print(f"{name}: " + ", ".join(f"{key} {value:.1f}" for key, value in found.items()), flush=True)
    return found


CPU_ROWS = {"tiny": tiny, "prioritized": prioritized}
ROWS: dict[str, Callable[[int], Any]] = CPU_ROWS | {
    name: functools.partial(command_on_a_gpu, name) for name in GPU_COMMANDS
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(CPU_ROWS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    figures = {name: ROWS[name](arguments.rounds) for name in arguments.rows}
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
