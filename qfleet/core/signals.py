"""Signal handling: SIGINT and SIGTERM request a stop; a second one stops at once.

A run stops at its next block and writes a checkpoint. Batch systems, service managers and
``timeout`` may send SIGTERM to all processes of a job at once. Only the main process handles it,
because it needs the others to write the checkpoint.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

AT_ONCE_S = 0.5
"""Signals within this time count as one: ``timeout`` signals both the program and its group."""
FOREIGN_ERRORS = (Exception, SystemExit, KeyboardInterrupt)
"""What an environment may raise: its sys.exit() is a crash of it, and must not end the program."""


class Interrupted(KeyboardInterrupt):
    """A KeyboardInterrupt that a signal has raised, not the code that was running."""


class Terminated(SystemExit):
    """A SystemExit that SIGTERM has raised."""


class DeadlinePassed(BaseException):
    """Raised by ``deadline``. No Exception, because the code that hangs may catch those."""


def raise_if_signal(error: BaseException) -> None:
    """Raise an error again if a signal has raised it, not the environment that was called.

    Python's own handler of Ctrl-C raises a plain KeyboardInterrupt, and that of a user's program
    for SIGTERM a plain SystemExit. While they are in place, and not blocked as in Ray's processes,
    every one of these counts as the user's.
    """
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    is_pythons = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    by_ctrl_c = KeyboardInterrupt if is_pythons and signal.SIGINT not in blocked else Interrupted
    handler = signal.getsignal(signal.SIGTERM)
    is_foreign = callable(handler) and getattr(handler, "__module__", "") != __name__
    by_term = SystemExit if is_foreign and signal.SIGTERM not in blocked else Terminated
    users = (by_ctrl_c, by_term)
    # The context: an environment may catch KeyboardInterrupt and call sys.exit().
    for one in (error, error.__context__):
        if isinstance(one, users):
            raise one


def mark_interrupts() -> None:
    """Let Ctrl-C raise Interrupted from now on, unless it is ignored, as in a background job."""

    def interrupt(*_: object) -> None:
        raise Interrupted

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)


@contextlib.contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Raise DeadlinePassed in a block that takes longer; only the main thread has this limit.

    By SIGALRM, not by running the block in another thread: some environments (OpenGL, browsers,
    databases) can only be closed by the thread that made them.
    """

    def expire(*_: object) -> None:
        raise DeadlinePassed

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    began_s, left_s, every_s = time.monotonic(), 0.0, 0.0
    try:
        with handling({signal.SIGALRM: expire}):
            # Again every second: the block may catch the first one.
            left_s, every_s = signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
            try:
                yield
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        if left_s:  # a timer of the caller
            left_s = max(0.001, left_s - (time.monotonic() - began_s))
            signal.setitimer(signal.ITIMER_REAL, left_s, every_s)


@contextlib.contextmanager
def signals_request_stop(
    on_signal: Callable[[int], None], clock: Callable[[], float] = time.monotonic
) -> Iterator[None]:
    """Call ``on_signal`` at the first SIGINT or SIGTERM; a later one raises Interrupted."""
    first_s: float | None = None

    def handle(number: int, _frame: object) -> None:
        nonlocal first_s
        now_s = clock()
        if first_s is None:
            first_s = now_s
            on_signal(number)
        elif now_s - first_s > AT_ONCE_S:
            raise Interrupted

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
        ignore_sigterm()


def ignore_sigterm() -> None:
    """Ignore SIGTERM in this process, but not in programs that it starts."""
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
        raise Terminated

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
