"""A distributed run is compared with one process that has the same settings."""

from __future__ import annotations

import time
from typing import Any

import pytest

from qfleet.core.errors import ConfigError
from qfleet.engines.cluster import processes_hook
from qfleet.engines.cluster.baseline import measured_for_s, serial_rate
from qfleet.engines.cluster.processes_hook import ProcessesHook
from qfleet.telemetry.fleet import FleetAccount, WorkerAccount
from support.configs import tiny_config


class TwoWorkers:
    """Processes that made 100 env steps per second."""

    def account(self) -> FleetAccount:
        return FleetAccount("async", 10.0, 1.0, [WorkerAccount(0), WorkerAccount(1)])

    def env_steps_per_s(self) -> float:
        return 100.0

    def lanes(self) -> list[Any]:
        return []

    def counts(self) -> dict[str, Any]:
        return {}

    def communication(self) -> dict[str, int | None]:
        return {}


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> ProcessesHook:
    monkeypatch.setattr(processes_hook, "serial_rate", lambda *_: 40.0)
    return ProcessesHook(TwoWorkers(), tiny_config(engine="parameter-server", workers=2))


def test_speed_up_and_efficiency_are_those_over_one_process(hook: ProcessesHook) -> None:
    assert hook.on_finish(100.0, lambda: False) == ()
    fleet = hook.result()["fleet"]
    assert fleet["baseline_env_steps_per_s"] == 40.0
    assert (fleet["speed_up"], fleet["efficiency"]) == (2.5, 1.25)


def test_a_run_that_one_process_beats_says_so(
    hook: ProcessesHook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes_hook, "serial_rate", lambda *_: 1800.0)
    (line,) = hook.on_finish(100.0, lambda: False)
    assert "--engine serial" in line
    assert "1,800" in line or "1.8k" in line


def test_a_small_difference_gives_no_advice(
    hook: ProcessesHook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes_hook, "serial_rate", lambda *_: 110.0)
    assert hook.on_finish(100.0, lambda: False) == ()
    assert hook.result()["fleet"]["speed_up"] == pytest.approx(100 / 110)


def test_a_short_run_has_no_baseline(hook: ProcessesHook) -> None:
    assert hook.on_finish(5.0, lambda: False) == ()
    fleet = hook.result()["fleet"]
    assert fleet["baseline_env_steps_per_s"] is fleet["speed_up"] is fleet["efficiency"] is None


def test_a_baseline_that_fails_does_not_spoil_the_run(
    hook: ProcessesHook, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> float:
        raise ConfigError("no room here")

    monkeypatch.setattr(processes_hook, "serial_rate", fail)
    (line,) = hook.on_finish(100.0, lambda: False)
    assert "no room here" in line
    assert hook.result()["fleet"]["speed_up"] is None


def test_the_baseline_takes_a_small_part_of_the_run() -> None:
    assert [measured_for_s(run_s) for run_s in (0.0, 19.0, 40.0, 3600.0)] == [0.0, 0.0, 2.0, 5.0]


def test_the_rate_of_one_process_includes_learning() -> None:
    config = tiny_config(engine="parameter-server", workers=2, learning_starts=50)
    rate = serial_rate(config, 0.3, lambda: False)
    assert rate is not None
    assert rate > 10


def test_the_time_after_the_last_step_does_not_count() -> None:
    config = tiny_config(engine="parameter-server", workers=2, learning_starts=50, steps=400)
    before_s = time.perf_counter()
    rate = serial_rate(config, 60.0, lambda: False)
    assert rate is not None
    assert rate >= 350 / (time.perf_counter() - before_s)


def test_an_interrupt_ends_the_measurement() -> None:
    config = tiny_config(engine="parameter-server", workers=2, learning_starts=50)
    assert serial_rate(config, 600.0, lambda: True) is None


def test_a_process_that_never_learns_has_no_rate() -> None:
    config = tiny_config(engine="actors", workers=2, learning_starts=900, step_latency_s=0.01)
    assert serial_rate(config, 0.05, lambda: False) is None
