from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex

from qfleet.core.errors import ConfigError
from qfleet.telemetry.progress import STAGE_COLOURS
from qfleet.telemetry.timeline import (
    COLOURS,
    KIND_COLOURS,
    OTHER_COLOUR,
    cut,
    draw_timeline,
    draw_workers,
)
from qfleet.telemetry.timers import KINDS, STAGES
from qfleet.telemetry.trace import Trace
from support.messages import says


def bars_ms(axes: Axes, lane: int = 0) -> list[tuple[float, float]]:
    """Left and right edge of each bar of a lane."""
    boxes = [path.get_extents() for path in axes.collections[lane].get_paths()]
    return [(round(box.x0, 6), round(box.x1, 6)) for box in boxes]


def legend(axes: Axes) -> list[str]:
    return [text.get_text() for text in axes.get_legend().get_texts()]


def alternating(count: int, long_s: float = 0.001, short_s: float = 0.00001) -> Trace:
    """One lane: a long span of env, then a short one of copy, and so on."""
    trace, now_s = Trace(limit=10**9), 100.0
    lane = trace.lane("env 0")
    for number in range(count):
        stage, span_s = ("copy", short_s) if number % 2 else ("env", long_s)
        lane.add(stage, now_s, now_s + span_s)
        now_s += span_s
    return trace


def test_lanes_are_rows_of_bars_in_ms(tmp_path: Path, drawn: list[Axes]) -> None:
    trace = Trace()
    env, _, learner = trace.lane("env 0"), trace.lane("empty"), trace.lane("learner")
    env.add("env", 100.000, 100.004)
    env.add("idle", 100.004, 100.006)
    env.add("env", 100.006, 100.010)
    learner.add("learn", 100.001, 100.003)
    out = tmp_path / "plots" / "timeline.png"
    assert draw_timeline(trace, out) == out
    assert out.read_bytes().startswith(b"\x89PNG")
    (axes,) = drawn
    assert bars_ms(axes, 0) == [(0, 4), (4, 6), (6, 10)]
    assert bars_ms(axes, 1) == []
    assert bars_ms(axes, 2) == [(1, 3)]
    assert [to_hex(c).upper() for c in axes.collections[0].get_facecolor()] == [
        COLOURS["env"],
        COLOURS["idle"],
        COLOURS["env"],
    ]
    assert axes.get_xlim() == pytest.approx((0, 10))
    assert axes.get_xlabel() == "ms"
    assert legend(axes) == ["env", "learn", "idle"]
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == ["env 0  80% busy", "empty  0% busy", "learner  20% busy"]
    top, bottom = (axes.transData.transform((0, row))[1] for row in (0, 2))
    assert top > bottom


def test_one_span_even_of_no_length(tmp_path: Path, drawn: list[Axes]) -> None:
    trace = Trace()
    trace.lane("env 0").add("env", 5.0, 5.002)
    draw_timeline(trace, tmp_path / "a.png")
    assert bars_ms(drawn[0]) == [(0, 2)]
    nothing = Trace()
    nothing.lane("env 0").add("env", 5.0, 5.0)
    draw_timeline(nothing, tmp_path / "b.png")
    assert (tmp_path / "b.png").exists()


def test_sixty_spans_are_shown(tmp_path: Path, drawn: list[Axes]) -> None:
    draw_timeline(alternating(1000), tmp_path / "t.png")
    assert drawn[0].get_xlim()[1] == pytest.approx(30 * 1.01)
    # The span that ends where the window begins may count as well.
    assert len(bars_ms(drawn[0])) in (60, 61)


def test_a_pause_does_not_stretch_the_window(tmp_path: Path, drawn: list[Axes]) -> None:
    trace = alternating(1000)
    lane = trace.lane("env 0")
    end_s = lane.spans()[-1][2]
    lane.add("env", end_s + 100, end_s + 100.001)
    draw_timeline(trace, tmp_path / "t.png")
    assert drawn[0].get_xlim()[1] == pytest.approx(30 * 1.01)


def test_the_window_ends_with_the_busiest_lane(tmp_path: Path, drawn: list[Axes]) -> None:
    trace = alternating(1000)
    end_s = trace.lane("env 0").spans()[-1][2]
    trace.lane("learner").add("idle", end_s - 50, end_s + 100)
    draw_timeline(trace, tmp_path / "t.png")
    (left_ms, right_ms) = bars_ms(drawn[0], 1)[0]
    assert (left_ms, right_ms) == pytest.approx((0, 30 * 1.01))
    assert len(bars_ms(drawn[0], 0)) >= 60


def test_the_busiest_lane_has_the_most_work_not_the_most_spans(
    tmp_path: Path, drawn: list[Axes]
) -> None:
    trace = Trace()
    for number in range(500):
        trace.lane("chatty").add("communicate", number * 0.001, number * 0.001 + 1e-6)
    trace.lane("learner").add("learn", 0.0, 0.4)
    draw_timeline(trace, tmp_path / "t.png")
    assert drawn[0].get_xlim()[1] == pytest.approx(400)


