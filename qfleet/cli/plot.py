"""``qfleet plot``: draw learning curves of runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import tyro

from qfleet.cli.parsing import parse
from qfleet.core.errors import ConfigError
from qfleet.core.urls import is_url
from qfleet.telemetry.runs import EVAL_RETURN, group_runs, read_run, seed_folders
from qfleet.training.run_folders import find_run

HELP = "draw the learning curves of one or more runs"

_DESCRIPTION = """Draw the learning curves of one or more runs.

Runs that differ only in their seed become one line: the interquartile mean with a 95 % bootstrap
band. A single run shows its training return (thin) and its evaluations (bold).

Examples:
  qfleet plot my-run
  qfleet plot dqn-cartpole rainbow-cartpole --out compare.png
  qfleet plot my-run --metric train/loss
"""


def plot(
    runs: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN...")],
    metric: str = EVAL_RETURN,
    out: Path | None = None,
    by_algo: bool = False,
    root: Path = Path("runs"),
    json_: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> int:
    """Draw the learning curves of one or more runs.

    Args:
        runs: names of runs below --root, their folders or URLs.
        metric: name of the metric to draw, as in metrics.jsonl.
        out: file to write (.png, .svg or .pdf); default: in plots/ of a single run, else (and
            of URLs) plot.png.
        by_algo: one line per algorithm, whatever else differs between the runs.
        root: folder that holds the runs.
        json_: print machine-readable output only.
    """
    if not runs:
        raise ConfigError("plot needs at least one run; `qfleet runs` lists them")
    # A run given twice, or by its folder and by one of its seeds, must not count as two seeds.
    folders = list(dict.fromkeys(find_run(name, root, "summary") for name in runs))
    members = {seed.resolve(): seed for folder in folders for seed in seed_folders(folder)}
    groups = group_runs([read_run(seed) for seed in members.values()], by_algo)
    if out is None:
        file = "learning_curve" if metric == EVAL_RETURN else metric.replace("/", "_")
        is_local = len(folders) == 1 and not is_url(runs[0])
        out = folders[0] / "plots" / f"{file}.png" if is_local else Path("plot.png")

    from qfleet.telemetry.plots import learning_curve

    path = learning_curve(groups, metric, out)
    if json_:
        named = {label: [run.name for run in group] for label, group in groups.items()}
        print(json.dumps({"path": str(path), "metric": metric, "groups": named}))
    else:
        sys.stdout.write(f"{path}\n")
    return 0


def run(argv: list[str]) -> int:
    return parse(plot, argv, "plot", _DESCRIPTION)
