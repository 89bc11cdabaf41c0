"""Plots of the speed-up: curves over the number of workers, or bars if there is a straggler.

Beside what was measured, curves up to 32 workers show the ideal and the model of lab/speedup.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from qfleet.lab.speedup import CURVE, Point, modelled
from qfleet.telemetry.figures import BESIDE, MUTED_COLOUR, PALETTE, saved_figure

IDEAL = {"color": MUTED_COLOUR, "lw": 1.2, "ls": ":", "label": "ideal"}


def draw_speedup(points: Sequence[Point], title: str, path: Path) -> Path:
    """Draw speed-up and efficiency of each update rule, and the time to a return if it was reached.

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
    reached = [point for point in points if point.return_s is not None]
    with saved_figure(path, 15.0 if reached else 11.0, 4.4) as figure:
        left, *middle, right = figure.subplots(1, 3 if reached else 2)
        one = {p.update: p for p in points if p.workers == 1 and p.communicating}
        models = {
            f"{u}, model": (1 - (p.communicating or 0), p.communicating or 0)
            for u, p in one.items()
        }
        draw_axes(left, workers, models)
        _draw_curves(left, points, lambda point: point.speed_up)
        right.plot(left.get_xticks(), [100.0] * len(left.get_xticks()), **IDEAL)
        _draw_curves(right, points, lambda point: 100.0 * point.efficiency)
        _label_workers(right, workers, "efficiency, %")
        for axes in middle:
            _draw_curves(axes, reached, lambda point: point.return_s or 0.0)
            _label_workers(axes, workers, "time to the return, s")
            axes.set_ylim(bottom=0.0)
        right.set_ylim(bottom=0.0)
        left.set_title(title)
        right.legend(*left.get_legend_handles_labels(), **BESIDE)
    return path


def draw_axes(
    axes: Any, workers: Sequence[int], models: Mapping[str, tuple[float, float]], **how: Any
) -> None:
    """Draw the ideal speed-up and the modelled ones: label → times of ``modelled``."""
    counts = sorted({*workers, *CURVE})
    axes.plot(counts, counts, **IDEAL)
    for number, (label, times) in enumerate(models.items()):
        curve = [modelled(count, *times, **how) for count in counts]
        axes.plot(counts, curve, color=PALETTE[number % len(PALETTE)], lw=1.2, ls="--", label=label)
    _label_workers(axes, workers, "speed-up")
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.minorticks_off()


def _label_workers(axes: Any, workers: Sequence[int], name: str) -> None:
    counts = sorted({*workers, *CURVE})
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.minorticks_off()
    axes.set_xlabel("workers")
    axes.set_ylabel(name)


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
