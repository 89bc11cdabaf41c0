from __future__ import annotations

import pytest

from qfleet.telemetry import timers as timers_module
from qfleet.telemetry.timers import STAGES, Span, Timers
from qfleet.telemetry.trace import Trace


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
    used = {"env": 0.2, "learn": 0.5, "idle": pytest.approx(0.3)}
    assert shares == dict.fromkeys(STAGES) | used
    assert timers.usage(10.0) == used


def test_the_usage_of_a_thread_adds_up_to_one() -> None:
    timers = Timers()
    timers.load_state_dict({"env": 8.0, "learn": 8.0})
    assert timers.usage(10.0) == {"env": 0.5, "learn": 0.5, "idle": 0.0}
    timers.threads = 2
    assert timers.usage(10.0) == pytest.approx({"env": 0.4, "learn": 0.4, "idle": 0.2})
    assert timers.usage(0.0) == {}


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


def test_a_lane_gets_every_span(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([10.0, 12.0, 20.0, 21.0])
    monkeypatch.setattr(timers_module, "perf_counter", lambda: next(ticks))
    lane = Trace().lane("env 0")
    timers = Timers(lane)
    with timers.span("env"):
        pass
    with pytest.raises(RuntimeError), timers.span("idle"):
        raise RuntimeError
    assert lane.spans() == [("env", 10.0, 12.0), ("idle", 20.0, 21.0)]
    assert timers.seconds["env"] == 2.0
    assert timers.seconds["idle"] == 1.0


def test_without_a_lane_spans_are_the_plain_ones() -> None:
    # Exactly this class: tracing must cost nothing in a run without a trace.
    assert all(type(Timers().span(stage)) is Span for stage in STAGES)


def test_merged_timers_add_up_and_leave_their_parts_alone() -> None:
    actors, learner = Timers(), Timers()
    actors.load_state_dict({"env": 9.0, "act": 1.0})
    learner.load_state_dict({"act": 2.0, "learn": 4.0, "idle": 3.0})
    both = Timers.merged([actors, learner])
    total = {"env": 9.0, "act": 3.0, "learn": 4.0, "idle": 3.0}
    assert both.state_dict() == dict.fromkeys(STAGES, 0.0) | total
    assert both.threads == 2
    assert actors.seconds["act"] == 1.0
    assert Timers.merged([both, actors]).threads == 3


def test_shares_of_several_threads_add_up_to_their_number() -> None:
    actors, learner = Timers(), Timers()
    actors.load_state_dict({"env": 9.0, "act": 1.0})
    learner.load_state_dict({"learn": 4.0, "idle": 3.0})
    shares = Timers.merged([actors, learner]).shares(10.0)
    used = {"env": 0.9, "act": 0.1, "learn": 0.4, "idle": pytest.approx(0.6)}
    assert shares == dict.fromkeys(STAGES) | used
    assert sum(share or 0.0 for share in shares.values()) == pytest.approx(2.0)


def test_idle_of_several_threads_is_never_negative() -> None:
    busy = Timers()
    busy.load_state_dict({"env": 11.0})
    assert Timers.merged([busy, busy]).shares(10.0)["idle"] == 0.0


def test_merging_one_changes_nothing() -> None:
    alone = Timers()
    alone.load_state_dict({"env": 0.1, "act": 0.2, "learn": 1 / 3})
    assert Timers.merged([alone]).shares(0.7) == alone.shares(0.7)
