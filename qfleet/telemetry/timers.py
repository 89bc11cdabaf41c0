"""Timers: ``with timers.span("env"): ...`` adds up seconds and shares of time per stage."""

from __future__ import annotations

from collections.abc import Iterable
from time import perf_counter
from typing import Any

from qfleet.telemetry.trace import Lane

STAGES = ("env", "act", "copy", "learn", "evaluate", "save", "communicate", "idle")
COMPUTING, COMMUNICATING, WAITING = "computing", "communicating", "waiting"
KINDS = (COMPUTING, COMMUNICATING, WAITING)
KIND_OF = dict.fromkeys(STAGES, COMPUTING) | {"communicate": COMMUNICATING, "idle": WAITING}
"""Stage → kind, for accounts of several processes: computing, communicating or waiting."""


class Span:
    """A context manager that adds its duration to one stage. It is reused, so it cannot nest."""

    __slots__ = ("_seconds", "_stage", "_start_s")

    def __init__(self, seconds: dict[str, float], stage: str) -> None:
        self._seconds = seconds
        self._stage = stage
        self._start_s = 0.0

    def __enter__(self) -> None:
        self._start_s = perf_counter()

    def __exit__(self, *_: object) -> None:
        self._seconds[self._stage] += perf_counter() - self._start_s


class TracedSpan(Span):
    """A span that also records each entry in a lane. A separate class, so that plain spans cost no
    more."""

    __slots__ = ("_lane",)

    def __init__(self, seconds: dict[str, float], stage: str, lane: Lane) -> None:
        super().__init__(seconds, stage)
        self._lane = lane

    def __exit__(self, *_: object) -> None:
        end_s = perf_counter()
        self._seconds[self._stage] += end_s - self._start_s
        self._lane.add(self._stage, self._start_s, end_s)


class Timers:
    """Seconds per stage. Each thread has its own object, because spans of one must not overlap."""

    def __init__(self, trace_lane: Lane | None = None, name: str = "workers") -> None:
        self._lane, self.name = trace_lane, name
        self.threads = 1
        """Number of threads that spent these seconds."""
        self.seconds: dict[str, float] = dict.fromkeys(STAGES, 0.0)
        self._spans: dict[str, Span] = {
            stage: Span(self.seconds, stage)
            if trace_lane is None
            else TracedSpan(self.seconds, stage, trace_lane)
            for stage in STAGES
        }

    def add(self, stage: str, start_s: float, end_s: float) -> None:
        """Add a span that was measured elsewhere, in seconds of ``perf_counter``."""
        self.seconds[stage] += end_s - start_s
        if self._lane is not None and end_s > start_s:
            self._lane.add(stage, start_s, end_s)

    @classmethod
    def merged(cls, several: Iterable[Timers]) -> Timers:
        """Return the summed seconds of several threads: a copy, independent of the originals."""
        total = cls()
        total.threads = 0
        for timers in several:
            total.threads += timers.threads
            for stage, s in timers.seconds.items():
                total.seconds[stage] += s
        return total

    def span(self, stage: str) -> Span:
        return self._spans[stage]

    def shares(self, wall_s: float) -> dict[str, float | None]:
        """Return each stage's share of ``wall_s``; None for stages never entered; idle is the rest.

        Threads overlap, so the shares of merged timers add up to the number of threads, as in
        ``top``: three threads that step environments all the time give env 3.0. Idle is the
        time not spent in any other stage: idle 0.5 is one thread that waited half of the time, or
        two that waited a quarter each.
        """
        if wall_s <= 0:
            return dict.fromkeys(STAGES)
        shares: dict[str, float | None] = {
            stage: s / wall_s if s > 0 else None for stage, s in self.seconds.items()
        }
        busy_s = sum(s for stage, s in self.seconds.items() if stage != "idle")
        shares["idle"] = max(0.0, self.threads - busy_s / wall_s)
        return shares

    def usage(self, wall_s: float) -> dict[str, float]:
        """Return the shares of the stages that were entered, and idle: they add up to 1."""
        present = {stage: s for stage, s in self.shares(wall_s).items() if s is not None}
        # Not more than all of it: the clock of the run and those of the stages differ a little.
        total = max(sum(present.values()), 1e-9)
        return {stage: share / total for stage, share in present.items()}

    def state_dict(self) -> dict[str, float]:
        return dict(self.seconds)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        # In place: the spans refer to this dictionary.
        for stage in STAGES:
            self.seconds[stage] = float(state.get(stage, 0.0))
