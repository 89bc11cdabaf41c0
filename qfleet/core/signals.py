"""Signal handling: SIGINT and SIGTERM request a stop; a second one stops at once.

A run stops at its next block and writes a checkpoint. Batch systems, service managers and
``timeout`` may send SIGTERM to all processes of a job at once. Only the main process handles it,
because it needs the others to write the checkpoint.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

AT_ONCE_S = 0.5
"""Signals within this time count as one: ``timeout`` signals both the program and its group."""


class Signals:
    """A context manager that calls ``on_signal`` at the first signal; a later one stops at once."""

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
            except ValueError:  # not the main thread, e.g. of a notebook: handlers cannot be set
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
    """Block SIGTERM for all processes started in this context, and for their children."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_sigterm_if_blocked() -> None:
    """If SIGTERM is blocked in this process, ignore it instead, so that child processes receive it.

    Environments may start programs and end them with SIGTERM.
    """
    if signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ()):
        signal.signal(signal.SIGTERM, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


@contextlib.contextmanager
def sigterm_unwinds(theirs: Any) -> Iterator[None]:
    """Let SIGTERM unwind the block, so that it cleans up, and exit with code 128 + SIGTERM.

    ``theirs`` is the previous handler. If it is callable, as that of a run that writes a
    checkpoint, it stays in place.
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
            # Ray, if it was waiting, has replaced our exit code by its own.
            raise SystemExit(128 + came[0]) from None


@contextlib.contextmanager
def signals_ignored() -> Iterator[None]:
    """Ignore SIGINT and SIGTERM during clean-up, so that a second Ctrl-C does not interrupt it.

    The clean-up must have deadlines.
    """
    with handling({signal.SIGINT: signal.SIG_IGN, signal.SIGTERM: signal.SIG_IGN}):
        yield


@contextlib.contextmanager
def handling(handlers: Mapping[signal.Signals, Any]) -> Iterator[None]:
    """Set signal handlers, and restore the previous ones at exit."""
    before = {}
    for number, handler in handlers.items():
        # Outside the main thread Python does not allow setting handlers.
        with contextlib.suppress(ValueError):
            before[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
