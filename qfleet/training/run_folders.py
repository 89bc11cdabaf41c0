"""Find the folder of a run that a user names: by path, by name below ``runs``, or by URL."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from qfleet.core.errors import ConfigError
from qfleet.storage.published import INDEX, fetch_to_read
from qfleet.storage.remote import Store, is_url
from qfleet.telemetry.runs import find_runs, resolve_run, seed_folders

Needs = Literal["summary", "best", "last"]
"""What of a run at a URL is downloaded: configuration, metrics and result; a policy too."""


def find_run(run: Path | str, root: Path, needs: Needs) -> Path:
    """Return the folder of a run; of a run at a URL, that of a verified local copy."""
    if is_url(str(run)):
        return fetch_to_read(Store(str(run)), needs)
    return resolve_run(str(run), root)


def list_runs(root: Path | str) -> list[Path]:
    """Return every run folder below ``root``; of a URL, local copies without policies."""
    if not is_url(str(root)):
        return find_runs(Path(root))
    store = Store(str(root))
    indices = [name for name in store.names() if name.endswith(f"/{INDEX}")]
    urls = [f"{store.url}/{name.removesuffix(f'/{INDEX}')}" for name in indices]
    return [fetch_to_read(Store(url), "summary") for url in urls]


def find_one_run(run: Path | str, root: Path, needs: Needs) -> Path:
    """Return the folder of a run with one seed."""
    folder = find_run(run, root, needs)
    seeds = seed_folders(folder)
    if seeds != [folder]:
        raise ConfigError(f"'{folder}' has several seeds; give one of them, e.g. {seeds[0]}")
    return folder
