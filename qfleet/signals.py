"""Ctrl-C and SIGTERM, turned into a request that the run grants at its next block.

Whoever ends a job may send SIGTERM to all its processes at once: batch systems, service managers
and ``timeout`` do. The run alone is to heed it, since it needs the others for its checkpoint.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any


class Signals:
    """Hands the first signal to ``on_signal``; a second one ends the program at once."""

    def __init__(self, on_signal: Callable[[int], None]) -> None:
        self._on_signal = on_signal
        self._came = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self._previous[number] = signal.signal(number, self._handle)
            except ValueError:  # not the main thread, e.g. a notebook's worker: nothing to catch
                return

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self._came:
            raise KeyboardInterrupt
        self._came = True
        self._on_signal(number)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def unheard_by_children() -> Iterator[None]:
    """Processes that are started in here never hear SIGTERM, nor do those that they start."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def shrug_if_unheard() -> None:
    """Where SIGTERM is not heard it does nothing still, but those that are started hear it again.

    Environments may start programs, and end them that way.
    """
    if signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ()):
        signal.signal(signal.SIGTERM, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
