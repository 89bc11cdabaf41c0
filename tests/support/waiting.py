"""Waiting for a condition, with deadlines that scale with the machine's speed.

A deadline only ends a test that has failed already: it is generous, and each phase of a test has
its own. When one expires, the stacks of this process, and of a child that is named, are printed.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import pytest

from support.processes import descendants

PHASE_S = 60.0
"""For one phase of a test that starts no cluster."""
CLUSTER_S = 120.0
"""For one phase that starts or ends a cluster: a dozen processes that import Ray and PyTorch."""
MOST = 8.0
"""The largest factor: a test that waits longer than this has failed on any machine."""
POLL_S = 0.02
LOOP = 200_000
REFERENCE_S = 0.012
"""Processor time of the loop on the slow cores for which the seconds were chosen."""
ABORTED_S = 10.0
"""For a child to print its stacks and to end, after SIGABRT."""
TITLE = 80
"""Characters of a process's title that a failure shows."""
TAIL = 4000
"""Characters of a child's output that a failure shows."""


@functools.cache
def slowness() -> float:
    """Return the processor time of a fixed loop relative to the reference: above 1 is slower."""
    spent_s = []
    for _ in range(3):
        begin_s = time.process_time()
        total = 0
        for number in range(LOOP):
            total += number
        spent_s.append(time.process_time() - begin_s)
    return min(spent_s) / REFERENCE_S


def deadline(seconds: float) -> float:
    """Scale seconds by the machine's speed and its load; never below ``seconds``."""
    load = os.getloadavg()[0] / (os.cpu_count() or 1)
    return seconds * min(MOST, max(1.0, slowness()) * max(1.0, load))


def wait_until(
    condition: Callable[[], object],
    what: str,
    seconds: float = PHASE_S,
    process: subprocess.Popen[Any] | None = None,
) -> None:
    """Poll until the condition holds.

    Args:
        condition: called about fifty times a second.
        what: the event that is awaited, for the failure's message.
        seconds: the deadline of this phase, before scaling.
        process: fails at once when this child ends; its stacks are printed on expiry.
    """
    limit_s = deadline(seconds)
    until_s = time.monotonic() + limit_s
    while not condition():
        if process is not None and process.poll() is not None:
            # The last thing that it did may have been what is awaited.
            if condition():
                return
            output = _ended(process)
            pytest.fail(f"{what}: the process ended with {process.returncode} first\n{output}")
        if time.monotonic() > until_s:
            expire(f"{what}: not within {limit_s:.0f} s", process)
        time.sleep(POLL_S)


def finish(process: subprocess.Popen[Any], what: str, seconds: float = PHASE_S) -> tuple[Any, Any]:
    """Return a child's output and error output once it has ended."""
    limit_s = deadline(seconds)
    try:
        return process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        expire(f"{what}: not within {limit_s:.0f} s", process)


def expire(message: str, process: subprocess.Popen[Any] | None = None) -> NoReturn:
    """Fail, after printing the stacks of all threads here and of the child's main process.

    The message has the titles of the processes below it.

    Children that ``support.processes`` starts print their stacks on SIGABRT.
    """
    faulthandler.dump_traceback(sys.__stderr__ or 2)
    if process is not None:
        children = descendants(process.pid)  # nobody's, once it has ended
        process.send_signal(signal.SIGABRT)
        message += "\n" + _ended(process, children)
        message += "\n" + "\n".join(
            ["its processes:", *(title[:TITLE] for title in children.values())]
        )
    pytest.fail(message)


def _ended(process: subprocess.Popen[Any], children: Iterable[int] = ()) -> str:
    """The end of what a child printed; it and its children are killed where it does not end."""
    try:
        parts = process.communicate(timeout=ABORTED_S)
    except subprocess.TimeoutExpired:
        process.kill()
        for pid in children:  # one of them may be stopped, and holds the pipes
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            parts = process.communicate(timeout=ABORTED_S)
        except subprocess.TimeoutExpired:
            return "(a process that it left behind holds its output)"
    texts = [part.decode(errors="replace") if isinstance(part, bytes) else part for part in parts]
    return "\n".join(text[-TAIL:] for text in texts if text)
