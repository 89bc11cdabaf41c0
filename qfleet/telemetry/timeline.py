"""Plots of a ``Trace``: an image with a row per lane and a bar per span.

``draw_timeline`` shows the stages of this process's threads; ``draw_workers`` shows when each
worker computes, communicates and waits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qfleet.core.errors import ConfigError
from qfleet.telemetry.plots import FORMATS, PALETTE, TEXT_COLOUR, _clean
from qfleet.telemetry.progress import STAGE_COLOURS
from qfleet.telemetry.timers import COMMUNICATING, COMPUTING, KIND_OF, KINDS, STAGES, WAITING
from qfleet.telemetry.trace import Lane, Trace

WINDOW_SPANS = 60
"""Number of spans of the busiest lane that are shown if no length of time is given."""
SHORTEST_WINDOW_S = 1e-6
"""Least window: a trace may hold only one span of length 0."""
MAX_BARS = 600
"""Bars that a lane has room for, at two pixels each. Narrower bars would be drawn over each other,
and the image would show the stage that is drawn last."""
COLUMNS = 300
"""Columns of a lane with more than ``MAX_BARS`` spans; each shows the stages' shares of time."""
BAR_HEIGHT = 0.72
LANE_INCHES = 0.42
# The terminal's names for the stages' colours → colours with enough contrast on white.
HUES = {
    "cyan": PALETTE[4],
    "green": PALETTE[2],
    "yellow": PALETTE[5],
    "magenta": PALETTE[3],
    "blue": PALETTE[0],
}
COLOURS = {stage: HUES[name] for stage, name in STAGE_COLOURS.items()} | {"idle": "#E2E2E2"}
KIND_COLOURS = {COMPUTING: PALETTE[2], COMMUNICATING: PALETTE[5], WAITING: COLOURS["idle"]}
OTHER_COLOUR = PALETTE[1]
"""For spans of an unknown stage."""
RESTS = ("idle", WAITING)


