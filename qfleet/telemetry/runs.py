"""Read run folders: configuration, result and metrics of a run, by its path or name.

Any file may be incomplete: the run may still be training, or may have been killed during a write.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qfleet.core.errors import ConfigError, UnknownNameError
from qfleet.core.files import read_text
from qfleet.core.urls import public_value
from qfleet.telemetry.formatting import finite

ROLLOUT_RETURN = "rollout/ep_rew_mean"
EVAL_RETURN = "eval/mean_reward"
UNFINISHED = "running or interrupted"
"""State of a run without a result of its newest steps."""
FINISHED = ("finished", "target_return", "patience")
"""States of runs that have ended by their own rules, not by a signal, a limit or an error."""

_NOT_COMPUTED = frozenset(
    ("seed", "device", "threads", "replay_dir", "env_timeout_s", "tensorboard", "track")
    + ("log_interval", "checkpoint_freq", "keep_checkpoints")
    + ("baseline", "price_per_cpu_hour", "price_per_gpu_hour")
)
"""Fields in which runs of one experiment may differ: they do not change what is computed."""


@dataclass
class RunData:
    """One run with one seed."""

    path: Path
    name: str
    """``<run>`` or ``<run>/seed-3``."""
    config: dict[str, Any]
    result: dict[str, Any] | None
    """None while the run is training, or after a crash."""
    metrics: list[dict[str, Any]]

    @property
    def env(self) -> str:
        return str(self.config.get("env", "?"))

    @property
    def algo(self) -> str:
        return str(self.config.get("algo", "?"))

    def series(self, metric: str) -> tuple[list[int], list[float]]:
        """Return env steps and values of one metric, where its value is finite."""
        pairs = [(row["env_steps"], finite(row.get(metric))) for row in self.metrics]
        kept = [(step, value) for step, value in pairs if value is not None]
        return [step for step, _ in kept], [value for _, value in kept]

    def metric_names(self) -> set[str]:
        names = {name for row in self.metrics for name, v in row.items() if finite(v) is not None}
        return names - {"env_steps"}


def read_run(path: Path) -> RunData:
    """Read one run folder; only ``config.json`` is required."""
    config = read_object(path / "config.json")
    if config is None:
        raise ConfigError(f"'{path}' is not a run folder: it has no readable config.json")
    return RunData(
        path=path,
        name=run_name(path),
        config=config,
        result=read_object(path / "result.json"),
        metrics=list(read_metrics(path / "metrics.jsonl")),
    )


def run_name(path: Path) -> str:
    folder = path.absolute()
    return f"{folder.parent.name}/{folder.name}" if _is_seed(folder) else folder.name


def seed_folders(path: Path) -> list[Path]:
    """Return the runs in a folder: its ``seed-*`` folders in order, or the folder itself."""
    seeds = [child for child in _folders(path) if _is_seed(child) and _has_config(child)]
    if seeds:
        return sorted(seeds, key=lambda seed: (len(seed.name), seed.name))
    return [path] if _has_config(path) else []


def find_runs(root: Path) -> list[Path]:
    """Return every run folder below ``root``; of a run with several seeds, its seed folders."""
    return [run for folder in _folders(root) for run in seed_folders(folder)]


def resolve_run(name_or_path: str, root: Path) -> Path:
    """Return the folder of a run given by its path or by its name below ``root``."""
    asked = Path(name_or_path)
    if name_or_path and seed_folders(asked):
        return asked
    if asked.is_absolute() or ".." in asked.parts:
        raise ConfigError(
            f"run '{name_or_path}' is no run folder; give a folder that holds a config.json, "
            f"or the plain name of a run below '{root}'"
        )
    if name_or_path and seed_folders(root / asked):
        return root / asked
    known = {run_name(run) for run in find_runs(root)}
    raise UnknownNameError("run", name_or_path, known | {name.split("/")[0] for name in known})


def group_runs(runs: Sequence[RunData], by_algo: bool = False) -> dict[str, list[RunData]]:
    """Group runs that are seeds of one experiment; return label → runs.

    Runs share a group when their configurations differ at most in the seed and in fields that do
    not change what is computed; otherwise a band would show a difference of settings as noise.
    ``by_algo`` groups by algorithm instead, whatever else differs.
    """
    groups: dict[str, list[RunData]] = {}
    if by_algo:
        for run in runs:
            groups.setdefault(run.algo, []).append(run)
        return groups
    experiments: dict[str, list[RunData]] = {}
    for run in runs:
        experiments.setdefault(json.dumps(computed_fields(run), sort_keys=True), []).append(run)
    for members in experiments.values():
        rivals = [
            other[0] for other in experiments.values() if _title(other[0]) == _title(members[0])
        ]
        label = " ".join([_title(members[0]), *_differences(members[0], rivals)])
        groups[f"{label} ({members[0].name})" if label in groups else label] = members
    return groups


def _title(run: RunData) -> str:
    return f"{run.env} · {run.algo}"


def computed_fields(run: RunData) -> dict[str, Any]:
    """Return the fields of a run's configuration that change what it computes."""
    return {name: value for name, value in run.config.items() if name not in _NOT_COMPUTED}


