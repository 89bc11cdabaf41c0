"""The parameter-server engine beside what it is made of.

    python benchmarks/parameter_server.py --rows throughput       pushes beside bare calls of Ray
    python benchmarks/parameter_server.py --rows efficiency       1 to 16 workers, a step takes 5 ms
    python benchmarks/parameter_server.py --rows straggler        sync, ssp, hybrid, async; one slow
    python benchmarks/parameter_server.py --rows draw             docs/images/straggler.png
    python benchmarks/parameter_server.py --rows solve --seeds 5  CartPole to 475 by every update
    python benchmarks/parameter_server.py --rows a3c --seeds 5    the same by A3C
    python benchmarks/parameter_server.py --rows kills --seeds 3  two minutes of SIGKILL

Rates are ratios against a bare call, or one worker, of the same run. ``draw`` reads
benchmarks/data/straggler.csv; the ``speedup.csv`` of row ``straggler`` can replace it.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import functools
import itertools
import json
import math
import os
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import qfleet
from qfleet.agent.evaluation import Evaluation
from qfleet.cli import lab_speedup
from qfleet.config.config import Config
from qfleet.engines.cluster.ray_cluster import Cluster, from_inside, open_cluster
from qfleet.engines.parameter_server.client import RemoteLine, Servers
from qfleet.engines.parameter_server.server import RemoteServer, calls_at_once
from qfleet.engines.parameter_server.wire import INLINE_VECTOR_BYTES
from qfleet.lab.speedup import Point
from qfleet.lab.speedup_plot import draw_speedup
from qfleet.telemetry.timers import Timers
from qfleet.training.callbacks import Callback
from qfleet.training.run import Run

SIZES = {"CartPole's MLP": 4_610, "an MLP of 256 × 256": 67_586, "Nature's CNN": 1_687_206}
CLIENTS = (1, 4)
UPDATES = ("sync", "async", "ssp", "hybrid", "easgd", "local-sgd", "admm")
LATENCY_S = "0.005"
WAITING = {"envs": 1, "train_freq": 32, "gradient_steps": 1, "batch_size": 32, "net_arch": [64, 64]}
"""Of the rows with a latency: workers wait for their environments nine tenths of their time."""
STRAGGLER_CSV = Path(__file__).parent / "data" / "straggler.csv"
STRAGGLER_PNG = Path(__file__).parents[1] / "docs" / "images" / "straggler.png"
KILLING_S = 120.0
SOLVED = 475.0


class Bare:
    """What a call costs that moves the same bytes and does nothing else."""

    def __init__(self, size: int) -> None:
        self._answer = np.zeros(size, dtype=np.float32)

    def take(self, gradient: np.ndarray) -> np.ndarray:
        assert gradient.size == self._answer.size
        return self._answer


class Stepping(Bare):
    """The same, and the optimiser's step, which is the work that a server is there for."""

    def __init__(self, size: int) -> None:
        from qfleet.agent.updaters.optimisers import make_optimiser

        super().__init__(size)
        self._weights = torch.zeros(size)
        self._optimiser = make_optimiser("adam", self._weights, 1e-8)

    def take(self, gradient: np.ndarray) -> np.ndarray:
        self._optimiser.step(self._weights, torch.from_numpy(gradient), 1e-3, None)
        return self._weights.numpy().copy()


class Client:
    """A worker as the server sees it: calls one after another, each waited for."""

    def __init__(self, worker: int, size: int, server: Any, actors: dict[str, Any]) -> None:
        cluster = from_inside()
        torch.set_num_threads(1)
        gradient, into = torch.randn(size), torch.zeros(size)
        servers = Servers(worker, size, [RemoteLine(cluster, server, 0)], Timers())
        servers.join(into)

        def call(actor: Any) -> None:
            answer = cluster.get(actor.take.remote(gradient.numpy()), "an actor")
            into.copy_(torch.from_numpy(answer))

        self._acts: dict[str, Callable[[], None]] = {
            **{kind: functools.partial(call, actor) for kind, actor in actors.items()},
            "push": lambda: servers.push(gradient, 1e-3, None, 1.0, into),
        }

    def act(self, kind: str, calls: int) -> None:
        for _ in range(calls):
            self._acts[kind]()


