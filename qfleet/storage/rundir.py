"""The folder of a run: its name and its creation.

In: the name given by the user, or the run's env, algorithm and seed. Out: a new folder.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import time
from pathlib import Path

from qfleet.core.errors import ConfigError
from qfleet.storage.locks import RunLock, check_idle
from qfleet.storage.vacancy import EXPERIMENT, check_vacant, is_run

MAX_NAME_CHARS = 100
_MAX_NAME_BYTES = 200  # file systems allow 255; leave room for suffixes
_STAMP_CHARS = 60  # length of a default name before its date


def check_name(name: str) -> str:
    """Return the name if it is safe as the name of a folder, or raise ConfigError."""
    shown = f"{name[:40]!r}…" if len(name) > 40 else repr(name)
    if not name or name != name.strip():
        raise ConfigError(f"run name {shown} must not be empty or begin or end with a space")
    if "/" in name or "\\" in name:
        raise ConfigError(f"run name {shown} contains a path separator; give a plain name")
    if not name.isprintable():  # NUL, line ends, undecodable bytes
        raise ConfigError(f"run name {shown} contains a character that cannot be printed")
    if name[0] in ".-":
        raise ConfigError(f"run name {shown} must not begin with '{name[0]}'")
    if len(name) > MAX_NAME_CHARS or len(name.encode()) > _MAX_NAME_BYTES:
        raise ConfigError(f"run name {shown} is longer than {MAX_NAME_CHARS} characters")
    return name


def default_name(env: str, algo: str, seed: int) -> str:
    """Return a name as ``CartPole-v1-dqn-s0-20260131-142530``, safe for any env id."""
    safe = re.sub(r"[^A-Za-z0-9._]+", "-", f"{env}-{algo}").strip(".-")[-_STAMP_CHARS:]
    return check_name(f"{safe.strip('.-')}-s{seed}-{time.strftime('%Y%m%d-%H%M%S')}")


def new_run_dir(root: Path, name: str, *, explicit: bool = True, overwrite: bool = False) -> Path:
    """Create the run's folder under `root`.

    A name that the user gave (`explicit`) is used unchanged; ConfigError or RunBusyError is raised
    if its folder holds a run, which `overwrite` removes, or is in use. A default name gets the
    suffix -2, -3 … until no folder has that name.
    """
    check_name(name)
    path = root / name
    try:
        root.mkdir(parents=True, exist_ok=True)
        if explicit:
            check_idle(path)
            if overwrite:
                remove_run(path)
            check_vacant(path)
            path.mkdir(exist_ok=True)
            return path
        attempt = 1
        while True:
            try:
                path.mkdir()
                return path
            except FileExistsError:
                attempt += 1
                path = root / f"{name}-{attempt}"
    except OSError as error:
        raise ConfigError(f"cannot create run folder '{path}': {error.strerror}") from None


RESERVE = ".reserve"
"""Name of the file whose space is for the result of a run."""

_ENTRIES = (
    "checkpoints", "best", ".old-best", "agents", "last.safetensors", "plots", "videos", "exports",
    "wandb", "tensorboard", RESERVE, "result.json", "seeds.json", "aggregate.json", "trace.json",
    "tracker.json", "population.jsonl", EXPERIMENT, "metrics.jsonl", "config.json",
)  # fmt: skip
"""What qfleet and the trackers write into the folder of a run. Last what makes it one: a removal
that was interrupted must not leave checkpoints that a new run would resume."""


def remove_run(path: Path) -> None:
    """Remove what the run in this folder, and the runs of its seeds, have written.

    Other files stay. Raises ConfigError if the folder is not a run's, RunBusyError if it is in use.
    """
    runs = [run for run in (path, *path.glob("seed-*")) if (run / "config.json").exists()]
    for run in runs:
        if not is_run(run):
            raise ConfigError(
                f"'{run}' does not look like a run of qfleet, so overwrite removes nothing there; "
                "choose another folder"
            )
    with contextlib.ExitStack() as locks:
        for run in runs:
            locks.enter_context(RunLock(run))
        for entry in [run / name for run in {path, *runs} for name in _ENTRIES if runs]:
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink(missing_ok=True)


AGENTS = "agents"


def agent_folder(run: Path, agent: int) -> Path:
    return run / AGENTS / str(agent)


def population_folder(folder: Path) -> Path | None:
    """Return the run folder if this is the folder of one agent of a population, else None."""
    whole = folder.absolute()
    is_agent = whole.parent.name == AGENTS and whole.name.isdecimal()
    run = whole.parent.parent
    return run if is_agent and (run / "checkpoints").is_dir() else None
