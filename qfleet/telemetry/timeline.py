"""Plots of the end of a ``Trace``: a row per lane and a bar per span.

``draw_timeline`` shows the stages of this process's threads; ``draw_workers`` shows when each
worker computes, communicates and waits. ``trace.json`` holds the whole trace, for Perfetto.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qfleet.core.errors import ConfigError
from qfleet.telemetry.figures import PALETTE, colour_legend, label_rows, saved_figure
from qfleet.telemetry.timers import COMMUNICATING, COMPUTING, KIND_OF, WAITING
from qfleet.telemetry.trace import SpanRecord, Trace

WINDOW_SPANS = 60
"""Number of spans of the busiest lane that are shown."""
SHORTEST_WINDOW_S = 1e-6
"""Least window: a trace may hold only one span of length 0."""
BAR_HEIGHT = 0.72
LANE_INCHES = 0.42
# The stages' colours in the terminal (``progress.STAGE_COLOURS``), with enough contrast on white.
COLOURS = {
    "env": PALETTE[4],
    "act": PALETTE[2],
    "copy": PALETTE[5],
    "learn": PALETTE[3],
    "evaluate": "#7A5195",
    "save": "#8A8A5C",
    "communicate": PALETTE[0],
    "idle": "#E2E2E2",
}
KIND_COLOURS = {COMPUTING: PALETTE[2], COMMUNICATING: PALETTE[5], WAITING: COLOURS["idle"]}
OTHER_COLOUR = PALETTE[1]
"""For spans of an unknown stage."""
WAITS = ("idle", WAITING)


def draw_timeline(trace: Trace, path: Path) -> Path:
    """Draw the stages of each thread; return ``path``."""
    rows = {lane.name: lane.spans() for lane in trace.lanes}
    return _draw(rows, path, "thread", COLOURS)


def draw_workers(trace: Trace, path: Path) -> Path:
    """Draw when each worker, a lane, computes, communicates and waits; return ``path``.

    At a barrier all workers wait for the slowest; without a barrier none does.
    """
    rows = {lane.name: join_kinds(lane.spans()) for lane in trace.lanes}
    return _draw(rows, path, "worker", KIND_COLOURS)


def cut(spans: Sequence[SpanRecord], begin_s: float, end_s: float) -> list[SpanRecord]:
    """Return the spans clipped to the window, whose begin becomes time 0."""
    return [
        (stage, max(start_s, begin_s) - begin_s, min(stop_s, end_s) - begin_s)
        for stage, start_s, stop_s in spans
        if start_s <= end_s and stop_s >= begin_s
    ]


def draw_bars(
    axes: Any, rows: Mapping[str, Sequence[SpanRecord]], colours: Mapping[str, str], length_s: float
) -> None:
    """Draw the spans of a window of ``length_s`` as bars, a row per label, over milliseconds."""
    for number, spans in enumerate(rows.values()):
        bars = [(start_s * 1e3, (end_s - start_s) * 1e3) for _, start_s, end_s in spans]
        # A white edge separates two spans of one stage; a narrow bar would be all edge.
        edges = [0.3 if width > length_s * 1e3 / 300 else 0.0 for _, width in bars]
        faces = [colours.get(stage, OTHER_COLOUR) for stage, _, _ in spans]
        height = (number - BAR_HEIGHT / 2, BAR_HEIGHT)
        axes.broken_barh(bars, height, facecolors=faces, edgecolors="white", linewidths=edges)
    label_rows(axes, list(rows))
    axes.set_xlim(0.0, length_s * 1e3)
    axes.set_xlabel("ms")
    present = {stage for spans in rows.values() for stage, _, _ in spans}
    known = {stage: colour for stage, colour in colours.items() if stage in present}
    colour_legend(axes, known | dict.fromkeys(sorted(present - set(known)), OTHER_COLOUR))


def _draw(
    rows: Mapping[str, list[SpanRecord]], path: Path, member: str, colours: Mapping[str, str]
) -> Path:
    if not any(rows.values()):
        raise ConfigError(f"no span has been recorded for timeline '{path}'; trace a longer run")
    shown, length_s = last_spans(rows, member == "worker")
    with saved_figure(path, 11.0, 1.6 + LANE_INCHES * len(rows)) as figure:
        axes = figure.add_subplot()
        draw_bars(axes, shown, colours, length_s)
        length = f"{length_s * 1e3:,.0f}" if length_s >= 0.1 else f"{length_s * 1e3:.3g}"
        axes.set_title(f"every {member} for {length} ms")
    return path


def last_spans(
    rows: Mapping[str, Sequence[SpanRecord]], are_workers: bool
) -> tuple[dict[str, list[SpanRecord]], float]:
    """Return the spans in the last window, by lane and its share of time, and the window's seconds.

    At least one lane must have spans.
    """
    begin_s, end_s = _window([spans for spans in rows.values() if spans])
    length_s = end_s - begin_s
    shown: dict[str, list[SpanRecord]] = {}
    for name, spans in rows.items():
        inside = cut(spans, begin_s, end_s)
        share = _spent_s(inside, waiting=are_workers) / length_s
        shown[f"{name}  {share:.0%} {'waiting' if are_workers else 'busy'}"] = inside
    return shown, length_s


def join_kinds(spans: Sequence[SpanRecord]) -> list[SpanRecord]:
    """Replace stages by their kinds, and merge neighbouring spans of one kind into one span.

    The gap between two spans of a kind is merged too, unless it is longer than both spans together:
    then what happened in it is unknown.
    """
    joined: list[SpanRecord] = []
    previous_s = 0.0
    for stage, start_s, end_s in spans:
        kind, span_s = KIND_OF.get(stage, stage), end_s - start_s
        if joined and joined[-1][0] == kind and start_s - joined[-1][2] <= previous_s + span_s:
            start_s = joined.pop()[1]
        joined.append((kind, start_s, end_s))
        previous_s = span_s
    return joined


def _window(rows: Sequence[Sequence[SpanRecord]]) -> tuple[float, float]:
    """Return begin and end of about ``WINDOW_SPANS`` spans of the busiest lane, up to its last."""
    # If no lane was busy at all, the lane with the most spans is taken.
    busiest = max(rows, key=lambda spans: (_spent_s(spans, waiting=False), len(spans)))
    starts_s = [start_s for _, start_s, _ in busiest]
    last_s = max(end_s for _, _, end_s in busiest)
    # The usual duration of WINDOW_SPANS consecutive spans: the median is robust against a long
    # pause, and stretches, unlike single spans, are alike where long and short spans alternate.
    later_s = starts_s[WINDOW_SPANS:] or [last_s]
    shown_s = statistics.median(b - a for a, b in zip(starts_s, later_s, strict=False))
    return last_s - max(shown_s, SHORTEST_WINDOW_S), last_s


def _spent_s(spans: Sequence[SpanRecord], waiting: bool) -> float:
    """Return the seconds of all spans that are waits, or of all others."""
    return sum(end_s - start_s for stage, start_s, end_s in spans if (stage in WAITS) == waiting)