def throughput(rounds: int, calls: int) -> dict[str, Any]:
    """One client shows what a call takes, several how many calls a server can answer."""
    found: dict[str, Any] = {}
    with open_cluster(3 + max(CLIENTS), inline_bytes=INLINE_VECTOR_BYTES) as cluster:
        for (name, size), clients in itertools.product(SIZES.items(), CLIENTS):
            each = _seconds(cluster, size, clients, rounds, calls)
            over = {kind: each["push"] / each[kind] - 1 for kind in each if kind != "push"}
            megabytes = 2 * 4 * size / 1e6 / each["push"]
            found[f"{name}, {clients}"] = {**each, "over": over, "MB_per_s": megabytes}
            print(
                f"{name:<20} {clients} at once {1 / each['push']:8,.0f} pushes/s "
                f"{megabytes:8.1f} MB/s   {over['bare call']:+.0%} over a bare call, "
                f"{over['bare call that steps']:+.0%} over one that steps",
                flush=True,
            )
    return found


def _seconds(
    cluster: Cluster, size: int, clients: int, rounds: int, calls: int
) -> dict[str, float]:
    """Per call of each kind, by all clients, in the median of rounds in which kinds take turns."""
    config = Config(engine="parameter-server", update="async", workers=clients)
    weights = np.zeros(size, dtype=np.float32)
    server = cluster.spawn(RemoteServer, config, weights, at_once=calls_at_once(config))
    kinds = {"bare call": Bare, "bare call that steps": Stepping}
    actors = {name: cluster.spawn(kind, size) for name, kind in kinds.items()}
    callers = [cluster.spawn(Client, worker, size, server, actors) for worker in range(clients)]
    seconds: dict[str, list[float]] = {kind: [] for kind in (*kinds, "push")}
    for _ in range(rounds + 1):  # the first is not counted
        for kind, taken in seconds.items():
            start_s = time.perf_counter()
            for done in [caller.act.remote(kind, calls // clients) for caller in callers]:
                cluster.get(done, "a client")
            taken.append((time.perf_counter() - start_s) / (calls // clients * clients))
    for actor in (server, *actors.values(), *callers):
        cluster.stop(actor)
    return {kind: statistics.median(values[1:]) for kind, values in seconds.items()}


def speedup(updates: str, workers: str, *more: str) -> None:
    """By the lab's own verb, which draws the figure."""
    lab_speedup.run(
        [
            "--updates",
            updates,
            "--workers",
            workers,
            "--step-latency-s",
            LATENCY_S,
            "--fields",
            json.dumps(WAITING),
            *more,
        ]
    )


def draw_straggler() -> None:
    """Draw the stored speed-ups; what the plot does not show need not be stored."""
    unknown: dict[str, Any] = {field.name: math.nan for field in dataclasses.fields(Point)}
    points = []
    with STRAGGLER_CSV.open(newline="") as file:
        for row in csv.DictReader(file):
            stored = {"update": row["update"], "workers": int(row["workers"])}
            shown = {name: float(row[name]) for name in ("straggler", "speed_up")}
            points.append(Point(**unknown | stored | shown))
    draw_speedup(points, "CartPole-v1, parameter-server, 5 ms a step", STRAGGLER_PNG)


def solve(
    algo: str | None, updates: tuple[str, ...], seeds: int, fields: dict[str, Any]
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    name = algo or "n-step-dqn"
    for update in updates:
        steps = []
        for seed in range(seeds):
            with tempfile.TemporaryDirectory() as folder:
                result = qfleet.train(
                    "CartPole-v1",
                    algo=algo,
                    engine="parameter-server",
                    update=update,
                    seed=seed,
                    run_dir=Path(folder) / "run",
                    target_return=SOLVED,
                    device="cpu",
                    n_eval_episodes=20,
                    tensorboard=False,
                    checkpoint_freq=10**9,
                    **fields,
                ).result
            # The last evaluation may reach it when the steps are up.
            reached = (result.best_eval_return or 0.0) >= SOLVED
            steps.append(result.env_steps if reached else None)
            print(
                f"{name} {update:<10} seed {seed}: "
                + (f"475 after {result.env_steps:,} steps" if reached else
                   f"not reached, best {result.best_eval_return:.0f}")
                + f", {result.wall_s:.0f} s",
                flush=True,
            )  # fmt: skip
        solved = [value for value in steps if value is not None]
        found[update] = steps
        middle = f", median {statistics.median(solved):,.0f} steps" if solved else ""
        print(f"{name} {update}: {len(solved)} of {seeds}{middle}", flush=True)
    return found


class Killer(Callback):
    """Kills a worker or a server every few seconds, until the time is up.

    Ends the run at the first evaluation after that which is good enough. With ``spares`` nobody is
    killed: the same run left alone, to compare with.
    """

    def __init__(self, seconds: float, seed: int, spares: bool) -> None:
        self._random = random.Random(seed)
        self._seconds, self._spares = seconds, spares
        self._until_s = float("inf")
        self._next_s = 0.0
        self.killed: list[str] = []
        self.evaluations: list[tuple[int, float]] = []
        self.has_reached = False

    def on_log(self, run: Run, scalars: dict[str, float | None]) -> bool | None:
        del scalars
        now_s = time.monotonic()
        there = run.parts.collector.pids()
        if self._until_s == float("inf"):
            self._until_s = now_s + self._seconds
        if not self._spares and self._next_s <= now_s < self._until_s and there:
            who = self._random.choice(sorted(there))
            os.kill(there[who], signal.SIGKILL)
            self.killed.append(who)
            self._next_s = now_s + self._random.uniform(3.0, 9.0)
        return None

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self._until_s

    def on_evaluation(self, run: Run, evaluation: Evaluation) -> bool | None:
        self.evaluations.append((run.parts.clock.env_steps, evaluation.mean))
        self.has_reached |= self.is_over and evaluation.mean >= SOLVED
        return False if self.has_reached else None


def kills(algo: str | None, seeds: int, fields: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        kill_one(algo, seed, spares, fields) for seed in range(seeds) for spares in (False, True)
    ]


def kill_one(algo: str | None, seed: int, spares: bool, fields: dict[str, Any]) -> dict[str, Any]:
    killer = Killer(KILLING_S, seed, spares)
    with tempfile.TemporaryDirectory() as folder:
        result = qfleet.train(
            "CartPole-v1", algo=algo, engine="parameter-server", seed=seed,
            run_dir=Path(folder) / "run", callbacks=[killer], device="cpu", tensorboard=False,
            checkpoint_freq=10**9,
            **{"workers": 3, "servers": 2, "snapshot_s": 2.0, "log_interval": 100,
               "n_eval_episodes": 20, **fields},
        ).result  # fmt: skip
    assert result.fleet is not None
    what = "left alone" if spares else "killed " + (", ".join(killer.killed) or "nobody")
    over = "" if killer.is_over else f" (the {KILLING_S:.0f} s were not over: give it more steps)"
    print(
        f"seed {seed}: {what}\n"
        f"  {'reached' if killer.has_reached else 'DID NOT REACH'} {SOLVED:.0f}{over}, "
        f"{result.env_steps:,} steps, {result.wall_s:.0f} s; told: {result.faults}\n"
        "  evaluations " + " ".join(f"{at // 1000}k:{mean:.0f}" for at, mean in killer.evaluations)
    )
    for server in result.fleet["servers"]:
        print(
            f"  server {server['number']}: {server['applied']:,} gradients in its weights + "
            f"{server['lost']:,} told to be lost = {server['applied'] + server['lost']:,}; "
            f"{server['restores']} restores, {server['repeated']} repeated, "
            f"dropped {server['dropped']}, unknown {server['unknown']}",
            flush=True,
        )
    return {
        "seed": seed,
        "spares": spares,
        "reached": killer.has_reached,
        "killed": killer.killed,
        "faults": result.faults,
        "evaluations": killer.evaluations,
        "servers": result.fleet["servers"],
        "wall_s": result.wall_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="+", default=["throughput", "efficiency"])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--updates", nargs="+", default=list(UPDATES))
    parser.add_argument("--algo", help="of the rows solve and kills; the preset's if not said")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=100)
    parser.add_argument("--fields", default="{}", help="configuration fields, as JSON")
    parser.add_argument("--out", type=Path, default=Path("runs/lab"), help="for the figures")
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    fields = json.loads(options.fields)
    found: dict[str, Any] = {}
    for row in options.rows:
        if row == "throughput":
            found[row] = throughput(options.rounds, options.calls)
        elif row == "efficiency":
            speedup("async", "1,2,4,8,16", "--out", str(options.out / "efficiency"))
        elif row == "straggler":
            speedup(
                "sync,ssp,hybrid,async", "1,4", "--straggler", "4",
                "--out", str(options.out / "straggler"),
            )  # fmt: skip
        elif row == "draw":
            draw_straggler()
        elif row == "solve":
            found[row] = solve(options.algo, tuple(options.updates), options.seeds, fields)
        elif row == "a3c":
            found[row] = solve("a3c", ("async",), options.seeds, fields)
        elif row == "kills":
            found[row] = kills(options.algo, options.seeds, fields)
        else:
            raise SystemExit(f"row {row} is unknown")
        if options.json:
            options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
