"""Datasets: what recording costs, how fast offline training reads, and how much memory it takes.

    python benchmarks/data.py [--seconds 0.5] [--repeats 40] [--rows 60000] [--copies 20]

Both sides of every ratio are advanced in turn, in short slices, in the same process. Printed as
JSON: the median of the slices' ratios and their quartiles, of time and of processor time.
Recording: env steps per second of ``serial`` with and without ``--record``. Reading: updates per
second of the offline engine, with its dataset in memory as a whole and in windows, over those of
the same loop with a replay ring of the same rows. Memory: by how much the memory of a process grows
that reads a dataset of ten times the memory it is given.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch

from qfleet.config.config import Config
from qfleet.config.presets import resolve
from qfleet.core.types import Block
from qfleet.data import dataset_memory, recorder
from qfleet.data.dataset_memory import DatasetMemory
from qfleet.data.manifest import Dataset
from qfleet.data.operations import read_groups
from qfleet.data.writer import Writer
from qfleet.engines import offline, serial
from qfleet.engines.factories import make_ring
from qfleet.engines.parts import LoopParts, Setup
from qfleet.engines.placement import Placement
from qfleet.telemetry.faults import FaultLog

MIB, HOST = 2**20, torch.device("cpu")
Ratios: TypeAlias = dict[str, list[float]]
ENVS = {"CartPole-v1": 8, "PongNoFrameskip-v4": 4}


def online_config(env: str, record: str = "", **fields: Any) -> Config:
    chosen = {"engine": "serial", "envs": ENVS[env], "steps": 10**8, "record": record}
    chosen |= {"learning_starts": 500, "buffer_size": 20_000, "exploration_initial_eps": 0.1}
    return resolve(env, "dqn", fields={**chosen, "exploration_final_eps": 0.1, **fields})[0]


class Side:
    """One side of a comparison: a run that is advanced for short slices of time."""

    def __init__(self, parts: LoopParts, count: str) -> None:
        self.parts, self._count = parts, count
        serial.run(parts, lambda: parts.clock.updates < 20)
        self.wall: list[float] = []
        self.processor: list[float] = []

    def advance(self, seconds: float) -> None:
        """Go on for a slice; note its steps or updates per second, of time and of one processor."""
        clock, start = self.parts.clock, getattr(self.parts.clock, self._count)
        start_s, processor_s = time.perf_counter(), time.process_time()
        serial.run(self.parts, lambda: time.perf_counter() < start_s + seconds)
        done = getattr(clock, self._count) - start
        self.wall.append(done / (time.perf_counter() - start_s))
        self.processor.append(done / (time.process_time() - processor_s))


def compare(sides: dict[str, LoopParts], count: str, seconds: float, repeats: int) -> Ratios:
    """Advance all sides in turn; return the median ratios of the others over the first."""
    with contextlib.ExitStack() as closing:
        for parts in sides.values():
            closing.callback(parts.close)
        made = {name: Side(parts, count) for name, parts in sides.items()}
        for _ in range(repeats):
            for side in made.values():
                side.advance(seconds)
    base, *others = made
    ratios: Ratios = {}
    for name in others:
        for clock in ("wall", "processor"):
            pairs = zip(getattr(made[name], clock), getattr(made[base], clock), strict=True)
            each = sorted(ours / theirs for ours, theirs in pairs)
            quarter = len(each) // 4
            ratios[f"{name}_{clock}"] = [
                round(each[i], 3) for i in (len(each) // 2, quarter, -1 - quarter)
            ]
    return ratios


def recording_cost(env: str, folder: Path, seconds: float, repeats: int) -> Ratios:
    """Return env steps/s with recording over those without.

    Chunks are small here, so that even short slices include their share of writing.
    """
    recorder.MOST_CHUNK_ROWS = 64
    configs = {"plain": online_config(env), "recorded": online_config(env, str(folder / env))}
    sides = {name: serial.build(Setup(one, FaultLog())) for name, one in configs.items()}
    return compare(sides, "env_steps", seconds, repeats)


def record_rows(env: str, url: str, rows: int) -> Dataset:
    """Record random play, without learning."""
    config = online_config(
        env, url, learning_starts=rows, exploration_initial_eps=1.0, exploration_final_eps=1.0
    )
    with contextlib.closing(serial.build(Setup(config, FaultLog()))) as parts:
        serial.run(parts, lambda: parts.clock.env_steps < rows)
    return Dataset(url)


def offline_parts(env: str, url: str, memory_mb: int) -> LoopParts:
    fields = {"data": url, "data_memory_mb": memory_mb, "steps": 10**9}
    config = offline.with_dataset(resolve(env, "dqn", fields=fields)[0])
    return offline.build(Setup(config, FaultLog()))


def with_ring(env: str, url: str) -> LoopParts:
    """Return the parts of an offline run that samples from a replay ring with the same rows."""
    parts, dataset = offline_parts(env, url, 4096), Dataset(url)
    config = parts.config.replace(buffer_size=dataset.manifest.rows)
    ring = make_ring(config, dataset.spec, Placement.of(config, dataset.spec, False), 0)
    for group in read_groups(dataset):
        columns = (group.obs.copy(), group.action.astype("int64"), group.reward.copy(), group.flags)
        ring.extend(Block(*(torch.from_numpy(column).unsqueeze(1) for column in columns)))
    parts.learner._memory = ring
    return parts


def reading_rates(
    env: str, dataset: Dataset, seconds: float, repeats: int, window_mb: int
) -> Ratios:
    """Return updates/s from a dataset over those from the ring: in one window, and in several."""
    sides = {
        "ring": with_ring(env, dataset.url),
        "whole": offline_parts(env, dataset.url, 4096),
        "windows": offline_parts(env, dataset.url, window_mb),
    }
    assert len(sides["windows"].memory._plan) > 1, "the dataset fits; raise --rows"
    return compare(sides, "updates", seconds, repeats)


def memory_kib(name: str) -> int:
    """Return VmRSS, the memory of this process, or VmHWM, its peak.

    Not ``getrusage``, whose peak is that of the process that started this one.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))