class _Row:
    """A lane as arrays, because a trace holds about 100,000 spans."""

    def __init__(self, lane: Lane) -> None:
        spans = lane.spans()
        self.name = lane.name
        self.stage: NDArray[np.str_] = np.array([span[0] for span in spans], dtype=np.str_)
        times_s = np.array([span[1:] for span in spans], dtype=np.float64).reshape(-1, 2)
        self.start_s, self.end_s = times_s[:, 0], times_s[:, 1]

    def busy_s(self) -> float:
        return float((self.end_s - self.start_s)[~np.isin(self.stage, RESTS)].sum())

    def waiting_s(self) -> float:
        return float((self.end_s - self.start_s)[np.isin(self.stage, RESTS)].sum())

    def join_kinds(self) -> None:
        """Replace stages by their kinds, and merge neighbouring spans of one kind into one span.

        The gap between two spans of a kind is merged too, unless it is longer than both spans
        together: then what happened in it is unknown.
        """
        if not len(self.stage):
            return
        self.stage = np.array([KIND_OF.get(stage, stage) for stage in self.stage], dtype=np.str_)
        spans_s = self.end_s - self.start_s
        gaps_s = self.start_s[1:] - self.end_s[:-1]
        is_new = (self.stage[1:] != self.stage[:-1]) | (gaps_s > spans_s[1:] + spans_s[:-1])
        firsts = np.concatenate([[0], np.flatnonzero(is_new) + 1])
        lasts = np.concatenate([firsts[1:] - 1, [len(self.stage) - 1]])
        self.stage, self.start_s = self.stage[firsts], self.start_s[firsts]
        self.end_s = self.end_s[lasts]

    def cut(self, begin_s: float, end_s: float) -> None:
        """Clip all spans to the window; the window's begin becomes time 0."""
        inside = (self.start_s <= end_s) & (self.end_s >= begin_s)
        self.stage = self.stage[inside]
        self.start_s = np.maximum(self.start_s[inside], begin_s) - begin_s
        self.end_s = np.minimum(self.end_s[inside], end_s) - begin_s

    def spent_s(self, stage: str, edges_s: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the seconds spent in ``stage`` between each edge and the next."""
        chosen = self.stage == stage
        start_s, end_s = self.start_s[chosen], self.end_s[chosen]
        if not len(start_s):
            return np.zeros(len(edges_s) - 1)
        # The cumulative time rises during spans and is constant between them.
        after_s = np.cumsum(end_s - start_s)
        before_s = after_s - (end_s - start_s)
        times_s = np.stack([start_s, end_s], axis=1).ravel()
        so_far_s = np.stack([before_s, after_s], axis=1).ravel()
        return np.diff(np.interp(edges_s, times_s, so_far_s))


def draw_timeline(trace: Trace, path: Path, seconds: float | None = None) -> Path:
    """Draw the last ``seconds`` of ``trace``, all lanes; return ``path``.

    Without ``seconds``, the window covers about ``WINDOW_SPANS`` spans of the busiest lane and ends
    with its last span, so that single spans are visible and the time after the work is not shown.
    """
    return _draw([_Row(lane) for lane in trace.lanes], path, seconds, of_workers=False)


def draw_workers(trace: Trace, path: Path, seconds: float | None = None) -> Path:
    """Draw when each worker computes, communicates and waits; return ``path``.

    Each lane is a worker, and stages are reduced to these three kinds. At a barrier all workers
    wait for the slowest; without a barrier none does.
    """
    rows = [_Row(lane) for lane in trace.lanes]
    for row in rows:
        row.join_kinds()
    return _draw(rows, path, seconds, of_workers=True)


def _draw(rows: list[_Row], path: Path, seconds: float | None, *, of_workers: bool) -> Path:
    if path.suffix.lower() not in FORMATS:
        raise ConfigError(f"timeline file '{path}' must end in {', '.join(FORMATS)}")
    if seconds is not None and not 0 < seconds < float("inf"):
        raise ConfigError(f"timeline of {seconds} seconds must be longer than 0 and finite")
    filled = [row for row in rows if len(row.start_s)]
    if not filled:
        raise ConfigError(f"no span has been recorded for timeline '{path}'; trace a longer run")

    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    begin_s, end_s = _window(filled, seconds)
    length_s = end_s - begin_s
    for row in rows:
        row.cut(begin_s, end_s)
    present = {str(stage) for row in rows for stage in np.unique(row.stage)}
    known = KINDS if of_workers else STAGES
    stages = [stage for stage in known if stage in present] + sorted(present - set(known))

    with mpl.rc_context({"font.size": 10.5, "text.color": TEXT_COLOUR, "svg.hashsalt": "qfleet"}):
        height_inches = 1.6 + LANE_INCHES * len(rows)
        figure = Figure(figsize=(11.0, height_inches), dpi=150, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        for number, row in enumerate(rows):
            if len(row.stage) <= MAX_BARS:
                _draw_bars(axes, row, number, length_s)
            else:
                _draw_columns(axes, row, number, stages, length_s)
        _clean(axes)
        axes.grid(False, axis="y")
        axes.grid(axis="x", color="#E6E6E6", lw=0.8)
        axes.set_xlim(0.0, length_s * 1e3)
        is_dense = any(len(row.stage) > MAX_BARS for row in rows)
        note = " (many spans in a row: the height of a colour is its share of the time)"
        axes.set_xlabel("ms" + note * is_dense, color=TEXT_COLOUR)
        axes.set_ylim(len(rows) - 0.5, -0.5)  # the first lane on top
        if of_workers:
            labels = [f"{row.name}  {row.waiting_s() / length_s:.0%} waiting" for row in rows]
        else:
            labels = [f"{row.name}  {row.busy_s() / length_s:.0%} busy" for row in rows]
        axes.set_yticks(range(len(rows)), labels)
        axes.tick_params(axis="y", length=0)
        length = f"{length_s * 1e3:,.0f}" if length_s >= 0.1 else f"{length_s * 1e3:.3g}"
        title = f"every {'worker' if of_workers else 'thread'} for {length} ms"
        axes.set_title(title, loc="left", fontsize=12, fontweight="bold", pad=10)
        axes.legend(
            handles=[Patch(color=_colour(stage), label=stage) for stage in stages],
            frameon=False,
            loc="center left",
            bbox_to_anchor=(1.0, 0.5),
        )
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(path)
        except OSError as error:
            raise ConfigError(f"cannot write timeline '{path}': {error.strerror}") from None
    return path


def _window(rows: list[_Row], seconds: float | None) -> tuple[float, float]:
    """Return begin and end of the window, in seconds of the trace's clock."""
    if seconds is not None:
        first_s = min(float(row.start_s.min()) for row in rows)
        last_s = max(float(row.end_s.max()) for row in rows)
        return last_s - max(min(seconds, last_s - first_s), SHORTEST_WINDOW_S), last_s
    # If no lane was busy at all, the lane with the most spans is taken.
    busiest = max(rows, key=lambda row: (row.busy_s(), len(row.start_s)))
    start_s, last_s = busiest.start_s, float(busiest.end_s.max())
    if len(start_s) <= WINDOW_SPANS:
        shown_s = last_s - float(start_s.min())
    else:
        # The usual duration of WINDOW_SPANS consecutive spans: the median is robust against a long
        # pause, and stretches, unlike single spans, are alike where long and short spans alternate.
        shown_s = float(np.median(start_s[WINDOW_SPANS:] - start_s[:-WINDOW_SPANS]))
    return last_s - max(shown_s, SHORTEST_WINDOW_S), last_s


def _draw_bars(axes: Any, row: _Row, number: int, length_s: float) -> None:
    spans_s = row.end_s - row.start_s
    colours = [_colour(stage) for stage in row.stage]
    # A white edge separates two spans of one stage; a narrow bar would be all edge.
    is_wide = spans_s > length_s / COLUMNS
    axes.broken_barh(
        list(zip(row.start_s * 1e3, spans_s * 1e3, strict=True)),
        (number - BAR_HEIGHT / 2, BAR_HEIGHT),
        facecolors=colours,
        edgecolors=["white" if wide else c for wide, c in zip(is_wide, colours, strict=True)],
        linewidths=0.3,
    )


def _draw_columns(axes: Any, row: _Row, number: int, stages: list[str], length_s: float) -> None:
    edges_s = np.linspace(0.0, length_s, COLUMNS + 1)
    column_s = length_s / COLUMNS
    # The axis points down, so columns are stacked towards smaller numbers.
    base = np.full(COLUMNS, number + BAR_HEIGHT / 2)
    for stage in stages:
        top = base - row.spent_s(stage, edges_s) / column_s * BAR_HEIGHT
        axes.stairs(top, edges_s * 1e3, baseline=base, fill=True, color=_colour(stage), lw=0)
        base = top


def _colour(stage: str) -> str:
    return (COLOURS | KIND_COLOURS).get(stage, OTHER_COLOUR)
