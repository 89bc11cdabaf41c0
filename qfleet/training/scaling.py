"""Change the number of workers of a run that is training in another process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from qfleet.config.config import Config
from qfleet.config.files import read_fields
from qfleet.engines.parameter_server import limits, resize_request
from qfleet.training.api import RUNS
from qfleet.training.run_folders import find_one_run


@dataclass(frozen=True)
class Scaled:
    """A run with a new number of workers."""

    folder: Path
    workers_before: int | None
    """None if unknown."""
    workers: int


def scale(run: Path | str, workers: int) -> Scaled:
    """Change the number of workers of a run that is training in another process."""
    folder = find_one_run(run, RUNS, "summary")
    config = Config(**read_fields(folder / "config.json"))
    # In this order: limits on the number only matter if the run is training.
    limits.check_engine(config)
    resize_request.check_training(folder, workers)
    limits.check(config, workers)
    before = resize_request.workers_now(folder, config)
    resize_request.ask(folder, workers)
    return Scaled(folder, before, workers)