def read_epoch(url: str, memory_mb: int) -> dict[str, float]:
    """Read one epoch; return by how much the peak of this process's memory grew, in MiB."""
    dataset = Dataset(url)
    with tempfile.TemporaryDirectory() as folder:  # what any reading takes: imports, threads
        writer = Writer(folder, dataset.manifest.origin, "0")
        writer.add(next(read_groups(dataset)).take(slice(0, 64)))
        writer.close()
        few = DatasetMemory(Dataset(folder), 1, 0.99, 10**9, 2, 0, HOST, lambda reward: reward)
        few.sample(32, 0.0)
        few.close()
    before = memory_kib("VmRSS")
    memory = DatasetMemory(dataset, 1, 0.99, memory_mb * MIB, 2, 0, HOST, lambda reward: reward)
    windows = len(memory._plan)
    left = dataset.manifest.transitions
    while left:
        left -= len(memory.sample(min(32, left), 0.0))
    memory.close()
    return {"windows": windows, "grown_mib": round((memory_kib("VmHWM") - before) / 1024, 1)}


def repeat_rows(dataset: Dataset, url: str, times: int) -> Dataset:
    """Write a larger dataset: the same rows, several times."""
    writer = Writer(url, dataset.manifest.origin, "0")
    for _ in range(times):
        for group in read_groups(dataset):
            cuts = np.flatnonzero(np.diff(group.episode)) + 1
            for start, stop in zip([0, *cuts], [*cuts, len(group.episode)], strict=True):
                writer.add(group.take(slice(start, stop)))
    writer.close()
    return Dataset(url)


def peak_memory(dataset: Dataset) -> dict[str, float]:
    """Return the peak growth of a process that may use a tenth of a dataset's size, in MiB."""
    data_mib = dataset.manifest.rows * dataset_memory.row_bytes(dataset.spec) / MIB
    memory_mb = int(data_mib / 10)
    command = [sys.executable, __file__, "--read", dataset.url, "--memory-mb", str(memory_mb)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    return {"data_mib": round(data_mib), "cap_mib": memory_mb, **json.loads(done.stdout)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--rows", type=int, default=60_000)
    parser.add_argument(
        "--copies", type=int, default=0, help="copies of the rows to read in a tenth"
    )
    parser.add_argument("--envs", nargs="*", default=list(ENVS))
    parser.add_argument("--read", help=argparse.SUPPRESS)
    parser.add_argument("--memory-mb", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.read:
        print(json.dumps(read_epoch(options.read, options.memory_mb)))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for env in options.envs:
            costs = recording_cost(env, folder, options.seconds, options.repeats)
            dataset = record_rows(env, str(folder / f"{env}-data"), options.rows)
            per_row = dataset_memory.row_bytes(dataset.spec) + 16
            # A third of the dataset in memory: two windows of a sixth each, and what is reserved.
            third = dataset.manifest.rows * per_row // 3
            window_mb = (third + dataset_memory.RESERVED_BYTES) // MIB + 1
            rates = reading_rates(env, dataset, options.seconds, options.repeats, window_mb)
            print(json.dumps({"env": env, **costs, **rates}), flush=True)
            if options.copies and dataset.spec.obs_dtype == "uint8":  # rows of numbers are small
                large = repeat_rows(dataset, f"{dataset.url}-large", options.copies)
                print(json.dumps({"env": env, **peak_memory(large)}), flush=True)


if __name__ == "__main__":
    main()
