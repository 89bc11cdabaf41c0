"""The check whether a new run may use a folder.

In: a folder. Out: nothing or a ConfigError; also the command that restarts a run which cannot be
resumed.

A run that fails before its first step leaves files but no progress. Its folder may be used again,
so that the same command works once the cause is fixed. A run with progress is overwritten only on
request.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

from qfleet.core.errors import ConfigError, RunBusyError
from qfleet.core.files import read_text
from qfleet.storage.checkpoint import has_checkpoint

CONFIG, METRICS, RESULT = "config.json", "metrics.jsonl", "result.json"
EXPERIMENT = "experiment.json"  # the seeds and their configuration, in the folder above theirs
_POLICIES = ("best", ".old-best", "agents")


def check_vacant(path: Path) -> None:
    """Raise ConfigError if the folder holds a run, or one of several seeds, with progress."""
    if (path / EXPERIMENT).exists():
        for child in sorted(path.glob("seed-*")):
            check_vacant(child)
    if not (path / CONFIG).exists() or has_no_progress(path):
        return
    if has_checkpoint(path / "checkpoints"):
        fix = f"continue it with: qfleet resume {path}"
    else:
        fix = "it has no checkpoint to resume from, so choose another folder"
    raise ConfigError(
        f"run folder '{path}' holds a run already; {fix}, or replace it with --overwrite "
        "(library: overwrite=True)"
    )


def check_regular_files(path: Path) -> None:
    """Raise ConfigError if something else is in the place of a file that a run writes."""
    for file in (path / name for name in (CONFIG, METRICS, RESULT, "seeds.json")):
        if file.exists() and not file.is_file():
            raise ConfigError(f"'{file}' is not a regular file; remove it")


def is_run(path: Path) -> bool:
    """Return whether the folder holds the files with which every run of qfleet begins."""
    try:
        config = json.loads(read_text(path / CONFIG))
    except (OSError, ValueError, RecursionError):
        return False
    has_fields = isinstance(config, dict) and {"env", "algo", "engine", "steps"} <= config.keys()
    return has_fields and (path / METRICS).is_file()


def has_no_progress(path: Path) -> bool:
    """Return whether a run was started here that left no step, no policy and no checkpoint."""
    try:
        # A run creates this file, empty, before any other: without it, the folder is not a run's.
        if (path / METRICS).stat().st_size > 0:
            return False
        if (path / RESULT).exists():
            steps = json.loads(read_text(path / RESULT))["env_steps"]
            if steps != 0:
                return False
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False
    has_policy = any((path / name).exists() for name in _POLICIES)
    return not has_policy and not has_checkpoint(path / "checkpoints")


def how_to_start_anew(path: Path) -> str:
    """Return the command that restarts a run without a checkpoint.

    It uses the same folder only if the run has no progress: otherwise its metrics must be kept.
    """
    where = f" --run-dir {path}" if has_no_progress(path) else ""
    return f"qfleet train --config {path / CONFIG}{where}"


@contextlib.contextmanager
def removed_if_refused(folder: Path) -> Iterator[None]:
    """Remove the empty folder of a run that was refused before it began."""
    try:
        yield
    except RunBusyError:
        raise  # another run is training in this folder
    except BaseException:
        with contextlib.suppress(OSError):  # a folder with other files stays
            for child in [*folder.glob("seed-*"), folder]:
                names = {path.name for path in child.iterdir()}
                for name in names if names <= {".lock", EXPERIMENT} else ():
                    (child / name).unlink()
                child.rmdir()
        raise
