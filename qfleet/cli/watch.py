"""``qfleet watch``: show runs in a browser while they train."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro

from qfleet.cli.parsing import parse
from qfleet.core.errors import require

HELP = "show runs in a browser while they train"

DESCRIPTION = """Show a run, or all runs in a folder, in a browser while they train.

The page is that of qfleet report, and follows the files of the runs. It is served on this machine
only (127.0.0.1), and only to those who have the address that is printed, which holds a token.

Examples:
  qfleet watch
  qfleet watch my-run --open
  qfleet watch experiments --port 8080
"""


@dataclass(frozen=True)
class WatchOptions:
    target: tyro.conf.Positional[str] = "runs"
    """A run (name or folder), or a folder of runs."""
    port: int = 0
    """Port to listen on; 0: any free one."""
    open_: Annotated[bool, tyro.conf.arg(name="open"), tyro.conf.FlagCreatePairsOff] = False
    """Open the page in the browser."""


def run(argv: list[str]) -> int:
    options = parse(WatchOptions, argv, "watch", DESCRIPTION)
    require(0 <= options.port < 65536, "--port", options.port, "in 0 … 65535")
    from qfleet.report.files import find_folder, require_packages

    target = find_folder(options.target)
    require_packages("bokeh", "starlette", "uvicorn")
    from qfleet.report.live import watch

    return watch(target, options.port, options.open_)
