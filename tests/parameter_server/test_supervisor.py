"""The process that trains, before it starts anybody: what it refuses, and what it lets be saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_worker import make_config

from qfleet.build import build
from qfleet.errors import ConfigError, MemoryRefusedError, QfleetError, UserError
from qfleet.telemetry.faults import FaultLog
from qfleet.watch import Watch


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"precision": "bf16"}, ConfigError, "precision 'bf16' is for accelerators"),
        ({"device": "nowhere"}, ConfigError, "device 'nowhere' is not usable here"),
        # Each of a thousand workers would find room for its thousandth.
        (
            {"buffer_size": 10**11, "workers": 1000},
            MemoryRefusedError,
            "replay of 100000000000 transitions needs",
        ),
        ({"workers": 10**6}, UserError, "1000001 processes cannot be on this machine"),
    ],
)
def test_what_every_worker_would_refuse_is_refused_once(
    fields: dict[str, Any], error: type[QfleetError], words: str
) -> None:
    with pytest.raises(error, match=words):
        build(make_config(**fields), FaultLog())


def test_other_machines_are_asked_themselves() -> None:
    build(make_config(precision="bf16", address="10.0.0.1:6379"), FaultLog()).close()


@pytest.mark.parametrize(("largest", "bad"), [(5.0, set()), (1e9, {0})])
def test_values_that_exploded_on_workers_keep_a_checkpoint_from_being_written(
    largest: float, bad: set[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = make_config()
    parts = build(config, FaultLog())
    assert parts.fleet is not None
    told = {"abs_q_max": largest, "skipped": 0.0}
    monkeypatch.setattr(parts.fleet, "metrics", lambda: told)
    assert Watch(config, FaultLog(), tmp_path).bad(parts) == bad
    parts.close()
