"""``qfleet lab speedup``: train with several numbers of workers and compare the rates."""

from __future__ import annotations

import json
import math
import tempfile
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from qfleet.cli.parsing import parse
from qfleet.config.config import OPTIONS, Update, check_fields, parse_json_object
from qfleet.config.presets import resolve
from qfleet.config.validation import validate
from qfleet.core.cores import usable_cores
from qfleet.core.errors import ConfigError
from qfleet.engines.cluster.ray_cluster import LEAST_BYTES_WITH_TORCH
from qfleet.envs.short_names import full_id
from qfleet.lab.speedup import (
    HEADER,
    UNMEASURED,
    Case,
    Point,
    Train,
    check_sweep,
    make_cases,
    parse_updates,
    parse_workers,
    row,
    sweep,
    write_csv,
)
from qfleet.lab.speedup_plot import draw_speedup
from qfleet.telemetry.runs import EVAL_RETURN, read_metrics

DESCRIPTION = """Train with several numbers of workers, and report speed-up and efficiency.

All runs have the same number of env steps per worker. Rates exclude the start of processes, and are
compared with one worker of the same update. With --step-latency-s, workers wait for their
environments most of the time, so that many workers fit on few cores.

Examples:
  qfleet lab speedup CartPole-v1 --step-latency-s 0.005
  qfleet lab speedup CartPole-v1 --update async --step-latency-s 0.005 --workers 1,2,4,8,16,32
  qfleet lab speedup CartPole-v1 --updates sync,async --target-return 200 --steps-per-worker 8000
  qfleet lab speedup CartPole-v1 --updates sync,async,ssp --step-latency-s 0.005 --straggler 4
  qfleet lab speedup CartPole-v1 --fields '{"train_freq": 32, "envs": 2}'
"""

OWN = ("engine", "seed", "step_latency_s", "straggler")
"""Fields that are options of this command under the same name."""
SWEPT = {
    "steps": "--steps-per-worker",
    "workers": "--workers",
    "update": "--updates",
    "target_return": "--target-return",
    "env": "the argument ENV",
    "algo": "--algo",
    **{name: "--" + name.replace("_", "-") for name in OWN},
}
"""Fields that must not be among ``--fields``, and the option that sets each instead."""


