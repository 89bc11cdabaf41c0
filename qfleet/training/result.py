"""What a run comes to, and what it cost in memory."""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Result:
    """What a run comes to; ``result.json`` holds exactly these keys."""

    env_id: str
    algo: str
    engine: str
    seed: int
    env_steps: int
    frames: int
    updates: int
    wall_s: float
    env_steps_per_s: float | None
    updates_per_s: float | None
    replay_ratio: float | None
    eval_return_mean: float | None
    eval_return_std: float | None
    best_eval_return: float | None
    stopped_by: str
    time_share: dict[str, float | None]
    rates: dict[str, float | str | None] | None
    """Env steps per second of each stage alone and of all together; null where not measured."""
    communication: dict[str, int | None]
    faults: dict[str, int]
    peak_rss_bytes: int | None
    peak_device_bytes: int | None
    agents: list[dict[str, Any]] | None
    """Of a population: number, seed, varied values and returns of each agent; else null."""
    fleet: dict[str, Any] | None
    """What many processes did and cost (docs/parameter-server.md); null where there was one."""


def peak_rss_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def peak_device_bytes(device: torch.device) -> int | None:
    return int(torch.cuda.max_memory_allocated(device)) if device.type == "cuda" else None
