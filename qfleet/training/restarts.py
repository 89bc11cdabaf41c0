"""Starting again: what may change on a resume, and which run ranks of a launcher continue."""

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

FREE_ON_RESUME = {
    "steps", "device", "threads", "log_interval", "checkpoint_freq", "keep_checkpoints",
    "tensorboard", "track", "replay_dir", "max_fault_rate", "max_env_restarts", "env_timeout_s",
    "max_abs_q", "target_return", "patience", "eval_max_steps", "workers", "servers", "address",
    "snapshot_s", "worker_timeout_s", "baseline", "price_per_cpu_hour", "price_per_gpu_hour",
    "record", "data", "data_readers", "validation_data", "tensor_parallel", "pipeline_parallel",
    "micro_batches", "pipeline_schedule",
}  # fmt: skip
"""Fields that determine how and how long a run runs, not what it computes."""


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


def was_lost(place: Path, config: Config) -> bool:
    """Return whether torchrun has started this command again, whose run is in ``place``."""
    if config.engine != "all-reduce" or not count_restarts():
        return False
    try:
        stored = read_fields(place / CONFIG)
    except QfleetError:
        return False
    return not diff_meta(stored, json.loads(settle(config)[0].to_json()), FREE_ON_RESUME)