@dataclass(frozen=True)
class SpeedupOptions:
    """Options of the training, the workers and the output."""

    env: Annotated[str, tyro.conf.Positional] = "CartPole-v1"
    """Environment, as for qfleet train."""
    workers: str = "1,2,4,8"
    """Numbers of workers, separated by commas; the first must be 1."""
    updates: Annotated[str, tyro.conf.arg(aliases=("--update",))] = "async"
    """Update rules to compare, separated by commas (see --update of qfleet train)."""
    steps_per_worker: int = 2000
    """Env steps per worker in every run."""
    target_return: float | None = None
    """Run every case until an evaluation reaches this return, at most for the env steps of all
    workers of the largest case, and report the time; --fields sets eval_freq (default: a twentieth)
    and n_eval_episodes (default: 5)."""
    step_latency_s: float = 0.0
    """Latency added to every step of the environments, in seconds."""
    straggler: float = 1.0
    """If above 1, also run every case with the latency of worker 0 multiplied by this factor."""
    repeats: int = 1
    """Runs per case; the one with the median rate is reported."""
    engine: Literal["parameter-server", "actors"] = "parameter-server"
    """Engine that runs the workers."""
    algo: str | None = None
    """Algorithm, a row of the algorithm table."""
    preset: str | None = None
    """Recipe to start from; default: the one that suits the environment."""
    fields: str = "{}"
    """Other fields of the configuration, as a JSON object."""
    seed: int = 0
    """Seed of every run."""
    out: Path = Path("runs/lab/speedup")
    """Folder for speedup.png, speedup.csv and result.json."""
    json_: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print machine-readable output only."""


def run(argv: list[str], train: Callable[..., Any] | None = None) -> None:
    """Run the command; tests pass ``train`` to replace ``qfleet.train``."""
    options = parse(SpeedupOptions, argv, "lab speedup", DESCRIPTION)
    options = replace(options, env=full_id(options.env))
    updates = parse_updates(options.updates, typing.get_args(Update))
    cases = make_cases(updates, parse_workers(options.workers), options.straggler)
    if options.straggler > 1 and options.step_latency_s <= 0:
        raise ConfigError("--straggler needs a step latency above 0; set --step-latency-s too")
    check_sweep(options.steps_per_worker, options.repeats)
    fields = _fields(options, updates, max(case.workers for case in cases))
    for case in cases:  # validate all runs first, so that none is refused after hours
        of_run = _fields_for(fields, case.fields(options.steps_per_worker))
        validate(resolve(options.env, options.algo, options.preset, fields=of_run)[0])
    cases, left_out = _that_fit(cases, fields)
    points: list[Point] = []
    with tempfile.TemporaryDirectory(prefix="qfleet-speedup-") as folder:
        trainer = _trainer(options, fields, Path(folder), train)
        if not options.json_:
            print("\n".join([*left_out, HEADER]))
        try:
            for point in sweep(cases, options.steps_per_worker, options.repeats, trainer):
                points.append(point)
                if not options.json_:
                    print(row(point), flush=True)
        finally:
            # The runs may have taken hours: save the points so far, whatever stopped the rest.
            report = _write(options, fields, points, left_out) if points else {}
    if options.json_:
        print(json.dumps(report, allow_nan=False))
    else:
        print(f"\npicture    {report['picture']}\nfigures    {report['csv']}")


def _that_fit(cases: list[Case], fields: Mapping[str, Any]) -> tuple[list[Case], list[str]]:
    """Return the cases that this machine has memory for, and a line about the others."""
    # Not above: it imports torch, for which invalid options need not wait.
    from qfleet.memory.sizing import available_bytes

    most = max(1, available_bytes() // LEAST_BYTES_WITH_TORCH - 1)  # and a server
    beyond = sorted({case.workers for case in cases if case.workers > most})
    if fields.get("address") or not beyond:
        return cases, []
    numbers = ", ".join(map(str, beyond))
    line = f"left out: {numbers} workers, because the memory has room for {most}"
    return [case for case in cases if case.workers <= most], [line]


def _fields(options: SpeedupOptions, updates: Sequence[str], most_workers: int) -> dict[str, Any]:
    """Return the fields that are the same in all runs: with a target return, also the steps."""
    given = check_fields(parse_json_object("--fields", options.fields))
    for name in given:
        if name in SWEPT:
            raise ConfigError(f"fields must not contain {name}; set it with {SWEPT[name]}")
        if not any(OPTIONS[name].used_with(update) for update in updates):
            raise ConfigError(f"fields must not contain {name}; {options.updates} ignores it")
    own = {name: getattr(options, name) for name in OWN if name != "straggler"}
    until: dict[str, Any] = {}
    if options.target_return is not None:
        steps = most_workers * options.steps_per_worker
        until = {"steps": steps, "eval_freq": max(1, steps // 20), "n_eval_episodes": 5}
        own["target_return"] = options.target_return
    return {**UNMEASURED, **until, **given, **own}


def _trainer(
    options: SpeedupOptions,
    fields: Mapping[str, Any],
    folder: Path,
    train: Callable[..., Any] | None,
) -> Train:
    if train is None:
        # Imported here, so that invalid options are reported without waiting for torch.
        from qfleet.training.api import train
    assert train is not None
    number = 0

    def run_once(own: dict[str, Any]) -> Mapping[str, Any] | None:
        nonlocal number
        number += 1
        run_dir = folder / str(number)
        trained = train(
            options.env,
            algo=options.algo,
            preset=options.preset,
            run_dir=run_dir,
            **_fields_for(fields, own),
        )
        if trained.interrupted_by is not None:
            raise KeyboardInterrupt
        fleet: Mapping[str, Any] | None = trained.result.fleet
        steps = None
        if trained.result.stopped_by == "target_return":
            steps = _steps_to_return(run_dir, options.target_return or 0.0)
        return fleet and {**fleet, "steps_to_return": steps}

    return run_once


def _steps_to_return(run_dir: Path, target: float) -> int | None:
    """Return the env steps of the first evaluation that reached the target."""
    rows = read_metrics(run_dir / "metrics.jsonl")
    return next(
        (row["env_steps"] for row in rows if row.get(EVAL_RETURN, -math.inf) >= target), None
    )


def _fields_for(fields: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return all fields of one run, without those that its update does not use.

    ``backup_workers`` and ``hybrid_workers`` are limited to what the number of workers allows,
    because the baseline has a single worker.
    """
    used = {name: v for name, v in fields.items() if OPTIONS[name].used_with(own["update"])}
    most = {"backup_workers": own["workers"] - 1, "hybrid_workers": own["workers"]}
    used |= {name: min(used[name], most[name]) for name in most if name in used}
    steps = used.get("steps", own["steps"])
    return {**used, **own, "steps": steps, "log_interval": steps}


def _write(
    options: SpeedupOptions,
    fields: Mapping[str, Any],
    points: list[Point],
    left_out: list[str],
) -> dict[str, Any]:
    latency = f", {options.step_latency_s * 1e3:g} ms a step" if options.step_latency_s else ""
    title = f"{options.env}, {options.engine}{latency}"
    report = {
        "env": options.env,
        "steps_per_worker": options.steps_per_worker,
        "repeats": options.repeats,
        "cores": usable_cores(),
        "algo": options.algo,
        "preset": options.preset,
        "fields": dict(fields),
        "left_out": left_out,
        "points": [asdict(point) for point in points],
        "csv": str(write_csv(points, options.out / "speedup.csv")),
        "picture": str(draw_speedup(points, title, options.out / "speedup.png")),
    }
    text = json.dumps(report, allow_nan=False, indent=2)
    (options.out / "result.json").write_text(text + "\n", encoding="utf-8")
    return report
