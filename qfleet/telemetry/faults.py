"""Log of faults that a run survived: counts per kind, rate-limited notices, a maximum fault rate.

Every fault is counted, so that nothing is repaired silently; notices are limited in rate, so that
many faults do not flood the screen.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from qfleet.core.errors import FaultRateError

NOTICE_INTERVAL_S = 10.0
KEPT_MESSAGES = 5
MIN_FAULTS_TO_STOP = 10


@dataclass
class _Kind:
    count: int = 0
    first_messages: list[str] = field(default_factory=list)
    unseen: int = 0
    """Faults since the last notice."""
    last_message: str = ""
    noticed_s: float | None = None


class FaultLog:
    """Counter of faults per kind that calls ``notify`` at most once per kind in ten seconds."""

    def __init__(
        self, notify: Callable[[str], None] = lambda _: None, clock: Callable[[], float] = monotonic
    ) -> None:
        self._notify = notify
        self._clock = clock
        self._kinds: dict[str, _Kind] = {}
        self._lock = threading.Lock()  # environments report from other threads
        self.ignores = False  # for a time that is not part of the run
        self.newest = ""  # message

    def __call__(self, kind: str, message: str) -> None:
        if self.ignores:
            return
        now_s = self._clock()
        self.newest = message
        with self._lock:
            entry = self._kinds.setdefault(kind, _Kind())
            entry.count += 1
            entry.unseen += 1
            entry.last_message = message
            if len(entry.first_messages) < KEPT_MESSAGES:
                entry.first_messages.append(message)
            recent = entry.noticed_s is not None and now_s - entry.noticed_s < NOTICE_INTERVAL_S
            notice = None if recent else self._take_notice(kind, entry, now_s)
        if notice is not None:
            self._notify(notice)

    def flush(self) -> None:
        """Send the notices that the rate limit has held back; called at the end of a run."""
        now_s = self._clock()
        with self._lock:
            pending = [(kind, entry) for kind, entry in self._kinds.items() if entry.unseen]
            notices = [self._take_notice(kind, entry, now_s) for kind, entry in pending]
        for notice in notices:
            self._notify(notice)

    @property
    def counts(self) -> dict[str, int]:
        with self._lock:
            return {kind: entry.count for kind, entry in self._kinds.items()}

    def first_messages(self, kind: str) -> list[str]:
        with self._lock:
            entry = self._kinds.get(kind)
            return list(entry.first_messages) if entry else []

    def check_rate(self, kind: str, opportunities: int, max_rate: float) -> None:
        """Raise FaultRateError if more than ``max_rate`` of ``opportunities`` were faults."""
        count = self.counts.get(kind, 0)
        if count < MIN_FAULTS_TO_STOP or count <= max_rate * opportunities:
            return
        raise FaultRateError(
            f"{kind}: {count} faults in {opportunities} exceed the tolerated rate {max_rate:g}; "
            f"first: {self.first_messages(kind)[0]}; fix the cause or raise --max-fault-rate"
        )

    def state_dict(self) -> dict[str, Any]:
        with self._lock:
            return {
                kind: {"count": entry.count, "first_messages": list(entry.first_messages)}
                for kind, entry in self._kinds.items()
            }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        kinds = {
            kind: _Kind(int(saved["count"]), [str(text) for text in saved["first_messages"]])
            for kind, saved in state.items()
        }
        with self._lock:
            self._kinds = kinds

    def _take_notice(self, kind: str, entry: _Kind, now_s: float) -> str:
        text = f"{kind} ×{entry.unseen}: {entry.last_message}"
        entry.unseen = 0
        entry.noticed_s = now_s
        return text
