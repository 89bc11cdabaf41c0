"""Ranks that a launcher has started: which of them have a run, and which run they continue."""

from __future__ import annotations

import json
from pathlib import Path

from qfleet.config.config import Config
from qfleet.config.files import read_fields
from qfleet.core.errors import QfleetError
from qfleet.engines.all_reduce.world import count_restarts, launched_world
from qfleet.engines.auto import settle
from qfleet.storage.checkpoint import diff_meta
from qfleet.storage.vacancy import CONFIG
from qfleet.telemetry.runs import resolve_run


def follow_if_told(engine: str) -> None:
    """Return, unless a launcher has started this process as another rank than 0."""
    world = launched_world() if engine == "all-reduce" else None
    if world is not None and world.rank > 0:
        from qfleet.engines.all_reduce.follower import follow  # torch.distributed, rarely needed

        follow()


def stored_engine(run: Path | str, runs: Path) -> str:
    """Return the engine of a stored run; that of ranks if the run is not on this machine."""
    try:
        return str(read_fields(resolve_run(str(run), runs) / CONFIG).get("engine"))
    except (QfleetError, OSError):
        return "all-reduce"


def was_lost(place: Path, config: Config, free: set[str]) -> bool:
    """Return whether torchrun has started this command again, whose run is in ``place``."""
    if config.engine != "all-reduce" or not count_restarts():
        return False
    try:
        stored = read_fields(place / CONFIG)
    except QfleetError:
        return False
    return not diff_meta(stored, json.loads(settle(config)[0].to_json()), free)
