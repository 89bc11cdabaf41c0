"""The folder of several seeds: what remains of them to train, and their aggregate."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from qfleet.config.config import Config, check_fields
from qfleet.config.files import read_fields
from qfleet.config.trust import check_trust
from qfleet.config.validation import validate
from qfleet.core.errors import ConfigError
from qfleet.core.files import atomic_write_text, read_text
from qfleet.core.urls import is_url
from qfleet.storage.checkpoint import has_checkpoint
from qfleet.storage.locks import RunLock, check_idle
from qfleet.storage.state_checks import check_like, reading
from qfleet.storage.vacancy import CONFIG, EXPERIMENT, RESULT
from qfleet.training.publisher import publishing
from qfleet.training.result import Result
from qfleet.training.trained import Trained, TrainedSeeds, aggregate_seeds


def vacant_urls(
    run_dir: Path | str | None, seeds: Sequence[int], overwrite: bool
) -> dict[int, str]:
    """Return the URL of each seed's run if ``run_dir`` is one; raise if a run is there already."""
    if not is_url(str(run_dir)):
        return {}
    urls = {seed: f"{str(run_dir).rstrip('/')}/seed-{seed}" for seed in seeds}
    for url in urls.values():
        with publishing(url, (), overwrite):
            pass
    return urls


def resume_seeds(
    folder: Path,
    asked: dict[str, Any],
    trust: bool,
    resume: Callable[[Path], Any],
    start: Callable[[Path, Config], Trained],
) -> TrainedSeeds:
    """Train what remains: ended seeds are kept, those without a checkpoint start anew."""
    with reading(f"'{folder / EXPERIMENT}' cannot be read; resume each seed by itself"):
        stored = json.loads(read_text(folder / EXPERIMENT))
        fields, seeds = check_fields(stored["config"]), stored["seeds"]
        check_like(seeds, (0,), "seeds")
        if not seeds:
            raise ValueError("it names no seed")
    check_trust(Config(**{name: fields[name] for name in fields.keys() - asked}), trust)
    config, runs = Config(**fields).replace(**asked), list[Trained]()
    with RunLock(folder):
        children = {seed: folder / f"seed-{seed}" for seed in seeds}
        for child in children.values():
            check_idle(child)
        ended = {seed: finished(child, config.steps) for seed, child in children.items()}
        if "steps" in asked:  # those that patience or a target has ended go on too
            ended = {
                seed: run if run and run.result.env_steps >= config.steps else None
                for seed, run in ended.items()
            }
        if None not in ended.values() and _is_aggregated(folder, ended.values()):
            raise ConfigError(f"'{folder}' is complete (seeds {seeds}); --steps N sets a new total")
        if "steps" in asked:  # stored, so that after an interrupt the others go as far
            stored["config"]["steps"] = validate(config).steps
            atomic_write_text(folder / EXPERIMENT, json.dumps(stored, indent=2))
        for seed, child in children.items():
            run = ended[seed]
            if run is None and has_checkpoint(child / "checkpoints"):
                run = resume(child)
            runs.append(run or start(child, config.replace(seed=seed)))
            if runs[-1].interrupted_by is not None:
                break
        return aggregate_seeds(folder, runs)


def _is_aggregated(folder: Path, runs: Iterable[Trained | None]) -> bool:
    """Return whether the aggregate is of all steps of these runs, not of an interrupted seed."""
    try:
        steps = json.loads(read_text(folder / "aggregate.json"))["env_steps"]
    except (OSError, ValueError, LookupError, TypeError):
        return False
    return bool(steps == sum(run.result.env_steps for run in runs if run is not None))


def has_ended(result: Result, steps: int) -> bool:
    """Return whether a run has ended by itself, and not before ``steps`` without another reason."""
    if result.stopped_by.startswith(("stop_after", "max_wall", "SIG", "error")):
        return False
    return result.stopped_by != "steps" or result.env_steps >= steps


def finished(folder: Path, steps: int) -> Trained | None:
    """Return a run that has ended by itself; None if it has not, or before ``steps``."""
    if not (folder / RESULT).exists() or not (folder / CONFIG).exists():
        return None
    with reading(f"'{folder / RESULT}' cannot be read"):
        result = Result(**json.loads(read_text(folder / RESULT)))
    if not has_ended(result, steps):
        return None
    curve = folder / "plots" / "learning_curve.png"
    config = Config(**read_fields(folder / CONFIG))
    return Trained(folder, config, result, curve if curve.exists() else None)
