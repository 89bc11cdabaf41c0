"""``qfleet scale``: change the number of workers of a run that is training."""

from __future__ import annotations

import json as json_module
from dataclasses import dataclass

import tyro

from qfleet.cli.parsing import parse

HELP = "change the number of workers of a run that is training"

DESCRIPTION = """Change the number of workers of a run that is training in another process.

Workers that join receive the newest weights and take part from their first gradient on; workers
that leave finish their slice of work first. No work is lost, and no worker waits. Only for runs
with --engine parameter-server.

Examples:
  qfleet scale runs/NAME --workers 8
  qfleet scale NAME --workers 2
"""


@dataclass(frozen=True)
class ScaleOptions:
    run: tyro.conf.Positional[str]
    """Name or folder of the run."""
    workers: int
    """New number of workers."""
    json: bool = False
    """Print one JSON object and nothing else."""


def run(argv: list[str]) -> int:
    options = parse(ScaleOptions, argv, "scale", DESCRIPTION)
    from qfleet.engines.parameter_server.limits import count_workers
    from qfleet.training.scaling import scale

    scaled = scale(options.run, options.workers)
    if options.json:
        report = {
            "run_dir": str(scaled.folder),
            "workers_before": scaled.workers_before,
            "workers": scaled.workers,
        }
        print(json_module.dumps(report))
    else:
        print(f"{options.run}: {count_workers(options.workers)} from now on")
    return 0
