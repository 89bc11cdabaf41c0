"""A distributed run is compared with one process that has the same settings."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

import qfleet
from qfleet.core.errors import ConfigError, UnknownNameError
from qfleet.engines.cluster import processes_hook
from qfleet.engines.cluster.baseline import measured_for_s, serial_rate, stored_rate
from qfleet.engines.cluster.processes_hook import ProcessesHook
from qfleet.telemetry.fleet import FleetAccount, WorkerAccount
from qfleet.telemetry.usage import Usage
from support.configs import tiny_config, tiny_fields
from support.messages import says


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


def test_efficiency_is_per_worker_at_work_and_the_baseline_is_no_part_of_the_run(
    hook: ProcessesHook, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of four workers never found room, and one was dismissed half way."""
    workers = [WorkerAccount(n, wall_s=s) for n, s in enumerate((10.0, 10.0, 5.0, 0.0))]
    account = FleetAccount("async", 10.0, 1.0, workers)
    monkeypatch.setattr(hook.processes, "account", lambda: account)

    def rate(*_: Any) -> float:
        until = time.process_time() + 0.2
        while time.process_time() < until:
            pass
        return 40.0

    monkeypatch.setattr(processes_hook, "serial_rate", rate)
    hook.on_finish(100.0, lambda: False)
    fleet = hook.result()["fleet"]
    assert (fleet["speed_up"], fleet["efficiency"]) == (2.5, 1.0)
    assert fleet["driver_processor_s"] <= 0.8


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


def finished_run(folder: Path, result: dict[str, Any], **fields: Any) -> Path:
    """Write what a baseline is read from."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(tiny_config(engine="serial", **fields).to_json())
    (folder / "result.json").write_text(json.dumps({"fleet": None, **result}))
    return folder


TOGETHER = tiny_config(engine="parameter-server", workers=4, steps=9999, learning_starts=77)


def test_a_named_run_is_the_baseline_and_nothing_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes_hook, "serial_rate", lambda *_: 1 / 0)
    folder = finished_run(tmp_path / "alone", {"env_steps_per_s": 50.0})
    hook = ProcessesHook(TwoWorkers(), TOGETHER.replace(baseline=str(folder)))
    assert hook.on_finish(5.0, lambda: False) == ()
    fleet = hook.result()["fleet"]
    assert (fleet["baseline_env_steps_per_s"], fleet["speed_up"]) == (50.0, 2.0)


def test_a_named_run_that_is_gone_does_not_spoil_the_run(tmp_path: Path) -> None:
    hook = ProcessesHook(TwoWorkers(), TOGETHER.replace(baseline=str(tmp_path / "gone")))
    (line,) = hook.on_finish(5.0, lambda: False)
    assert "gone" in line
    assert hook.result()["fleet"]["speed_up"] is None


def test_the_rate_of_a_single_worker_is_that_of_its_steps(tmp_path: Path) -> None:
    fleet = {"env_steps_per_s": 70.0, "workers": [{"number": 0}]}
    folder = finished_run(tmp_path, {"env_steps_per_s": 50.0, "fleet": fleet})
    assert stored_rate(folder, TOGETHER) == 70.0


@pytest.mark.parametrize(
    ("result", "fields", "named"),
    [
        ({"env_steps_per_s": 50.0}, {"batch_size": 99}, "batch_size 99 16"),
        ({"env_steps_per_s": 50.0}, {"step_latency_s": 0.5}, "step_latency_s 0.5 0.0"),
        ({"env_steps_per_s": 50.0}, {"env": "Acrobot-v1"}, "env Acrobot-v1 CartPole-v1"),
        ({"env_steps_per_s": 50.0}, {"algo": "double-dqn"}, "algo double-dqn dqn"),
        ({"env_steps_per_s": None}, {}, "no rate result.json"),
        ({"env_steps_per_s": 5.0, "fleet": {"workers": [1, 2]}}, {}, "2 workers one process"),
        ({"env_steps_per_s": 5.0, "fleet": 3}, {}, "no rate"),
    ],
)
def test_a_run_that_is_no_baseline_is_refused(
    result: dict[str, Any], fields: dict[str, Any], named: str, tmp_path: Path
) -> None:
    folder = finished_run(tmp_path, result, **fields)
    with pytest.raises(ConfigError, match=says(*named.split())):
        stored_rate(folder, TOGETHER)
    # Negative control: an equal run is accepted.
    assert stored_rate(finished_run(tmp_path, {"env_steps_per_s": 50.0}), TOGETHER) == 50.0


def test_a_baseline_is_refused_before_anything_starts(tmp_path: Path) -> None:
    folder = finished_run(tmp_path / "alone", {"env_steps_per_s": 50.0}, batch_size=99)
    fields = tiny_fields(engine="parameter-server", workers=2, steps=200)
    with pytest.raises(ConfigError, match=says("batch_size", "99")):
        qfleet.train("CartPole-v1", **fields, baseline=str(folder), run_dir=tmp_path / "run")
    with pytest.raises(UnknownNameError, match=says("nobody")):
        qfleet.train("CartPole-v1", **fields, baseline="nobody", run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_members_are_counted_by_their_reports_and_not_as_children(hook: ProcessesHook) -> None:
    here = Usage(processor_s=99.0, joules=5.0)
    assert hook.usage(here) == Usage(processor_s=1.0, joules=5.0)
    # Of a joined cluster, most of the energy is used elsewhere.
    hook.config = hook.config.replace(address="10.0.0.1:6379")
    assert hook.usage(here) == Usage(processor_s=1.0)


def test_the_baseline_takes_a_small_part_of_the_run() -> None:
    assert [measured_for_s(run_s) for run_s in (0.0, 19.0, 40.0, 3600.0)] == [0.0, 0.0, 2.0, 5.0]


def test_the_rate_of_one_process_includes_learning() -> None:
    config = tiny_config(engine="parameter-server", workers=2, learning_starts=50, steps=200)
    rate = serial_rate(config, 60.0, lambda: False)
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