def test_spans_are_cut_at_the_edges_of_the_window() -> None:
    assert cut([("env", 1.0, 2.0), ("env", 2.0, 3.0)], 2.5, 3.5) == [("env", 0.0, 0.5)]
    assert cut([("learn", 0.0, 3.5)], 2.5, 3.5) == [("learn", 0.0, 1.0)]
    assert cut([("learn", 0.0, 3.5)], 0.0, 3.5) == [("learn", 0.0, 3.5)]


def test_every_stage_has_a_colour_and_a_stranger_too(tmp_path: Path, drawn: list[Axes]) -> None:
    assert set(COLOURS) == set(STAGES) == {*STAGE_COLOURS, "idle"}
    assert len({*COLOURS.values(), OTHER_COLOUR}) == len(STAGES) + 1
    trace = Trace()
    trace.lane("gpu").add("gemm", 0.0, 0.001)
    trace.lane("gpu").add("learn", 0.001, 0.002)
    draw_timeline(trace, tmp_path / "t.svg")
    assert legend(drawn[0]) == ["learn", "gemm"]
    assert to_hex(drawn[0].collections[0].get_facecolor()[0]).upper() == OTHER_COLOUR


def test_what_cannot_be_drawn_is_refused(tmp_path: Path) -> None:
    trace = alternating(3)
    with pytest.raises(ConfigError, match=r"t\.doc.*\.png"):
        draw_timeline(trace, tmp_path / "t.doc")
    empty = Trace()
    empty.lane("env 0")
    with pytest.raises(ConfigError, match=says("span")):
        draw_timeline(empty, tmp_path / "t.png")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=says("write", "t.png")):
        draw_timeline(trace, tmp_path / "file" / "t.png")
    assert not (tmp_path / "t.png").exists()


# --- many workers -------------------------------------------------------------------------------


def rounds(count: int, barrier: bool) -> Trace:
    """Worker 0 computes 8 ms a round and worker 1 for 2; at a barrier worker 1 waits 6 ms."""
    trace = Trace()
    slow, quick = trace.lane("worker 0"), trace.lane("worker 1")
    for number in range(count):
        now_s = number * 0.010
        slow.add("env", now_s, now_s + 0.006)
        slow.add("learn", now_s + 0.007, now_s + 0.008)  # a ms of Python in between
        slow.add("communicate", now_s + 0.008, now_s + 0.010)
    quick_s = 0.010 if barrier else 0.004
    for number in range(count):
        now_s = number * quick_s
        quick.add("env", now_s, now_s + 0.001)
        quick.add("act", now_s + 0.001, now_s + 0.002)
        quick.add("communicate", now_s + 0.002, now_s + 0.004)
        if barrier:
            quick.add("idle", now_s + 0.004, now_s + 0.010)
    return trace


def labels(axes: Axes) -> list[str]:
    return [label.get_text() for label in axes.get_yticklabels()]


def test_workers_compute_communicate_and_wait(tmp_path: Path, drawn: list[Axes]) -> None:
    draw_workers(rounds(2, barrier=True), tmp_path / "t.png")
    (axes,) = drawn
    assert bars_ms(axes, 0) == [(0, 8), (8, 10), (10, 18), (18, 20)]
    assert bars_ms(axes, 1) == [(0, 2), (2, 4), (4, 10), (10, 12), (12, 14), (14, 20)]
    colours = [to_hex(c).upper() for c in axes.collections[1].get_facecolor()]
    assert colours == [KIND_COLOURS[kind] for kind in KINDS] * 2
    assert legend(axes) == list(KINDS)
    assert labels(axes) == ["worker 0  0% waiting", "worker 1  60% waiting"]
    assert axes.get_title(loc="left").startswith("every worker for")


def test_without_a_barrier_no_worker_waits(tmp_path: Path, drawn: list[Axes]) -> None:
    draw_workers(rounds(5, barrier=False), tmp_path / "t.png")
    assert labels(drawn[0]) == ["worker 0  0% waiting", "worker 1  0% waiting"]
    assert legend(drawn[0]) == ["computing", "communicating"]


def test_a_long_gap_belongs_to_no_span(tmp_path: Path, drawn: list[Axes]) -> None:
    trace = Trace()
    lane = trace.lane("worker 0")
    lane.add("env", 0.000, 0.001)
    lane.add("learn", 0.0029, 0.004)  # shorter than both together
    lane.add("env", 0.0062, 0.0072)  # longer
    lane.add("gemm", 0.0072, 0.0081)
    trace.lane("worker 1")
    draw_workers(trace, tmp_path / "t.png")
    assert bars_ms(drawn[0]) == [(0, 4), (6.2, 7.2), (7.2, 8.1)]
    assert legend(drawn[0]) == ["computing", "gemm"]


def test_kinds_have_colours_of_their_own() -> None:
    assert set(KIND_COLOURS) == set(KINDS)
    assert len({*KIND_COLOURS.values(), OTHER_COLOUR}) == len(KINDS) + 1
