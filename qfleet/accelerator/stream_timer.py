"""Device time of a piece of work, by events on the stream that does it."""

from __future__ import annotations

from collections import deque

import torch

from qfleet.accelerator.streams import has_streams

MOST_OPEN = 64
"""Most timed calls whose end the device has not reached; further ones are not timed."""


class StreamTimer:
    """A context manager around launches; the host never waits for it.

    One call in ``every`` is timed, and stands for all of them. One thread uses a timer at a time.
    """

    def __init__(self, device: torch.device, every: int = 1) -> None:
        self._device, self._every, self._works = device, every, has_streams(device)
        self._calls, self._timed, self._timed_s = 0, 0, 0.0
        self._open: deque[tuple[torch.Event, torch.Event]] = deque()
        self._start: torch.Event | None = None

    def __enter__(self) -> None:
        self._calls += 1
        self._close()
        if self._works and self._calls % self._every == 0 and len(self._open) < MOST_OPEN:
            self._start = torch.Event(self._device, enable_timing=True)
            self._start.record(torch.accelerator.current_stream(self._device))

    def __exit__(self, *_: object) -> None:
        start, self._start = self._start, None
        if start is None:
            return
        end = torch.Event(self._device, enable_timing=True)
        end.record(torch.accelerator.current_stream(self._device))
        self._open.append((start, end))

    def _close(self) -> None:
        while self._open and self._open[0][1].query():
            start, end = self._open.popleft()
            self._timed += 1
            self._timed_s += start.elapsed_time(end) / 1e3

    @property
    def seconds(self) -> float:
        """Seconds of all calls."""
        self._close()
        return self._timed_s * self._calls / self._timed if self._timed else 0.0

    def add(self, other: StreamTimer) -> None:
        """Count the calls of another timer too."""
        other._close()
        self._calls += other._calls
        self._timed += other._timed
        self._timed_s += other._timed_s

    def reset(self) -> None:
        self._calls, self._timed, self._timed_s = 0, 0, 0.0
        self._open.clear()
