"""Speed-up with the number of workers: the runs to make, and their results.

``sweep`` calls a function that trains, for each number of workers and each update rule, and yields
a ``Point`` per case. The number of env steps per worker is the same in all runs (weak scaling), and
rates are compared:

    speed-up = rate(m) / rate(1) = wall(1) / wall(m) for the same work
    efficiency = speed-up / m

If all messages of one worker also take their time with m workers, and computing is divided:

    speed-up = (computing + communicating) / (computing / m + communicating)

The rate is ``env_steps_per_s`` of ``fleet`` in ``result.json``, which excludes starting processes,
evaluations and checkpoints.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeAlias

from qfleet.core.errors import ConfigError, require
from qfleet.telemetry.formatting import finite
from qfleet.telemetry.timers import KINDS

Train: TypeAlias = Callable[[dict[str, Any]], Mapping[str, Any] | None]
"""A function that trains with the given fields and returns ``fleet`` of the run's result, with
``steps_to_return``: the env steps of the evaluation that reached the target return, if any."""

CURVE = (1, 2, 4, 8, 16, 32)
"""Numbers of workers for which a speed-up is usually drawn."""

UNMEASURED: dict[str, Any] = {
    "learning_starts": 0,
    "eval_freq": 0,
    "n_eval_episodes": 1,
    "checkpoint_freq": 10**9,
    "tensorboard": False,
}
"""Fields with which a run learns from the start, as in most of a long run, and does little else."""


@dataclass(frozen=True)
class Case:
    """The settings of one run."""

    update: str
    straggler: float
    """Factor on the step latency of worker 0; 1: no straggler."""
    workers: int

    def fields(self, steps_per_worker: int) -> dict[str, Any]:
        """Return the configuration fields in which this run differs from the others."""
        return {**asdict(self), "steps": self.workers * steps_per_worker}


@dataclass(frozen=True)
class Point(Case):
    """The result of one run."""

    env_steps: int
    wall_s: float
    """Wall time of the workers, without starting processes, in seconds."""
    env_steps_per_s: float
    speed_up: float
    efficiency: float
    computing: float | None
    communicating: float | None
    waiting: float | None
    staleness: float | None
    """Mean age of the weights, in updates."""
    processor_s: float | None
    """CPU time of all processes, in seconds."""
    return_s: float | None = None
    """Wall time of the workers up to the evaluation that reached the target return."""
    return_steps: int | None = None
    """Env steps up to that evaluation. Workers go on while it is played."""


def modelled(workers: int, computing: float, communicating: float, rounds: bool = False) -> float:
    """Return the speed-up if only computing is divided; both times are those of one worker.

    ``rounds``: all workers send in every round, so that messages take m times as long.
    """
    messages = communicating * (workers if rounds else 1)
    return (computing + communicating) / (computing / workers + messages)


def parse_workers(text: str, has_baseline: bool = True) -> list[int]:
    """Parse ``1,2,4`` into sorted numbers; the baseline of the speed-up is 1 and must be first."""
    try:
        workers = sorted({int(word) for word in text.split(",")})
    except ValueError:
        raise ConfigError(f"workers '{text}' must be comma-separated numbers, e.g. 1,2,4") from None
    if has_baseline and workers[0] != 1:
        raise ConfigError(f"workers '{text}' must begin with 1, the baseline of the speed-up")
    return workers


def parse_updates(text: str, known: Sequence[str]) -> list[str]:
    """Parse ``sync,async`` into distinct names."""
    names = list(dict.fromkeys(word.strip() for word in text.split(",")))
    for name in names:
        if name not in known:
            raise ConfigError(f"unknown update '{name}'; choose from {','.join(known)}")
    return names


def make_cases(updates: Sequence[str], workers: Sequence[int], straggler: float) -> list[Case]:
    """Return the runs in order: for each update first the single worker, which is its baseline.

    With a straggler, every number of workers is run without and with it. A single worker is never
    a straggler, because no other worker waits for it.
    """
    require(straggler >= 1, "straggler", straggler, "at least 1")
    return [
        Case(update, slowness, count)
        for update in updates
        for slowness in sorted({1.0, straggler})
        for count in workers
        if slowness == 1 or count > 1
    ]


def check_sweep(steps_per_worker: int, repeats: int) -> None:
    """Raise ConfigError unless both numbers are at least 1."""
    require(steps_per_worker >= 1, "steps_per_worker", steps_per_worker, "at least 1")
    require(repeats >= 1, "repeats", repeats, "at least 1")


def sweep(
    cases: Sequence[Case], steps_per_worker: int, repeats: int, train: Train
) -> Iterator[Point]:
    """Run all cases; of a case's ``repeats`` runs, yield the one with the median rate.

    If some reached a target return, it is the one with the median time to it.
    """
    check_sweep(steps_per_worker, repeats)
    baselines: dict[str, float] = {}
    for case in cases:
        changes = case.fields(steps_per_worker)
        runs = sorted(
            (_rated(train(changes), case) for _ in range(repeats)),
            key=lambda run: (_return_s(*run) or math.inf, run[0]),
        )
        rate, fleet = runs[(len(runs) - 1) // 2]
        yield _point(case, rate, baselines.setdefault(case.update, rate), fleet)


def _return_s(rate: float, fleet: Mapping[str, Any]) -> float | None:
    """Return the seconds to the target return; None if there is none, or it was not reached."""
    steps = fleet.get("steps_to_return")
    return steps / rate if steps else None


def _rated(fleet: Mapping[str, Any] | None, case: Case) -> tuple[float, Mapping[str, Any]]:
    if fleet is None:
        raise ConfigError("this engine has no workers; use --engine parameter-server or actors")
    rate = finite(fleet["env_steps_per_s"])
    if rate is None or rate <= 0:
        raise ConfigError(
            f"{case.workers} workers made no step ({case.update}); raise --steps-per-worker"
        )
    return rate, fleet


def _point(case: Case, rate: float, baseline: float, fleet: Mapping[str, Any]) -> Point:
    speed_up = rate / baseline
    computing, communicating, waiting = (finite(fleet["shares"][kind]) for kind in KINDS)
    return Point(
        **asdict(case),
        env_steps=fleet["env_steps"],
        wall_s=fleet["env_steps"] / rate,
        env_steps_per_s=rate,
        speed_up=speed_up,
        efficiency=speed_up / case.workers,
        computing=computing,
        communicating=communicating,
        waiting=waiting,
        staleness=finite(fleet["staleness"]["mean"]),
        processor_s=finite(fleet["processor_s"]),
        return_s=_return_s(rate, fleet),
        return_steps=fleet.get("steps_to_return"),
    )


HEADER = (
    f"{'update':<11}{'straggler':>9}{'workers':>9}{'wall s':>9}{'steps/s':>10}{'speed-up':>10}"
    f"{'of ideal':>10}{'computing':>11}{'messages':>10}{'waiting':>9}{'staleness':>11}"
    f"{'steps':>11}{'return s':>10}"
)


def row(point: Point) -> str:
    """Return the point as a line below ``HEADER``."""
    straggler = f"{point.straggler:g}×" if point.straggler > 1 else "–"
    shares = (point.computing, point.communicating, point.waiting)
    computing, communicating, waiting = ("–" if s is None else f"{s:.0%}" for s in shares)
    staleness, return_s = (
        "–" if number is None else f"{number:.2f}" for number in (point.staleness, point.return_s)
    )
    return (
        f"{point.update:<11}{straggler:>9}{point.workers:>9}{point.wall_s:>9.2f}"
        f"{point.env_steps_per_s:>10,.0f}{point.speed_up:>10.2f}{point.efficiency:>10.0%}"
        f"{computing:>11}{communicating:>10}{waiting:>9}{staleness:>11}"
        f"{point.return_steps or point.env_steps:>11,}{return_s:>10}"
    )


def write_csv(points: Sequence[Point], path: Path) -> Path:
    """Write a line per point; a cell is empty if its figure does not apply. Return ``path``."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, [field.name for field in fields(Point)])
            writer.writeheader()
            writer.writerows(asdict(point) for point in points)
    except OSError as error:
        raise ConfigError(f"cannot write figures '{path}': {error.strerror}") from None
    return path
