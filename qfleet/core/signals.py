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
from typing import Any

AT_ONCE_S = 0.5
"""Signals within this time count as one: ``timeout`` signals both the program and its group."""


@contextlib.contextmanager
def signals_request_stop(
    on_signal: Callable[[int], None], clock: Callable[[], float] = time.monotonic
) -> Iterator[None]:
    """Call ``on_signal`` at the first SIGINT or SIGTERM; a later one raises KeyboardInterrupt."""
    first_s: float | None = None

    def handle(number: int, _frame: object) -> None:
        nonlocal first_s
        now_s = clock()
        if first_s is None:
            first_s = now_s
            on_signal(number)
        elif now_s - first_s > AT_ONCE_S:
            raise KeyboardInterrupt

    with handling({signal.SIGINT: handle, signal.SIGTERM: handle}):
        yield


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
def sigterm_unwinds(previous: Any) -> Iterator[None]:
    """Let SIGTERM unwind the block, so that it cleans up, and exit with code 128 + SIGTERM.

    ``previous`` is the handler until now. If it is callable, as that of a run that writes a
    checkpoint, it stays in place.
    """
    if callable(previous):
        with handling({signal.SIGTERM: previous}):
            yield
        return
    received = []

    def leave(number: int, _frame: object) -> None:
        received.append(number)
        raise SystemExit

    with handling({signal.SIGTERM: leave}):
        try:
            yield
        except SystemExit:
            if not received:
                raise
            # Ray, if it was waiting, has replaced our exit code by its own.
            raise SystemExit(128 + received[0]) from None


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
        # Python allows setting handlers only in the main thread, which a notebook may not use.
        with contextlib.suppress(ValueError):
            before[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
