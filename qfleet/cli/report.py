"""``qfleet report``: write runs as one web page that needs no network."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from qfleet.cli.parsing import parse
from qfleet.core.errors import ConfigError
from qfleet.core.urls import public_value

HELP = "write a web page of one or more runs: curves, scores, configuration"

DESCRIPTION = """Write one or more runs as a single HTML file that opens from disk without network.

It has learning curves, final scores with intervals, time per thread, fleets, and the command that
repeats each run. Runs that differ only in their seed are one curve with a band. Several runs are
compared with the first one.

Examples:
  qfleet report my-run
  qfleet report dqn-cartpole rainbow-cartpole -o compare.html
  qfleet report s3://bucket/cartpole
"""


@dataclass(frozen=True)
class ReportOptions:
    runs: tyro.conf.Positional[tuple[str, ...]]
    """Runs: names, folders or URLs; a folder of runs stands for all of them."""
    out: Annotated[Path, tyro.conf.arg(aliases=("-o",))] = Path("report.html")
    """File to write."""


def run(argv: list[str]) -> int:
    options = parse(ReportOptions, argv, "report", DESCRIPTION)
    if not options.runs:
        raise ConfigError("give at least one run, e.g. qfleet report runs/NAME")
    from qfleet.report.files import find_folders, require_packages, write_report

    require_packages("bokeh")
    found = [folder for run in options.runs for folder in find_folders(run)]
    folders = list(dict.fromkeys(found))
    if not folders:
        raise ConfigError(
            f"no run in '{' '.join(public_value(options.runs))}' can be read; name other runs"
        )
    size_bytes = write_report(folders, options.out)
    print(f"{options.out} ({size_bytes / 1e6:.1f} MB, {len(folders)} run{'s'[: len(folders) - 1]})")
    return 0
