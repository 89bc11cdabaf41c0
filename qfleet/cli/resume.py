"""``qfleet resume``: continue a run from its newest complete checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from qfleet.cli.parsing import parse
from qfleet.cli.run_options import RunArguments, finish, quiet_stdout

HELP = "continue an interrupted run"

DESCRIPTION = """Continue a run from its newest checkpoint.

Replay, priorities, random generators, ε, optimiser and step counters are restored: a run in one
process, with the same options, goes on as if it had never stopped, bit for bit.

Examples:
  qfleet resume runs/NAME
  qfleet resume NAME --max-wall 30m
  qfleet resume NAME --steps 1000000      (a new total; schedules stretch to it)
  qfleet resume NAME --workers 8          (another number of workers or ranks)
"""


@dataclass(frozen=True)
class ResumeOptions:
    run: tyro.conf.Positional[str]
    """Name, folder or URL of the run; of several seeds, all that have not ended are continued."""
    run_arguments: Annotated[RunArguments, tyro.conf.arg(name="")]
    steps: int | None = None
    """New total of env steps."""
    device: str | None = None
    """Device to use instead of the run's own: cpu, cuda …"""
    workers: int | None = None
    """Parameter server, all-reduce: new number of workers."""
    tensor_parallel: int | None = None
    """All-reduce: new number of ranks that hold parts of each layer."""
    pipeline_parallel: int | None = None
    """All-reduce: new number of stages; it also sets the next two to their defaults."""
    micro_batches: int | None = None
    """All-reduce: new number of parts of a batch that pass the stages one after the other."""
    pipeline_schedule: Literal["1f1b", "gpipe"] | None = None
    """All-reduce: new order of the passes in a stage."""
    servers: int | None = None
    """New number of servers (parameter server) or replay shards (actors)."""
    address: str | None = None
    """Ray cluster to join, as host:port, instead of the stored address; '': start a new cluster."""
    replay_dir: str | None = None
    """Folder for the files of the replay memory, instead of the run's own; '': RAM."""
    track: Literal["none", "wandb", "mlflow"] | None = None
    """Experiment tracker to report to, instead of the run's own."""
    record: str | None = None
    """Folder or URL of the dataset to record, instead of the run's own; '': none."""
    data: str | None = None
    """Where the dataset of an offline run is now."""
    validation_data: str | None = None
    """Where its validation dataset is now."""
    trust: bool = False
    """Accept stored values that run code or reach outside the folder: imports, address …"""


def run(argv: list[str]) -> int:
    options = parse(ResumeOptions, argv, "resume", DESCRIPTION)
    from qfleet.training import api

    arguments = options.run_arguments
    changes = {name: v for name, v in vars(options).items() if name not in ("run", "run_arguments")}
    with quiet_stdout(arguments.json):
        trained = api.resume(options.run, options=arguments.resolve(), **changes)
    return finish(trained, arguments)
