"""Deadlines by SIGALRM, and which errors come from signals."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Iterator

import pytest

from qfleet.core.signals import DeadlinePassed, deadline, handling, raise_if_signal


@pytest.fixture
def alarm() -> Iterator[None]:
    """A timer of the caller's program."""
    with handling({signal.SIGALRM: lambda *_: None}):
        signal.setitimer(signal.ITIMER_REAL, 100.0)
        yield
        signal.setitimer(signal.ITIMER_REAL, 0.0)


def wait(seconds: float, limit_s: float) -> None:
    with deadline(limit_s):
        time.sleep(seconds)


@pytest.mark.usefixtures("alarm")
def test_a_deadline_leaves_the_timer_of_the_caller() -> None:
    with pytest.raises(DeadlinePassed):
        wait(30.0, 0.05)
    wait(0.0, 60.0)
    left_s, _ = signal.getitimer(signal.ITIMER_REAL)
    assert 1.0 < left_s <= 100.0


def test_a_deadline_strikes_again_in_code_that_catches_everything() -> None:
    def stubborn() -> None:
        with deadline(0.05):
            with contextlib.suppress(BaseException):
                time.sleep(30.0)
            time.sleep(30.0)

    with pytest.raises(DeadlinePassed):
        stubborn()


def test_an_exit_is_the_users_while_a_handler_of_theirs_is_in_place() -> None:
    raise_if_signal(SystemExit(1))  # an environment's
    with handling({signal.SIGTERM: lambda *_: sys.exit(7)}), pytest.raises(SystemExit):
        raise_if_signal(SystemExit(7))
