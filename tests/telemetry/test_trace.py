from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from qfleet.core.errors import ConfigError
from qfleet.telemetry.trace import PID, Trace, merge_lanes, read_chrome_trace, write_chrome_trace
from support.messages import says
from support.waiting import PHASE_S, deadline


def events(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return found


def test_each_lane_keeps_its_own_spans_in_order() -> None:
    trace = Trace()
    trace.lane("env 0").add("env", 1.0, 2.0)
    trace.lane("learner").add("learn", 1.5, 1.75)
    trace.lane("env 0").add("copy", 2.0, 2.5)
    assert [lane.name for lane in trace.lanes] == ["env 0", "learner"]
    assert trace.lane("env 0").spans() == [("env", 1.0, 2.0), ("copy", 2.0, 2.5)]
    assert trace.lane("learner").spans() == [("learn", 1.5, 1.75)]
    assert trace.dropped == 0


def test_a_full_trace_stops_all_lanes_and_counts_what_it_drops() -> None:
    trace = Trace(limit=3)
    fast, slow = trace.lane("fast"), trace.lane("slow")
    fast.add("env", 0, 1)
    slow.add("learn", 0, 2)
    for second in range(1, 4):
        fast.add("env", second, second + 1)
    slow.add("learn", 2, 4)
    assert fast.spans() == [("env", 0, 1), ("env", 1, 2)]
    assert slow.spans() == [("learn", 0, 2)]
    assert (fast.dropped, slow.dropped, trace.dropped) == (2, 1, 3)


def test_a_copy_of_the_spans_does_not_grow() -> None:
    lane = Trace().lane("env")
    lane.add("env", 0, 1)
    copy = lane.spans()
    lane.add("env", 1, 2)
    assert copy == [("env", 0, 1)]


def test_what_is_taken_is_forgotten_and_still_counts_for_the_limit() -> None:
    lane = Trace(limit=3).lane("actor 0")
    lane.add("env", 0, 1)
    lane.add("env", 1, 2)
    assert lane.take() == [("env", 0, 1), ("env", 1, 2)]
    lane.add("act", 2, 3)
    lane.add("act", 3, 4)
    assert (lane.take(), lane.take(), lane.dropped) == ([("act", 2, 3)], [], 1)


def test_threads_lose_nothing_and_keep_the_limit() -> None:
    trace, adds, limit = Trace(limit=5000), 2000, 5000

    def record(name: str) -> None:
        lane = trace.lane(name)
        for number in range(adds):
            lane.add("env", number, number + 1)

    threads = [threading.Thread(target=record, args=(f"env {i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(deadline(PHASE_S))
        assert not thread.is_alive()
    assert sum(len(lane.spans()) for lane in trace.lanes) == limit
    assert trace.dropped == 4 * adds - limit
    # What a lane holds is its beginning: nothing is missing in the middle.
    for lane in trace.lanes:
        assert [span[1] for span in lane.spans()] == list(range(len(lane.spans())))


def test_the_file_has_a_thread_per_lane_and_microseconds(tmp_path: Path) -> None:
    trace = Trace(limit=3)
    trace.lane("env 0").add("env", 100.0, 100.000_250_5)
    trace.lane("idle one")
    trace.lane("learner").add("learn", 100.0001, 100.0021)
    trace.lane("learner").add("copy", 100.0021, 100.0022)
    trace.lane("learner").add("learn", 100.0022, 100.0023)
    path = tmp_path / "new" / "trace.json"
    assert write_chrome_trace(trace, path) == path
    named = [e for e in events(path) if e["ph"] == "M"]
    assert [(e["name"], e["tid"], e["args"]["name"]) for e in named] == [
        ("process_name", 0, "qfleet"),
        ("thread_name", 1, "env 0"),
        ("thread_name", 2, "idle one"),
        ("thread_name", 3, "learner"),
    ]
    spans = [e for e in events(path) if e["ph"] == "X"]
    assert [(e["tid"], e["name"], e["ts"], e["dur"]) for e in spans] == [
        (1, "env", 100_000_000.0, 250.5),
        (3, "learn", 100_000_100.0, 2000.0),
        (3, "copy", 100_002_100.0, 100.0),
    ]
    assert {e["pid"] for e in events(path)} == {PID}
    assert json.loads(path.read_text())["otherData"] == {"dropped_spans": 1}


def test_an_old_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text("old")
    write_chrome_trace(Trace(), path)
    assert events(path)
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_cannot_be_made_is_a_typed_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=says("trace.json")):
        write_chrome_trace(Trace(), tmp_path / "file" / "trace.json")


def test_spans_of_other_processes_get_their_own_lanes() -> None:
    trace = Trace()
    trace.lane("driver").add("learn", 100.0, 101.0)
    spans = {
        "worker 1": [("env", 100.0, 101.0), ("idle", 101.0, 102.5)],
        "worker 0": [("env", 100.0, 102.0)],
        "worker 2": [],
    }
    merge_lanes(trace, spans)
    assert [lane.name for lane in trace.lanes] == ["driver", "worker 1", "worker 0", "worker 2"]
    assert trace.lane("worker 1").spans() == [("env", 100.0, 101.0), ("idle", 101.0, 102.5)]
    assert trace.lane("worker 0").spans() == [("env", 100.0, 102.0)]
    assert trace.lane("worker 2").spans() == []


def test_a_full_trace_shows_all_workers_up_to_one_moment() -> None:
    trace = Trace(limit=4)
    starts = {"a": (0.0, 1.0, 2.0), "b": (0.5, 1.5, 2.5)}
    merge_lanes(trace, {name: [("env", t, t + 1.0) for t in own] for name, own in starts.items()})
    assert [span[1] for span in trace.lane("a").spans()] == [0.0, 1.0]
    assert [span[1] for span in trace.lane("b").spans()] == [0.5, 1.5]
    assert trace.dropped == 2


def test_a_written_trace_is_read_again(tmp_path: Path) -> None:
    trace = Trace()
    trace.lane("env 0").add("env", 1.0, 2.0)
    trace.lane("learner")
    trace.lane("env 0").add("copy", 2.0, 2.5)
    path = write_chrome_trace(trace, tmp_path / "trace.json")
    assert read_chrome_trace(path) == {
        "env 0": [("env", 1.0, 2.0), ("copy", 2.0, 2.5)],
        "learner": [],
    }
    path.write_text(path.read_text(encoding="utf-8")[:-20], encoding="utf-8")
    assert read_chrome_trace(path) == read_chrome_trace(tmp_path / "none.json") == {}
