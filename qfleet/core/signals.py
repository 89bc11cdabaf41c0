"""Ctrl-C and SIGTERM: a request that the run grants at its next block, or a way out that tidies up.

Whoever ends a job may send SIGTERM to all its processes at once: batch systems, service managers
and ``timeout`` do. The run alone is to heed it, since it needs the others for its checkpoint.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

AT_ONCE_S = 0.5
"""Signals so close together are one: ``timeout`` sends its own to the program and to its group."""


class Signals:
    """Hands the first signal to ``on_signal``; a later one ends the program at once."""

    def __init__(
        self, on_signal: Callable[[int], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._on_signal, self._clock = on_signal, clock
        self._came_s: float | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self._previous[number] = signal.signal(number, self._handle)
            except ValueError:  # not the main thread, e.g. a notebook's worker: nothing to catch
                return

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        now_s = self._clock()
        if self._came_s is None:
            self._came_s = now_s
            self._on_signal(number)
        elif now_s - self._came_s > AT_ONCE_S:
            raise KeyboardInterrupt

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def blocked_in_children() -> Iterator[None]:
    """Processes that are started in here never hear SIGTERM, nor do those that they start."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_sigterm_if_blocked() -> None:
    """Where SIGTERM is not heard it does nothing still, but those that are started hear it again.

    Environments may start programs, and end them that way.
    """
    if signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ()):
        signal.signal(signal.SIGTERM, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


@contextlib.contextmanager
def sigterm_unwinds(theirs: Any) -> Iterator[None]:
    """SIGTERM unwinds the block, so that it is tidied up, and ends with the usual code.

    Whoever handled it before, as a run does that wants its checkpoint, goes on doing so.
    """
    if callable(theirs):
        with handling({signal.SIGTERM: theirs}):
            yield
        return
    came = []

    def leave(number: int, _frame: object) -> None:
        came.append(number)
        raise SystemExit

    with handling({signal.SIGTERM: leave}):
        try:
            yield
        except SystemExit:
            if not came:
                raise
            # Ray, where it was waiting, has put a code of its own in place of ours.
            raise SystemExit(128 + came[0]) from None


@contextlib.contextmanager
def signals_ignored() -> Iterator[None]:
    """For tidying up, which a second Ctrl-C must not leave half done; it needs deadlines."""
    with handling({signal.SIGINT: signal.SIG_IGN, signal.SIGTERM: signal.SIG_IGN}):
        yield


@contextlib.contextmanager
def handling(handlers: Mapping[signal.Signals, Any]) -> Iterator[None]:
    before = {}
    for number, handler in handlers.items():
        # Outside the main thread signals are somebody else's business.
        with contextlib.suppress(ValueError):
            before[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
