"""The process that trains: what it refuses, what it lets be saved, and what it adds up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from qfleet.core.errors import ConfigError, MemoryRefusedError, QfleetError, UserError
from qfleet.engines.parameter_server.supervisor import Supervisor, WorkerState
from qfleet.engines.parameter_server.worker import Report
from qfleet.engines.registry import build
from qfleet.telemetry.faults import FaultLog
from qfleet.telemetry.timers import STAGES
from qfleet.training.divergence import DivergenceGuard
from support.messages import says
from support.server_runs import make_config


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"precision": "tf32"}, ConfigError, "precision tf32"),
        ({"device": "nowhere"}, ConfigError, "device nowhere"),
        # Each of a thousand workers would find room for its thousandth.
        (
            {"buffer_size": 10**11, "steps": 10**11, "workers": 1000},
            MemoryRefusedError,
            "100000000000",
        ),
        ({"workers": 10**6}, UserError, "1000001 processes"),
    ],
)
def test_what_every_worker_would_refuse_is_refused_once(
    fields: dict[str, Any], error: type[QfleetError], words: str
) -> None:
    with pytest.raises(error, match=says(*words.split())):
        build(make_config(**fields), FaultLog())


def test_other_machines_are_asked_themselves() -> None:
    parts = build(make_config(precision="tf32", address="10.0.0.1:6379"), FaultLog())
    parts.close()
    assert parts.config.precision == "tf32"


@pytest.mark.parametrize(("largest", "bad"), [(5.0, set()), (1e9, {0})])
def test_values_that_exploded_on_workers_keep_a_checkpoint_from_being_written(
    largest: float, bad: set[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = make_config()
    parts = build(config, FaultLog())
    told = {"abs_q_max": largest, "skipped": 0.0}
    monkeypatch.setattr(parts.collector, "metrics", lambda: told)
    assert DivergenceGuard(config, FaultLog(), tmp_path).bad(parts) == bad
    parts.close()


def report_of(updates: int, env_steps: int, skipped: float, env_s: float) -> Report:
    return Report(
        env_steps=env_steps,
        updates=updates,
        episodes=[],
        metrics={"abs_q_max": 1.0, "skipped": skipped},
        exploration_rate=0.1,
        wall_s=1.0,
        slice_s=1.0,
        seconds=dict.fromkeys(STAGES, 0.0) | {"env": env_s},
        processor_s=1.0,
        traffic={},
        faults={},
        spans=[],
        clock_s=0.0,
        lost_servers=(),
        host="here",
        pid=1,
    )


def test_what_others_of_a_number_and_earlier_sittings_did_counts() -> None:
    """A worker that died had skipped gradients, and its time was spent: neither is forgotten."""
    config = make_config(workers=2)
    parts = build(config, FaultLog())
    fleet = parts.collector
    fleet.load_state_dict({"update": config.update, "optimiser": {}, "skipped": 7.0})
    parts.clock.env_steps, parts.clock.updates = 1000, 100
    parts.timers[0].seconds["env"] = 50.0
    # A run that is told to stop at once; then as if it had gone on.
    fleet.run(lambda: False, lambda: 1.0)
    workers = {
        0: WorkerState(0, report=report_of(3, 30, 1.0, 2.0), earlier=[report_of(5, 50, 4.0, 6.0)]),
        1: WorkerState(1, report=report_of(10, 100, 0.0, 10.0)),
    }
    nothing: Any = None
    supervisor = Supervisor(parts.setup, nothing, nothing, 1000, lambda: 1.0)
    supervisor.workers.update(workers)
    fleet._supervisor = supervisor
    fleet._settle_clock(supervisor)
    assert (parts.clock.env_steps, parts.clock.updates) == (1180, 118)
    assert parts.timers[0].seconds["env"] == 50.0 + (2.0 + 6.0 + 10.0) / 2
    assert fleet.metrics()["skipped"] == 7.0 + 1.0 + 4.0
    assert fleet.state_dict()["skipped"] == 12.0
    parts.close()
