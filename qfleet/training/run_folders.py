"""Find the folder of a run that a user names: by path, by name below ``runs``, or by URL."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal, NamedTuple

from qfleet.core.errors import ConfigError, StorageError, UnknownNameError
from qfleet.core.urls import is_url
from qfleet.storage.published import INDEX, fetch_to_read, require_index
from qfleet.storage.remote import Store
from qfleet.telemetry.runs import find_runs, resolve_run, run_name, seed_folders

Needs = Literal["summary", "best", "last"]
"""What of a run at a URL is downloaded: configuration, metrics and result; a policy too."""


def find_run(run: Path | str, root: Path, needs: Needs) -> Path:
    """Return the folder of a run; of a run at a URL, that of a verified local copy."""
    if is_url(str(run)):
        return fetch_to_read(Store(str(run)), needs)
    return resolve_run(str(run), root)


class ListedRun(NamedTuple):
    name: str
    place: str
    """Folder or URL."""
    folder: Path
    """The folder, or that of a local copy without policies."""
    changed_s: float
    """When the run has last written something, in seconds since 1970."""


def list_runs(root: Path | str) -> list[ListedRun]:
    """Return every run below a folder or a URL, the newest first."""
    if is_url(str(root)):
        store = Store(str(root))
        names = [n.removesuffix(f"/{INDEX}") for n in store.names() if n.endswith(f"/{INDEX}")]
        found = (_published(f"{store.url}/{name}", name) for name in names)
        runs = [run for run in found if run is not None]
    else:
        runs = [
            ListedRun(run_name(path), str(path), path, _changed_s(path))
            for path in find_runs(Path(root))
        ]
    return sorted(runs, key=lambda run: (-run.changed_s, run.place))


def _published(url: str, name: str) -> ListedRun | None:
    """Return a run at a URL; None, with a line, if it cannot be read: it must not hide others."""
    store = Store(url)
    try:
        changed_s = require_index(store).written_s
        return ListedRun(name, store.shown, fetch_to_read(store, "summary"), changed_s)
    except (StorageError, UnknownNameError) as error:
        print(f"qfleet: {error}", file=sys.stderr)
        return None


def _changed_s(path: Path) -> float:
    files = (path / name for name in ("config.json", "metrics.jsonl", "result.json"))
    return max((file.stat().st_mtime for file in files if file.exists()), default=0.0)


def find_one_run(run: Path | str, root: Path, needs: Needs) -> Path:
    """Return the folder of a run with one seed."""
    folder = find_run(run, root, needs)
    seeds = seed_folders(folder)
    if seeds != [folder]:
        raise ConfigError(f"'{folder}' has several seeds; give one of them, e.g. {seeds[0]}")
    return folder
