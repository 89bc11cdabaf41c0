"""Write a report: names of runs in, one HTML file out."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from qfleet.core.errors import ConfigError
from qfleet.core.files import atomic_file
from qfleet.core.urls import is_url, public_url
from qfleet.report.data import page_data
from qfleet.report.histories import read_histories
from qfleet.report.page import render
from qfleet.telemetry.runs import find_runs, read_object, seed_folders
from qfleet.training.run_folders import find_run

RUNS = Path("runs")


def require_packages(*names: str) -> None:
    """Raise ConfigError if one of these packages is not installed."""
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError:
            raise ConfigError(f"this verb needs {name}: pip install 'qfleet[report]'") from None


def find_folders(run: str) -> list[Path]:
    """Return the run folders of a run's seeds, or of all runs in a folder that can be read."""
    if not is_url(run) and not seed_folders(Path(run)) and (runs := find_runs(Path(run))):
        return [folder for folder in runs if _is_readable(folder)]
    return seed_folders(find_run(run, RUNS, "summary"))


def _is_readable(folder: Path) -> bool:
    """Return whether a run has a configuration; if not, say that it is left out."""
    if read_object(folder / "config.json"):
        return True
    print(f"qfleet: left out '{folder}': it has no readable config.json", file=sys.stderr)
    return False


def find_folder(target: str) -> Path:
    """Return the folder of a run, or a folder in which runs may appear later."""
    if is_url(target):
        raise ConfigError(
            f"'{public_url(target)}' is a URL; watch reads local folders, report also URLs"
        )
    is_absent_default = Path(target) == RUNS and not RUNS.exists()  # before the first run
    if Path(target).is_dir() or is_absent_default:
        return Path(target)
    return find_run(target, RUNS, "summary")


def write_report(folders: Sequence[Path], out: Path) -> int:
    """Write the page of these runs; return its size in bytes."""
    if out.is_dir():
        raise ConfigError(f"'{out}' is a folder; give a file, e.g. -o {out / 'report.html'}")
    data = page_data(read_histories(folders))
    names = data["experiments"]
    title = ", ".join(names) if len(names) < 4 else f"{len(names)} experiments"
    page = render(data, f"{title} · qfleet").encode(errors="replace")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(out) as partial:
            partial.write_bytes(page)
    except OSError as error:
        raise ConfigError(f"cannot write '{out}': {os.strerror(error.errno or 0)}") from None
    return len(page)
