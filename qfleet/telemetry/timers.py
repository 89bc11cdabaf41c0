"""Where the time goes. In: ``with timers.span("env"): ...``; out: seconds and shares per stage."""

from __future__ import annotations

from time import perf_counter
from typing import Any

STAGES = ("env", "act", "copy", "learn", "communicate", "idle")


class Span:
    """Adds the time spent inside it to one stage. One object per stage, so it cannot nest."""

    __slots__ = ("_seconds", "_stage", "_start_s")

    def __init__(self, seconds: dict[str, float], stage: str) -> None:
        self._seconds = seconds
        self._stage = stage
        self._start_s = 0.0

    def __enter__(self) -> None:
        self._start_s = perf_counter()

    def __exit__(self, *_: object) -> None:
        self._seconds[self._stage] += perf_counter() - self._start_s


class Timers:
    """Seconds per stage. Each thread keeps its own: spans of one object must not overlap."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(STAGES, 0.0)
        self._spans = {stage: Span(self.seconds, stage) for stage in STAGES}

    def span(self, stage: str) -> Span:
        return self._spans[stage]

    def shares(self, wall_s: float) -> dict[str, float | None]:
        """Share of ``wall_s`` per stage; None for stages never entered; idle is the rest."""
        if wall_s <= 0:
            return dict.fromkeys(STAGES)
        shares: dict[str, float | None] = {
            stage: s / wall_s if s > 0 else None for stage, s in self.seconds.items()
        }
        busy_s = sum(s for stage, s in self.seconds.items() if stage != "idle")
        shares["idle"] = max(0.0, 1.0 - busy_s / wall_s)
        return shares

    def state_dict(self) -> dict[str, float]:
        return dict(self.seconds)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        # In place: the spans hold this very dictionary.
        for stage in STAGES:
            self.seconds[stage] = float(state.get(stage, 0.0))
