"""The final report of a run: its ``result.json`` as a few lines for the terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.text import Text

from qfleet.telemetry.formatting import finite, format_duration, format_rate, format_score
from qfleet.telemetry.timers import STAGES
from qfleet.telemetry.usage import cost_line


def final_report(result: dict[str, Any], run_dir: Path, curve_png: Path | None) -> Text:
    """Return lines of ``name  value``; a line is left out if its key is null or missing."""
    rows = [
        ("score", _score(result)),
        ("best", _with(result, "best_eval_return", format_score)),
        ("speed", _speed(result)),
        ("wall time", _with(result, "wall_s", format_duration)),
        *_time_rows(result),
        ("cost", cost_line(result)),
        ("faults", _faults(result.get("faults"))),
        ("folder", str(run_dir)),
        ("curve", "" if curve_png is None else str(curve_png)),
    ]
    report = Text(overflow="fold")
    report.append(_headline(result), style="bold")
    for name, value in rows:
        if value:
            report.append(f"\n  {name:<11}", style="dim")
            report.append(value, style="yellow" if name == "faults" else "")
    for line in _agents(result.get("agents") or []):
        report.append(f"\n  {line}")
    return report


def _agents(agents: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a table of a population's agents, best first; a missing number is a dash."""
    if not agents:
        return []
    varied = list(agents[0]["values"])
    lines = [["agent", "seed", *varied, "steps", "return", "best"]]
    for row in sorted(agents, key=_goodness, reverse=True):
        lines.append(
            [
                str(row["agent"]),
                str(row["seed"]),
                *(f"{row['values'][name]:.4g}" for name in varied),
                f"{row['env_steps']:,}",
                _with(row, "eval_return_mean", format_score) or "–",
                _with(row, "best_eval_return", format_score) or "–",
            ]
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    ]


def _goodness(row: Mapping[str, Any]) -> tuple[float, float]:
    """Return the sort key of an agent: its best return, then its last one."""
    best, last = (finite(row.get(key)) for key in ("best_eval_return", "eval_return_mean"))
    return (-math.inf if best is None else best, -math.inf if last is None else last)


def _headline(result: dict[str, Any]) -> str:
    named = [str(result[key]) for key in ("env_id", "algo", "engine") if result.get(key)]
    if result.get("agents"):
        named.append(f"{len(result['agents'])} agents")
    elif result.get("seed") is not None:
        named.append(f"seed {result['seed']}")
    steps = finite(result.get("env_steps"))
    if steps is not None:
        named.append(f"{steps:,} steps")
    if result.get("stopped_by"):
        named.append(f"stopped by {result['stopped_by']}")
    return " · ".join(named)


def _with(result: Mapping[str, Any], key: str, form: Any) -> str:
    value = finite(result.get(key))
    return "" if value is None else str(form(value))


def _score(result: dict[str, Any]) -> str:
    mean = _with(result, "eval_return_mean", format_score)
    spread = _with(result, "eval_return_std", format_score)
    return f"{mean} ± {spread}" if mean and spread else mean


def _speed(result: dict[str, Any]) -> str:
    steps = _with(result, "env_steps_per_s", format_rate)
    updates = _with(result, "updates_per_s", format_rate)
    parts = [f"{steps} steps/s" if steps else "", f"{updates} updates/s" if updates else ""]
    return ", ".join(part for part in parts if part)


def _shares(shares: Mapping[str, Any] | None) -> str:
    present = [(stage, finite((shares or {}).get(stage))) for stage in STAGES]
    return "  ".join(f"{stage} {share:.0%}" for stage, share in present if share is not None)


def _time_rows(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return a row for each thread; one row for all in results of older versions."""
    resources = result.get("resources") or {}
    if len(resources) < 2:
        shares = next(iter(resources.values()), result.get("time_share"))
        return [("time in", _shares(shares))]
    return [(name, _shares(shares)) for name, shares in resources.items()]


def _faults(faults: Mapping[str, Any] | None) -> str:
    return ", ".join(f"{kind} ×{count}" for kind, count in (faults or {}).items() if count)
