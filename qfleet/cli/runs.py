"""``qfleet runs``: list the runs in a folder as a table, newest first or sorted."""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from qfleet.cli.parsing import parse
from qfleet.core.errors import ConfigError, UnknownNameError
from qfleet.telemetry.formatting import format_duration, format_rate, format_score
from qfleet.telemetry.runs import EVAL_RETURN, RunData, read_run, summarise
from qfleet.training.run_folders import ListedRun, list_runs

if TYPE_CHECKING:
    from rich.table import Table

HELP = "list the runs in a folder with their scores"

_DESCRIPTION = """List the runs in a folder, newest first, with their scores, speed and state.

Keys of --sort and --filter are columns of the table, or keys of --json.

Examples:
  qfleet runs
  qfleet runs --root experiments --sort return --reverse
  qfleet runs --filter env=CartPole-v1 --filter state=finished --csv
  qfleet runs --json
"""

TITLES = {
    "steps": "env_steps", "return": "eval_return_mean", "best": "best_eval_return",
    "steps/s": "env_steps_per_s", "wall": "wall_s",
}  # fmt: skip
"""Titles of the table → columns, where they differ."""

LESS_NEEDED = ("engine", "seed", "steps/s", "algo", "wall", "env")
"""Columns that a narrow terminal leaves out, in this order."""

_Texts = tyro.conf.UseAppendAction[tuple[str, ...]]


def runs(
    root: str = "runs",
    sort: str | None = None,
    reverse: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    filter_: Annotated[_Texts, tyro.conf.arg(name="filter", metavar="KEY=VALUE")] = (),
    csv_: Annotated[bool, tyro.conf.arg(name="csv"), tyro.conf.FlagCreatePairsOff] = False,
    json_: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> int:
    """List the runs in a folder.

    Args:
        root: folder that holds the runs, or its URL.
        sort: column to sort by, in ascending order.
        reverse: list in the opposite order.
        filter_: list only runs with this value; * stands for any text. May be given several times.
        csv_: print comma-separated values only.
        json_: print machine-readable output only.
    """
    if csv_ and json_:
        raise ConfigError("--csv and --json exclude each other; give one of them")
    columns = list(_describe(RunData(Path(root), "", {}, None, [])))
    rows = [_row(run) for run in list_runs(root)]
    for text in filter_:
        key, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"--filter {text!r} must be KEY=VALUE, e.g. env=CartPole-v1")
        rows = [row for row in rows if _equals(row[_column(key, columns)], value)]
    if sort is not None:
        rows.sort(key=lambda row: _order(row[_column(sort, columns)]))
    rows = rows[::-1] if reverse else rows
    if json_:
        print(json.dumps(rows, allow_nan=False))
    elif csv_:
        writer = csv.DictWriter(sys.stdout, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    elif rows:
        _print_table(rows)
    else:
        matching = " with these values" if filter_ else ""
        hint = "train one with `qfleet train`, or set --root"
        sys.stdout.write(f"no runs{matching} in '{root}'; {hint}\n")
    return 0


def run(argv: list[str]) -> int:
    return parse(runs, argv, "runs", _DESCRIPTION)


def _column(key: str, columns: list[str]) -> str:
    name = TITLES.get(key, key)
    if name not in columns:
        raise UnknownNameError("column", key, [*columns, *TITLES])
    return name


def _equals(value: Any, text: str) -> bool:
    try:
        return float(value) == float(text)
    except (TypeError, ValueError):
        pattern = ".*".join(re.escape(part) for part in text.lower().split("*"))
        return re.fullmatch(pattern, str(value or "").lower(), re.DOTALL) is not None


def _order(value: Any) -> tuple[int, float, str]:
    """Return a key that sorts numbers before texts, and values that are missing last."""
    if isinstance(value, (int, float)):
        return (0, value, "")
    return (2, 0.0, "") if value is None else (1, 0.0, str(value))


def _row(run: ListedRun) -> dict[str, Any]:
    own = {"name": run.name, "path": run.place}
    try:
        return _describe(read_run(run.folder)) | own
    except ConfigError:  # one damaged folder must not hide the others
        state = {"state": "unreadable config.json"}
        return _describe(RunData(run.folder, run.name, {}, None, [])) | own | state


def _describe(data: RunData) -> dict[str, Any]:
    last = max((row["env_steps"] for row in data.metrics), default=None)
    return summarise(data, last, data.series(EVAL_RETURN)[1], data.series("time/fps")[1])


def _print_table(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.measure import Measurement

    console = Console()
    is_terminal = console.is_terminal
    if not is_terminal:  # a pipe has no width to fit into
        console = Console(width=200)
    unlimited, left_out = console.options.update(width=10_000), list[str]()
    table = _table(rows, left_out)
    for title in LESS_NEEDED if is_terminal else ():
        if Measurement.get(console, unlimited, table).maximum > console.width:
            left_out.append(title)
            table = _table(rows, left_out)
    console.print(table)
    if left_out:
        console.out(f"left out: {', '.join(left_out)} (--csv has all columns)", highlight=False)


def _table(rows: list[dict[str, Any]], left_out: Collection[str]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in CELLS:
        if title not in left_out:
            number = title in ("seed", *TITLES)
            table.add_column(title, "", justify="right" if number else "left", overflow="fold")
    for row in rows:
        cells = (form(row) for title, form in CELLS.items() if title not in left_out)
        # Text, not str: a name may hold brackets, which rich would read as markup.
        table.add_row(*(Text(cell) for cell in cells))
    return table


def _text(key: str) -> Callable[[dict[str, Any]], str]:
    return lambda row: row[key] or "–"


def _number(key: str, form: Callable[[float], str]) -> Callable[[dict[str, Any]], str]:
    return lambda row: "–" if row[key] is None else form(row[key])


_STEPS = _number("env_steps", "{:,}".format), _number("total_env_steps", "{:,}".format)
CELLS: dict[str, Callable[[dict[str, Any]], str]] = {
    **{key: _text(key) for key in ("name", "env", "algo", "engine")},
    "seed": _number("seed", str),
    "steps": lambda row: "/".join(form(row) for form in _STEPS),
    "return": _number("eval_return_mean", format_score),
    "best": _number("best_eval_return", format_score),
    "steps/s": _number("env_steps_per_s", format_rate),
    "wall": _number("wall_s", format_duration),
    "state": _text("state"),
}
"""Titles of the table → texts of a run."""
