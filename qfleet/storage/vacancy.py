"""Whether a new run may have a folder, and what to do where it may not.

In: a folder. Out: nothing or a ConfigError; the command that starts anew what cannot be resumed.

A run that fails before its first step leaves files, but nothing to go on from: its folder may be
used again, so that the command works once it is mended. Anything that a run came to is kept.
"""

from __future__ import annotations

import json
from pathlib import Path

from qfleet.core.errors import ConfigError
from qfleet.storage.checkpoint import has_checkpoint

CONFIG, METRICS, RESULT = "config.json", "metrics.jsonl", "result.json"
_POLICIES = ("best", ".old-best", "agents")


def check_vacant(path: Path) -> None:
    """Refuse a folder that holds a run, unless that run came to nothing."""
    if not (path / CONFIG).exists() or has_no_progress(path):
        return
    if has_checkpoint(path / "checkpoints"):
        mend = f"continue it with: qfleet resume {path}"
    else:
        mend = "it has no checkpoint to go on from, so choose another folder or remove this one"
    raise ConfigError(f"run folder '{path}' holds a run already; {mend}")


def has_no_progress(path: Path) -> bool:
    """Whether a run was started here that left no step, no policy and no checkpoint."""
    try:
        # A run makes this file, empty, before any other: without it, these files are not a run's.
        if (path / METRICS).stat().st_size > 0:
            return False
        if (path / RESULT).exists():
            steps = json.loads((path / RESULT).read_text(encoding="utf-8"))["env_steps"]
            if steps != 0:
                return False
    except (OSError, ValueError, KeyError, TypeError):
        return False
    has_policy = any((path / name).exists() for name in _POLICIES)
    return not has_policy and not has_checkpoint(path / "checkpoints")


def how_to_start_anew(path: Path) -> str:
    """The command for a run that has no checkpoint: here, or where its curves have to stay."""
    where = f" --run-dir {path}" if has_no_progress(path) else ""
    return f"qfleet train --config {path / CONFIG}{where}"
