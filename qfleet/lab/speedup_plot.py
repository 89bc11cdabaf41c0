"""Plot of speed-up and efficiency over the number of workers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qfleet.core.errors import ConfigError
from qfleet.lab.speedup import Point
from qfleet.telemetry.plots import FORMATS, MUTED_COLOUR, PALETTE, TEXT_COLOUR, _clean


def draw_speedup(points: Sequence[Point], title: str, path: Path) -> Path:
    """Draw a colour per update, dashed with a straggler, and the ideal in grey; return ``path``."""
    if path.suffix.lower() not in FORMATS:
        raise ConfigError(f"picture '{path}' must end in {', '.join(FORMATS)}")

    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    workers = sorted({point.workers for point in points})
    with mpl.rc_context({"font.size": 10.5, "text.color": TEXT_COLOUR, "svg.hashsalt": "qfleet"}):
        figure = Figure(figsize=(11.0, 4.4), dpi=150, layout="constrained")
        FigureCanvasAgg(figure)
        left, right = figure.subplots(1, 2)
        ideal = {"color": MUTED_COLOUR, "lw": 1.2, "ls": ":", "label": "ideal"}
        left.plot(workers, workers, **ideal)
        right.plot(workers, [100.0] * len(workers), **ideal)
        _draw_curves(left, points, lambda point: point.speed_up)
        _draw_curves(right, points, lambda point: 100.0 * point.efficiency)
        for axes, name in ((left, "speed-up"), (right, "efficiency, %")):
            _clean(axes)
            axes.set_xscale("log", base=2)
            axes.set_xticks(workers, [str(count) for count in workers])
            axes.minorticks_off()
            axes.set_xlabel("workers", color=TEXT_COLOUR)
            axes.set_ylabel(name, color=TEXT_COLOUR)
        left.set_yscale("log", base=2)
        left.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        left.minorticks_off()
        right.set_ylim(bottom=0.0)
        left.set_title(title, loc="left", fontsize=12, fontweight="bold", pad=10)
        right.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(path)
        except OSError as error:
            raise ConfigError(f"cannot write picture '{path}': {error.strerror}") from None
    return path


def _draw_curves(axes: Any, points: Sequence[Point], figure_of: Any) -> None:
    updates = list(dict.fromkeys(point.update for point in points))
    for update, straggler in dict.fromkeys(point.curve for point in points):
        curve = [point for point in points if point.curve == (update, straggler)]
        axes.plot(
            [point.workers for point in curve],
            [figure_of(point) for point in curve],
            color=PALETTE[updates.index(update) % len(PALETTE)],
            ls="--" if straggler > 1 else "-",
            lw=2.0,
            marker="o",
            ms=4.5,
            label=f"{update}, straggler {straggler:g}×" if straggler > 1 else update,
        )
