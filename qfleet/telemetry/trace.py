"""A trace: the spans of every thread, and a JSON file of them in the Chrome trace format.

Each thread writes into its own lane, so that recording needs no lock. chrome://tracing and
ui.perfetto.dev read the file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any, TypeAlias

from qfleet.core.errors import ConfigError
from qfleet.core.files import atomic_write_text, read_text

SpanRecord: TypeAlias = tuple[str, float, float]
"""Stage, start and end, in seconds of ``time.perf_counter``. A plain tuple, because the garbage
collector stops tracking tuples of atomic values."""
PID = 1
"""The process id of all lanes in the file."""


class Lane:
    """The spans of one thread; made by ``Trace.lane``."""

    __slots__ = ("_limit", "_spans", "_tickets", "dropped", "name")

    def __init__(self, name: str, tickets: Iterator[int], limit: int) -> None:
        self.name = name
        self.dropped = 0
        """Number of spans that were not recorded because the trace was full."""
        self._spans: list[SpanRecord] = []
        self._tickets = tickets
        self._limit = limit

    def add(self, stage: str, start_s: float, end_s: float) -> None:
        if next(self._tickets) < self._limit:
            self._spans.append((stage, start_s, end_s))
        else:
            self.dropped += 1

    def spans(self) -> list[SpanRecord]:
        """Return a copy of the spans; safe while the lane's thread records."""
        return self._spans.copy()

    def take(self) -> list[SpanRecord]:
        """Return and clear the recorded spans; only the lane's own thread may call this."""
        taken, self._spans = self._spans, []
        return taken


class Trace:
    """Lanes by name, which together hold at most ``limit`` spans.

    The limit is shared, not one per lane, so that all lanes stop at the same moment and a plot of
    the trace's end shows every thread.
    """

    def __init__(self, limit: int = 200_000) -> None:
        self._limit = limit
        # ``next`` on a count is atomic in the interpreter: two threads never get the same ticket.
        self._tickets = count()
        self._lanes: dict[str, Lane] = {}

    def lane(self, name: str) -> Lane:
        """Return the lane of this name, made on first use; only one thread at a time may use it."""
        return self._lanes.setdefault(name, Lane(name, self._tickets, self._limit))

    @property
    def lanes(self) -> list[Lane]:
        return list(self._lanes.values())

    @property
    def dropped(self) -> int:
        return sum(lane.dropped for lane in self.lanes)


def merge_lanes(trace: Trace, spans: Mapping[str, Iterable[SpanRecord]]) -> None:
    """Add spans of other processes, by lane, in order of time.

    A trace that becomes full then shows all lanes up to the same moment.
    """
    for name in spans:
        trace.lane(name)  # in the order given, and even where there is no span
    merged = ((*span, name) for name, own in spans.items() for span in own)
    for stage, start_s, end_s, name in sorted(merged, key=lambda span: span[1]):
        trace.lane(name).add(stage, start_s, end_s)


def write_chrome_trace(trace: Trace, path: Path) -> Path:
    """Write ``trace`` as Chrome trace events, in µs of ``time.perf_counter``; return ``path``."""
    text = json.dumps(
        {
            "displayTimeUnit": "ms",
            "otherData": {"dropped_spans": trace.dropped},
            "traceEvents": list(_lane_events(trace)),
        },
        separators=(",", ":"),
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write_text(path, text)
    except OSError as error:
        raise ConfigError(f"cannot write trace '{path}': {error.strerror}") from None
    return path


def read_chrome_trace(path: Path) -> dict[str, list[SpanRecord]]:
    """Return the spans of each lane of a written trace; none if it cannot be read."""
    try:
        events = json.loads(read_text(path))["traceEvents"]
        names = {e["tid"]: str(e["args"]["name"]) for e in events if e["name"] == "thread_name"}
        lanes: dict[str, list[SpanRecord]] = {name: [] for name in names.values()}
        for event in events:
            if event["ph"] == "X":
                start_s = event["ts"] / 1e6
                span = (str(event["name"]), start_s, start_s + event["dur"] / 1e6)
                lanes[names[event["tid"]]].append(span)
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return {}
    return lanes


def _lane_events(trace: Trace) -> Iterator[dict[str, Any]]:
    yield _name_event("process_name", 0, "qfleet")
    for tid, lane in enumerate(trace.lanes, start=1):
        yield _name_event("thread_name", tid, lane.name)
        for stage, start_s, end_s in lane.spans():
            yield {
                "ph": "X",
                "pid": PID,
                "tid": tid,
                "name": stage,
                # Three decimals: the clock counts nanoseconds.
                "ts": round(start_s * 1e6, 3),
                "dur": round((end_s - start_s) * 1e6, 3),
            }


def _name_event(kind: str, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": PID, "tid": tid, "name": kind, "args": {"name": name}}
