"""Run a benchmark on two versions of the code alternately; print the median of new / old.

    python tools/compare_commits.py 9097aa5 HEAD --rows sb3 throughput efficiency
    python tools/compare_commits.py ../old-tree . --rows pipeline device --rounds 2

Versions are commits of this repository or folders. Each is run by this interpreter with its own
code first on the path, and with its own benchmark programs. The figures are rates that the
benchmarks measure without start-up; above 1, the new version is faster. The two take turns, and the
order changes from round to round, so that a slow minute of the machine hits both.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

Rates = dict[str, float]


class Row(NamedTuple):
    """A benchmark: how it is called, and how its rates are read from what it leaves behind."""

    arguments: tuple[str, ...]
    """With ``{out}`` where the folder for its figures belongs."""
    rates: Callable[[Path], Rates]


def _json(out: Path) -> Any:
    return json.loads((out / "figures.json").read_text())


def _sb3(out: Path) -> Rates:
    return {row["row"]: row["qfleet_steps_per_s"] for row in _json(out)}


def _throughput(out: Path) -> Rates:
    """Pushes per bare call in the same time: what Ray itself can do varies from run to run.

    Of each, the fastest round counts: other processes only ever make a round slower.
    """
    rows = _json(out)["throughput"].items()
    return {name: row["bare call"] / row["push"] for name, row in rows}


def _efficiency(out: Path) -> Rates:
    with (out / "efficiency" / "speedup.csv").open() as file:
        return {
            f"{p['workers']} workers": float(p["env_steps_per_s"]) for p in csv.DictReader(file)
        }


def _pipeline(out: Path) -> Rates:
    return {name: row["steps_per_s"] for name, row in _json(out).items() if isinstance(row, dict)}


def _device(out: Path) -> Rates:
    return {name: row["steps"] / row["train_s"] for name, row in _json(out).items()}


_PS = "benchmarks/parameter_server.py"
_WITHOUT_SB3 = """
import sys
sys.path.insert(0, "benchmarks")
import against_sb3
against_sb3.sb3_rate = lambda config, seed: 1.0  # the peer's rate does not matter here
against_sb3.main()
"""
_FASTEST = """
import runpy, statistics, sys
statistics.median = min  # the benchmark reports the median of its rounds
sys.argv[0] = "benchmarks/parameter_server.py"
runpy.run_path(sys.argv[0], run_name="__main__")
"""
ROWS = {
    "sb3": Row(
        ("-c", _WITHOUT_SB3, "--rows", "zoo", "cleanrl", "--rounds", "1",
         "--out", "{out}/figures.json"), _sb3,
    ),
    "throughput": Row(
        ("-c", _FASTEST, "--rows", "throughput", "--rounds", "12", "--calls", "60",
         "--json", "{out}/figures.json"), _throughput,
    ),
    "efficiency": Row((_PS, "--rows", "efficiency", "--out", "{out}"), _efficiency),
    "pipeline": Row(
        ("benchmarks/pipeline.py", "--rows", "dqn32", "--json", "{out}/figures.json"), _pipeline,
    ),
    "device": Row(
        ("benchmarks/device.py", "--rows", "breakout", "--json", "{out}/figures.json"), _device,
    ),
}  # fmt: skip


@contextlib.contextmanager
def tree(version: str) -> Iterator[Path]:
    """The folder of a version; a commit is checked out for as long as this lasts."""
    if Path(version).is_dir():
        yield Path(version).resolve()
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tree"
        subprocess.run(["git", "worktree", "add", "--detach", str(path), version], check=True)
        try:
            yield path
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(path)], check=True)


def measure(root: Path, row: Row, quiet: bool) -> Rates:
    with tempfile.TemporaryDirectory() as out:
        arguments = [argument.replace("{out}", out) for argument in row.arguments]
        path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH", "")]))
        subprocess.run(
            [sys.executable, *arguments],
            cwd=root,
            env={**os.environ, "PYTHONPATH": path},
            check=True,
            stdout=subprocess.DEVNULL if quiet else None,
        )
        return row.rates(Path(out))


def compare(name: str, old: Path, new: Path, rounds: int, quiet: bool) -> dict[str, list[float]]:
    ratios: dict[str, list[float]] = {}
    for turn in range(rounds):
        order = [old, new] if turn % 2 == 0 else [new, old]
        found = {root: measure(root, ROWS[name], quiet) for root in order}
        for figure, rate in found[new].items():
            ratios.setdefault(figure, []).append(rate / found[old][figure])
        said = ", ".join(f"{figure} {values[-1]:.3f}" for figure, values in ratios.items())
        print(f"{name}, round {turn + 1}: {said}", flush=True)
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("old", help="commit or folder")
    parser.add_argument("new", help="commit or folder")
    parser.add_argument("--rows", nargs="+", choices=sorted(ROWS), default=sorted(ROWS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--verbose", action="store_true", help="show what the benchmarks print")
    parser.add_argument("--json", type=Path, help="write the ratios there")
    options = parser.parse_args()
    found: dict[str, dict[str, list[float]]] = {}
    with tree(options.old) as old, tree(options.new) as new:
        for name in options.rows:
            found[name] = compare(name, old, new, options.rounds, not options.verbose)
            if options.json:
                options.json.write_text(json.dumps(found, indent=1))
    for name, ratios in found.items():
        for figure, values in ratios.items():
            low, high = min(values), max(values)
            median = statistics.median(values)
            print(f"{name:<12} {figure:<34} new/old {median:.3f} ({low:.3f} to {high:.3f})")


if __name__ == "__main__":
    main()
