"""The helpers of the tests: key words of messages, waiting, and children that hear signals."""

from __future__ import annotations

import os
import signal

import pytest

from support import waiting
from support.messages import holds, says
from support.processes import descendants, needs_proc, python, start, state_of
from support.waiting import deadline, finish, wait_until

ASLEEP = """
import time
def asleep():
    print("on", flush=True)
    time.sleep(3600)
asleep()
"""


def test_key_words_are_found_in_any_order_and_as_whole_words() -> None:
    with pytest.raises(ValueError, match=says("steps", "-1")):
        raise ValueError("-1 is no number of\nsteps")
    assert not holds("steps -10", "steps", "-1")
    assert not holds("steps_s -1", "steps", "-1")
    assert holds("in 'a.b' (x)", "'a.b'", "(x)")


def test_deadlines_grow_with_the_machines_slowness_and_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    for load, slowness, expected in [(0.5, 0.4, 10), (6, 0.4, 30), (6, 2, 60), (99, 2, 80)]:
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, 0, 0))
        monkeypatch.setattr(waiting, "slowness", lambda slowness=slowness: slowness)
        assert deadline(10) == expected


def test_an_expired_wait_names_the_event_and_shows_the_childs_stack(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    child = start(python("-c", ASLEEP))
    assert child.stdout.readline() == "on\n"
    monkeypatch.setattr(waiting, "deadline", lambda _: 0.0)
    with pytest.raises(pytest.fail.Exception) as caught:
        wait_until(lambda: False, "the event", process=child)
    assert holds(str(caught.value), "the event", "in asleep")
    assert child.returncode == -signal.SIGABRT


@needs_proc
def test_an_expired_wait_does_not_wait_for_a_stopped_grandchild(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stopped = "import os; os.kill(os.getpid(), 19)"
    child = start(
        python(
            "-c", f"import subprocess, sys; subprocess.call([sys.executable, '-c', {stopped!r}])"
        )
    )
    wait_until(lambda: "T" in map(state_of, descendants(child.pid)), "a stopped process")
    monkeypatch.setattr(waiting, "deadline", lambda _: 0.0)
    monkeypatch.setattr(waiting, "ABORTED_S", 0.5)
    with pytest.raises(pytest.fail.Exception, match=says("the event")):
        finish(child, "the event")


def test_a_wait_ends_when_its_child_does() -> None:
    child = start(python("-c", "raise SystemExit('no licence')"))
    with pytest.raises(pytest.fail.Exception, match=says("the event", "1", "no licence")):
        wait_until(lambda: False, "the event", process=child)


def test_children_hear_sigint_where_it_is_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        child = start(python("-c", ASLEEP))
    finally:
        signal.signal(signal.SIGINT, before)
    assert child.stdout.readline() == "on\n"
    child.send_signal(signal.SIGINT)
    _, error = finish(child, "the end after the signal")
    assert child.returncode == -signal.SIGINT
    assert "KeyboardInterrupt" in error
