"""Device time by events: timed without waiting, also when the host is far ahead."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from qfleet.accelerator import stream_timer
from qfleet.accelerator.stream_timer import MOST_OPEN, StreamTimer

CUDA = torch.device("cuda")


class Device:
    """A device that has done the first ``done`` pairs of events; each call takes a second."""

    def __init__(self) -> None:
        self.recorded, self.done = 0, 0


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()

    class Event:
        def __init__(self, *_: object, **__: object) -> None:
            self.number = 0

        def record(self, _: object) -> None:
            made.recorded += 1
            self.number = made.recorded

        def query(self) -> bool:
            return self.number <= 2 * made.done

        def elapsed_time(self, _: Any) -> float:
            return 1000.0

    monkeypatch.setattr(stream_timer.torch, "Event", Event)
    monkeypatch.setattr(stream_timer.torch.accelerator, "current_stream", lambda _: None)
    return made


def call(timer: StreamTimer, times: int) -> None:
    for _ in range(times):
        with timer:
            pass


def test_a_timed_call_stands_for_all_calls(device: Device) -> None:
    timer = StreamTimer(CUDA, every=4)
    call(timer, 40)
    assert device.recorded == 2 * 10
    assert timer.seconds == 0.0  # the device has done nothing yet
    device.done = 3
    assert timer.seconds == 40.0
    timer.reset()
    assert timer.seconds == 0.0


def test_a_host_that_was_far_ahead_is_timed_again(device: Device) -> None:
    timer = StreamTimer(CUDA)
    call(timer, MOST_OPEN + 20)
    assert device.recorded == 2 * MOST_OPEN
    device.done = MOST_OPEN
    call(timer, 10)
    assert device.recorded == 2 * (MOST_OPEN + 10)
    assert timer.seconds == MOST_OPEN + 30
    other = StreamTimer(CUDA)
    other.add(timer)
    assert other.seconds == timer.seconds


def test_a_device_without_streams_is_not_timed() -> None:
    timer = StreamTimer(torch.device("cpu"))
    call(timer, 5)
    assert timer.seconds == 0.0
