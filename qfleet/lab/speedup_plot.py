"""Plots of the speed-up: curves over the number of workers, or bars if there is a straggler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from qfleet.lab.speedup import Point
from qfleet.telemetry.figures import BESIDE, MUTED_COLOUR, PALETTE, saved_figure


def draw_speedup(points: Sequence[Point], title: str, path: Path) -> Path:
    """Draw speed-up and efficiency of each update rule; return ``path``.

    With a straggler, draw a panel of bars for each number of workers instead: two bars per update
    rule, without and with the straggler, beside the most that either could reach.
    """
    workers = sorted({point.workers for point in points})
    if any(point.straggler > 1 for point in points):
        several = [count for count in workers if count > 1]
        with saved_figure(path, 3.0 + 4.2 * len(several), 4.2) as figure:
            panels = figure.subplots(1, len(several), squeeze=False)[0]
            for axes, count in zip(panels, several, strict=True):
                _draw_bars(axes, [point for point in points if point.workers == count])
            panels[0].set_ylabel("speed-up over one worker")
            panels[0].set_title(title)
            panels[-1].legend(**BESIDE)
        return path
    with saved_figure(path, 11.0, 4.4) as figure:
        left, right = figure.subplots(1, 2)
        ideal = {"color": MUTED_COLOUR, "lw": 1.2, "ls": ":", "label": "ideal"}
        left.plot(workers, workers, **ideal)
        right.plot(workers, [100.0] * len(workers), **ideal)
        _draw_curves(left, points, lambda point: point.speed_up)
        _draw_curves(right, points, lambda point: 100.0 * point.efficiency)
        for axes, name in ((left, "speed-up"), (right, "efficiency, %")):
            axes.set_xscale("log", base=2)
            axes.set_xticks(workers, [str(count) for count in workers])
            axes.minorticks_off()
            axes.set_xlabel("workers")
            axes.set_ylabel(name)
        left.set_yscale("log", base=2)
        left.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        left.minorticks_off()
        right.set_ylim(bottom=0.0)
        left.set_title(title)
        right.legend(**BESIDE)
    return path


def _draw_curves(axes: Any, points: Sequence[Point], value: Callable[[Point], float]) -> None:
    for number, update in enumerate(dict.fromkeys(point.update for point in points)):
        curve = [point for point in points if point.update == update]
        axes.plot(
            [point.workers for point in curve],
            [value(point) for point in curve],
            color=PALETTE[number % len(PALETTE)],
            lw=2.0,
            marker="o",
            ms=4.5,
            label=update,
        )


def _draw_bars(axes: Any, points: Sequence[Point]) -> None:
    """Draw the bars of one number of workers."""
    updates = list(dict.fromkeys(point.update for point in points))
    workers = points[0].workers
    for number, straggler in enumerate(sorted({point.straggler for point in points})):
        found = {point.update: point.speed_up for point in points if point.straggler == straggler}
        # Both bars of an update rule touch at its tick.
        places = [updates.index(update) + 0.4 * number - 0.2 for update in found]
        # A straggler does 1 / straggler of the work of another worker.
        most = workers - 1 + 1 / straggler
        name = f"straggler {straggler:g}×" if straggler > 1 else "all workers alike"
        colour = (MUTED_COLOUR, PALETTE[0])[number]
        bars = axes.bar(places, list(found.values()), 0.38, color=colour, lw=0, label=name)
        axes.bar_label(bars, fmt="{:.2f}", size=9, color="white", padding=-13)
        axes.axhline(most, color=colour, lw=1.2, ls=":", label="_" * number + "most possible")
        end = {"xycoords": ("axes fraction", "data"), "ha": "right", "va": "bottom"}
        axes.annotate(f"{most:g}", (1.0, most), color=colour, size=9, **end)
    axes.set_xticks(range(len(updates)), updates)
    axes.tick_params(axis="x", length=0)
    axes.set_xlabel(f"{workers} workers")
