"""Does a run's memory stay flat? Trains for some minutes and draws resident memory over time.

    python benchmarks/soak.py --minutes 12 --png docs/images/soak.png
    python benchmarks/soak.py --minutes 60 --fields '{"env": "ALE/Pong-v5", "device": "cuda"}'

Replay is made small and fills in the first minute, so that what grows afterwards would be a leak.
Prints the growth from the first quarter's median to the last quarter's, as a ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch

from qfleet.config.presets import resolve
from qfleet.config.validation import validate
from qfleet.telemetry.figures import saved_figure
from qfleet.training.run import Run
from qfleet.training.run_state import RunOptions

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def resident_bytes() -> int:
    """This process's; environments in processes of their own are not counted."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


def watch(samples: list[tuple[float, int, int]], run: Run, stop: threading.Event) -> None:
    start = time.monotonic()
    while not stop.wait(2.0):
        seconds = time.monotonic() - start
        samples.append((seconds, resident_bytes(), run.parts.clock.env_steps))


def draw(samples: list[tuple[float, int, int]], png: Path, title: str) -> None:
    with saved_figure(png, 7.2, 3.2) as figure:
        axes = figure.add_subplot()
        axes.plot([s / 60 for s, _, _ in samples], [b / 2**20 for _, b, _ in samples])
        axes.set_ylim(bottom=0)
        axes.set_xlabel("minutes")
        axes.set_ylabel("resident memory, MiB")
        axes.set_title(title)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=12.0)
    parser.add_argument("--fields", default="{}", help="configuration fields, as JSON")
    parser.add_argument("--png", type=Path, default=Path("soak.png"))
    parser.add_argument("--json", type=Path, help="write the samples there")
    options = parser.parse_args()
    asked: dict[str, Any] = {
        "env": "ALE/Pong-v5", "engine": "pipeline", "steps": 10**9, "buffer_size": 2000,
        "learning_starts": 500, "eval_freq": 5000, "n_eval_episodes": 1, "log_interval": 500,
        "max_episode_steps": 300, "checkpoint_freq": 5000, **json.loads(options.fields),
    }  # fmt: skip
    env = asked.pop("env")
    config, _ = resolve(env, fields=asked)
    samples: list[tuple[float, int, int]] = []
    stop = threading.Event()
    with tempfile.TemporaryDirectory() as folder:
        run = Run(
            validate(config), Path(folder) / "run", RunOptions(max_wall_s=60 * options.minutes)
        )
        watcher = threading.Thread(target=watch, args=(samples, run, stop), daemon=True)
        watcher.start()
        result = run.go()
        stop.set()
        watcher.join(5.0)
    quarter = max(1, len(samples) // 4)
    first = statistics.median(b for _, b, _ in samples[quarter : 2 * quarter])
    last = statistics.median(b for _, b, _ in samples[-quarter:])
    title = f"{env}, {run.config.engine} on {run.parts.device}, {result.env_steps:,} steps"
    draw(samples, options.png, title)
    if options.json:
        options.json.write_text(json.dumps(samples))
    device = torch.accelerator.current_accelerator(check_available=True)
    print(f"{title} in {options.minutes:g} min (accelerator: {device})")
    print(
        f"resident: {first / 2**20:.0f} MiB in the second quarter, {last / 2**20:.0f} in the last"
    )
    print(f"growth ratio {last / first:.3f}; faults {result.faults}; picture {options.png}")


if __name__ == "__main__":
    main()