def _differences(run: RunData, rivals: list[RunData]) -> list[str]:
    """Return ``name=value`` of the first three fields in which ``run`` differs from ``rivals``."""
    own = computed_fields(run)
    differing = [
        name
        for name in own
        if any(computed_fields(rival).get(name) != own[name] for rival in rivals)
    ]
    return [f"{name}={public_value(own[name])}" for name in differing[:3]]


def _is_seed(path: Path) -> bool:
    return path.name.startswith("seed-")


def _has_config(path: Path) -> bool:
    return os.path.isfile(path / "config.json")  # unlike Path.is_file: False for impossible names


def _folders(path: Path) -> Iterable[Path]:
    try:
        return sorted(child for child in path.iterdir() if child.is_dir())
    except (OSError, ValueError):
        return []


def read_object(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file; None if there is none that can be read."""
    try:
        value = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of ``metrics.jsonl``, without lines that are incomplete."""
    try:
        text = read_text(path, most_bytes=None, errors="replace")
    except OSError:
        return
    yield from parse_metrics(text)


def parse_metrics(text: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of lines of ``metrics.jsonl``, without lines that are incomplete."""
    for line in text.splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue  # cut off by a crash, or being written right now
        env_steps = row.get("env_steps") if isinstance(row, dict) else None
        if isinstance(env_steps, int) and finite(env_steps) is not None:
            yield row


def current_result(run: RunData, last_env_steps: int | None) -> dict[str, Any]:
    """Return a run's result; empty if it was resumed and its metrics are past the result."""
    result = run.result or {}
    is_past = last_env_steps is not None and last_env_steps > (finite(result.get("env_steps")) or 0)
    return {} if is_past else result


def summarise(
    run: RunData, last_env_steps: int | None, evaluations: Sequence[float], rates: Sequence[float]
) -> dict[str, Any]:
    """Return a run's score, speed and state; what its result does not say is of its metrics.

    ``last_env_steps`` of its newest row, ``evaluations``: mean returns, ``rates``: per second.
    """
    result = current_result(run, last_env_steps)
    named = {name: run.config.get(name) for name in ("env", "algo", "engine")}

    def known(key: str, otherwise: float | None) -> float | None:
        return finite(result.get(key)) if result else otherwise

    return {
        "name": run.name,
        "path": str(run.path),
        **{name: value if isinstance(value, str) else None for name, value in named.items()},
        "seed": finite(run.config.get("seed")),
        "env_steps": known("env_steps", last_env_steps),
        "total_env_steps": finite(run.config.get("steps")),
        "eval_return_mean": known("eval_return_mean", evaluations[-1] if evaluations else None),
        "best_eval_return": known("best_eval_return", max(evaluations, default=None)),
        "env_steps_per_s": known("env_steps_per_s", rates[-1] if rates else None),
        "wall_s": known("wall_s", None),
        "state": _state(result),
    }


def _state(result: dict[str, Any]) -> str:
    if not result:
        return UNFINISHED
    stopped_by = result.get("stopped_by")
    return "finished" if stopped_by in (None, "steps") else str(stopped_by)
