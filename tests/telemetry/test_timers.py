from __future__ import annotations

import pytest

from qfleet.telemetry import timers as timers_module
from qfleet.telemetry.timers import STAGES, Timers


def test_spans_add_up_the_time_inside_them(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([10.0, 12.0, 20.0, 21.0, 30.0, 34.0])
    monkeypatch.setattr(timers_module, "perf_counter", lambda: next(ticks))
    timers = Timers()
    for stage in ("env", "env", "learn"):
        with timers.span(stage):
            pass
    assert timers.seconds["env"] == 3.0
    assert timers.seconds["learn"] == 4.0
    assert timers.seconds["act"] == 0.0


def test_a_span_is_reused_and_counts_when_its_body_raises() -> None:
    timers = Timers()
    assert timers.span("env") is timers.span("env")
    with pytest.raises(RuntimeError), timers.span("env"):
        raise RuntimeError
    assert timers.seconds["env"] > 0


def test_shares_give_none_for_unused_stages_and_the_rest_to_idle() -> None:
    timers = Timers()
    timers.load_state_dict({"env": 2.0, "learn": 5.0, "idle": 1.0})
    shares = timers.shares(10.0)
    assert shares == {
        "env": 0.2,
        "act": None,
        "copy": None,
        "learn": 0.5,
        "communicate": None,
        "idle": pytest.approx(0.3),
    }


def test_idle_is_never_negative_and_no_wall_time_has_no_shares() -> None:
    timers = Timers()
    timers.load_state_dict({"env": 8.0, "learn": 8.0})
    assert timers.shares(10.0)["idle"] == 0.0
    assert timers.shares(0.0) == dict.fromkeys(STAGES)


def test_state_survives_and_spans_go_on_adding() -> None:
    first = Timers()
    first.load_state_dict({"act": 3.0})
    second = Timers()
    second.load_state_dict(first.state_dict())
    with second.span("act"):
        pass
    assert second.seconds["act"] > 3.0
    assert first.seconds["act"] == 3.0


def test_an_unknown_stage_is_refused() -> None:
    with pytest.raises(KeyError):
        Timers().span("lunch")
