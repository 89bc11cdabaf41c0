"""The all-reduce engine: what a second rank gains, and what an all-reduce costs.

    python benchmarks/all_reduce.py                   rate and cost (five minutes on two slow cores)
    python benchmarks/all_reduce.py --rows rate --workers 2 --rounds 3
    python benchmarks/all_reduce.py --rows cost
    python benchmarks/all_reduce.py --rows learn --seeds 3

Prints ratios. `rate`: env steps per second of Pong with one update of 32 per 256 steps, from the
first update on; the variants take turns, so that a slow minute of the machine hits all. `cost`:
the updater's exchange of a gradient as large as that of the Nature CNN, beside a bare all-reduce
of the same bytes in the same processes. `learn`: CartPole with each compression until an
evaluation reaches 475, and the bytes that a rank sends per update beside those without it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import qfleet
from qfleet.agent.weights import FlatWeights
from qfleet.core.types import EnvSpec
from qfleet.engines.all_reduce.compression import Dense
from qfleet.engines.all_reduce.group import Group, connect
from qfleet.engines.all_reduce.mesh import Axis
from qfleet.engines.all_reduce.updater import AllReduceUpdater
from qfleet.engines.all_reduce.world import World, listen_locally
from qfleet.networks.factory import make_network
from qfleet.telemetry.timers import Timers

PONG: dict[str, Any] = {
    "preset": "none", "envs": 8, "train_freq": 256, "batch_size": 32, "buffer_size": 20_000,
    "learning_starts": 1024, "eval_freq": 0, "n_eval_episodes": 1, "eval_max_steps": 1,
    "checkpoint_freq": 10**9, "tensorboard": False, "log_interval": 512, "device": "cpu",
}  # fmt: skip


class Rate(qfleet.Callback):
    """Env steps per second from the first log after the first update to the last log."""

    def __init__(self) -> None:
        self._seen: list[tuple[float, int]] = []

    def on_log(self, run: Any, scalars: dict[str, float | None]) -> None:
        del scalars
        if run.parts.clock.updates > 1:
            self._seen.append((time.perf_counter(), run.parts.clock.env_steps))

    def per_s(self) -> float:
        (first_s, first), (last_s, last) = self._seen[0], self._seen[-1]
        return (last - first) / (last_s - first_s)


def rate(steps: int, **fields: Any) -> float:
    measured = Rate()
    with tempfile.TemporaryDirectory() as folder:
        told = PONG | {"steps": steps} | fields
        qfleet.train("ALE/Pong-v5", run_dir=Path(folder) / "run", callbacks=[measured], **told)
    return measured.per_s()


def compare_rates(rounds: int, steps: int, workers: int) -> dict[str, Any]:
    ranks = {"engine": "all-reduce", "threads": 1}
    variants = {
        "serial, default threads": {"engine": "serial"},
        "1 rank, 1 thread": ranks | {"workers": 1},
        f"{workers} ranks, 1 thread each": ranks | {"workers": workers},
    }
    rates: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, fields in variants.items():
            # One thread of the emulators' pool, too: a rank has one core.
            os.environ["LOCAL_WORLD_SIZE"] = str(
                os.cpu_count() if name.startswith("1") else workers
            )
            rates[name].append(rate(steps, **fields))
    medians = {name: statistics.median(values) for name, values in rates.items()}
    base = medians["1 rank, 1 thread"]
    for name, value in medians.items():
        print(f"{name:<28} {value:8.0f} steps/s  {value / base:5.2f}× one rank")
    return {"rates": rates, "ratios": {name: value / base for name, value in medians.items()}}


class _Nothing:
    def apply(self, learning_rate: Any, loss: Any = None) -> dict[str, float]:
        del learning_rate, loss
        return {}


def _exchange(rank: int, size: int, port: int, listener: int, rounds: int, out: Any) -> None:
    torch.set_num_threads(1)
    world = World(rank, size, rank, size, "127.0.0.1", port)
    store = connect(world, rank == 0, listener if rank == 0 else None)
    group = Group(world, 0, 60.0, store)
    group.connect(torch.device("cpu"))
    ranks = Axis(group, [range(size)])
    spec = EnvSpec("Pong", (4, 84, 84), "uint8", 6)
    config = qfleet.Config(network="nature")
    weights = FlatWeights(make_network(config, spec, torch.device("cpu"), 0))
    timers = Timers()
    updater = AllReduceUpdater(weights, _Nothing(), ranks, Dense(), 1 / size, timers)  # type: ignore[arg-type]
    times: dict[str, list[float]] = {"updater": [], "bare": []}
    for _ in range(rounds):
        weights.grad.normal_()
        for name in times:
            dist.barrier()
            began_s = time.perf_counter()
            if name == "bare":
                dist.all_reduce(weights.grad)
            else:
                updater.apply(1e-3)
            times[name].append(time.perf_counter() - began_s)
    if rank == 0:
        out.put((weights.grad.nbytes, times))
    dist.barrier()
    group.close()


def compare_costs(rounds: int, workers: int) -> dict[str, Any]:
    listener = listen_locally()
    context = mp.get_context("fork")
    out = context.Queue()
    given = (workers, listener.getsockname()[1], listener.fileno(), rounds, out)
    ranks = [context.Process(target=_exchange, args=(rank, *given)) for rank in range(workers)]
    for process in ranks:
        process.start()
    nbytes, times = out.get(timeout=300)
    for process in ranks:
        process.join(30)
    medians = {name: statistics.median(values[5:]) * 1e3 for name, values in times.items()}
    ratio = medians["updater"] / medians["bare"]
    print(
        f"all-reduce of {nbytes / 1e6:.2f} MB on {workers} ranks: {medians['updater']:.2f} ms in "
        f"the updater, {medians['bare']:.2f} ms bare: {ratio:.3f}×"
    )
    return {"bytes": nbytes, "ms": medians, "ratio": ratio}


COMPRESSIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "fp16": {"gradient_compression": "fp16"},
    "bf16": {"gradient_compression": "bf16"},
    "top-k, 10 %": {"gradient_compression": "top-k", "top_k_share": 0.1},
    "powersgd, rank 4": {"gradient_compression": "powersgd", "powersgd_rank": 4},
}


def compare_learning(seeds: int, workers: int, steps: int) -> dict[str, Any]:
    """Both ranks together have the 8 environments of the preset, so that it is the same task."""
    report: dict[str, Any] = {}
    for name, fields in COMPRESSIONS.items():
        results = []
        for seed in range(seeds):
            with tempfile.TemporaryDirectory() as folder:
                trained = qfleet.train(
                    "CartPole-v1", run_dir=Path(folder) / "run", seed=seed, threads=1, steps=steps,
                    engine="all-reduce", workers=workers, envs=8 // workers, eval_freq=2500,
                    n_eval_episodes=20, target_return=475.0, tensorboard=False, **fields,
                )  # fmt: skip
            results.append(trained.result)
        sent = [r.communication["bytes_sent"] / r.updates for r in results]
        report[name] = {
            "best": [r.best_eval_return for r in results],
            "env_steps": [r.env_steps for r in results],
            "bytes_per_update": sent[0],
        }
        share = sent[0] / report["none"]["bytes_per_update"]
        steps_to = [r.env_steps for r in results if r.stopped_by == "target_return"]
        print(
            f"{name:<18} 475 reached by {len(steps_to)} of {seeds} seeds, after {steps_to} steps; "
            f"{sent[0]:8.0f} bytes per update, {share:.3f} of dense",
            flush=True,
        )
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--rows", nargs="+", default=["rate", "cost"], choices=["rate", "cost", "learn"]
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12_000, help="env steps of each run")
    parser.add_argument("--seeds", type=int, default=3, help="of learn")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    report: dict[str, Any] = {}
    if "cost" in options.rows:  # first: it forks, before torch has threads
        report["cost"] = compare_costs(100 * options.rounds, options.workers)
    if "rate" in options.rows:
        report["rate"] = compare_rates(options.rounds, options.steps, options.workers)
    if "learn" in options.rows:
        report["learn"] = compare_learning(options.seeds, options.workers, 100_000)
    if options.json:
        options.json.write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
