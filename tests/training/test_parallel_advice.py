"""Predictions of layouts, and which layout ``qfleet doctor --parallel`` advises."""

from __future__ import annotations

import gc

import pytest

from qfleet.config.config import Config
from qfleet.core.errors import ConfigError, RankLost, UserError
from qfleet.engines.all_reduce.layout_rates import SIZES, RankReport
from qfleet.networks.parallel.schedule import MICRO_BATCHES_PER_STAGE
from qfleet.training import parallel_advice
from qfleet.training.parallel_advice import (
    Row,
    Sizes,
    choose,
    exchange_seconds,
    layouts,
    measured_settings,
    predict_update_s,
)
from support.messages import says

TIMES = {"all": [1.0, 2.0, 4.0, 10.0], "pair": [0.5, 0.5, 0.5, 0.5]}


WHY = ("too few layers", "is lost", "allocate memory")


def computing(*seconds: float) -> list[RankReport]:
    return [RankReport(0.0, compute_s, 0, [], {}) for compute_s in seconds]


def test_two_ranks_have_three_layouts_and_four_have_six() -> None:
    assert layouts(2) == [Sizes(data=2), Sizes(pipeline=2), Sizes(tensor=2)]
    four = [Sizes(4), Sizes(1, 1, 4), Sizes(1, 4, 1), Sizes(2, 1, 2), Sizes(1, 2, 2), Sizes(2, 2)]
    assert sorted(layouts(4)) == sorted(four)
    assert layouts(4)[0] == Sizes(data=4)


def test_options_name_the_layout() -> None:
    assert Sizes(2, 2, 1).options == "--engine all-reduce --workers 4 --tensor-parallel 2"
    assert str(Sizes(2, 1, 2)) == "data 2 × pipeline 2"
    assert (str(Sizes()), Sizes().options) == ("one process", "")
    assert Sizes(threads=1).options == "--threads 1"


def test_exchanges_take_what_was_measured_at_their_size() -> None:
    assert exchange_seconds([("all", SIZES[1], 3)], TIMES) == 6.0
    halfway = (SIZES[2] + SIZES[3]) // 2
    assert exchange_seconds([("all", halfway, 1)], TIMES) == 7.0
    assert exchange_seconds([("all", 4 * SIZES[3], 1), ("pair", 8, 2)], TIMES) == 41.0


def test_ranks_without_stages_are_as_fast_as_the_slowest() -> None:
    slow = RankReport(0.0, 2.0, 0, [("all", SIZES[0], 1)], TIMES)
    assert predict_update_s(Sizes(tensor=2), [*computing(2.5), slow]) == 3.0


def test_equal_stages_idle_in_the_slots_of_the_schedule() -> None:
    """(p − 1)/(m + p − 1) of the slots, with m micro-batches."""
    stages, micro = 4, 4 * MICRO_BATCHES_PER_STAGE
    predicted = predict_update_s(Sizes(pipeline=stages), computing(1.0, 1.0, 1.0, 1.0))
    assert 1 - 1 / predicted == pytest.approx((stages - 1) / (micro + stages - 1))


def test_stages_follow_the_slowest_of_them() -> None:
    micro = 2 * MICRO_BATCHES_PER_STAGE
    two = predict_update_s(Sizes(pipeline=2), computing(3.0, 1.0))
    assert two == pytest.approx(3.0 + 1.0 / micro)
    # Of two copies with two parts per stage, the second copy's first stage is the slowest.
    eight = computing(1.0, 1.0, 1.0, 1.0, 1.0, 3.0, 1.0, 1.0)
    assert predict_update_s(Sizes(2, 2, 2), eight) == pytest.approx(two)


def rows(*measured: float | None) -> list[Row]:
    sizes = [Sizes(), *layouts(2)]
    return [
        Row(size, 1.0, rate, 1, "" if rate else "too large")
        for size, rate in zip(sizes, measured, strict=True)
    ]


@pytest.mark.parametrize(
    ("measured", "sizes"),
    [
        ((10.0, 8.0, 3.0, 9.0), Sizes()),
        ((10.0, 10.9, 3.0, 9.0), Sizes()),  # too little gained
        ((10.0, 11.0, 3.0, 12.0), Sizes(tensor=2)),
        ((None, None, 2.0, 1.0), Sizes(pipeline=2)),
    ],
)
def test_the_fastest_layout_is_advised_if_it_gains(
    measured: tuple[float | None, ...], sizes: Sizes
) -> None:
    assert choose(rows(*measured)).sizes == sizes


def test_a_network_that_no_layout_can_train_is_refused() -> None:
    with pytest.raises(UserError, match="too large"):
        choose(rows(None, None, None, None))


@pytest.mark.parametrize(
    "loss",
    [
        "rank 1 of 2 is lost: its process 7 was ended by SIGKILL",
        # As another rank than 0 finds it, which has not started the process.
        "rank 2 of 4 is lost: it was killed or stopped, or cannot be reached",
    ],
)
def test_what_one_layout_cannot_do_does_not_end_the_others(
    loss: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors: list[Exception] = [
        ConfigError("too few layers"),
        RankLost(loss),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    ]

    def measure(*_: object) -> list[RankReport]:
        raise errors.pop(0)

    monkeypatch.setattr(
        parallel_advice, "measure_plain", lambda *_: [RankReport(4.0, 2.0, 0, [], {})]
    )
    monkeypatch.setattr(parallel_advice, "measure_ranks", measure)
    monkeypatch.setattr(gc, "collect", lambda: 0)  # of all that the tests before left
    found = parallel_advice.measure_layouts(Config(engine="serial"), 2, 1.0)
    assert [(row.predicted, row.measured) for row in found] == [(0.5, 0.25)] + [(None, None)] * 3
    assert [word in row.refused for word, row in zip(WHY, found[1:], strict=True)] == [True] * 3
    for fault in (RuntimeError("a bug"), RankLost("rank 1 of 2 is lost: ValueError: a bug")):
        errors.append(fault)
        with pytest.raises(type(fault), match="a bug"):
            parallel_advice.measure_layouts(Config(engine="serial"), 2, 1.0)


def test_settings_are_those_of_the_preset_with_the_given_network() -> None:
    config, device, weights = measured_settings(
        "CartPole-v1", {"net_arch": (16,), "batch_size": 48, "device": "cpu"}
    )
    assert (config.batch_size, config.engine, device) == (48, "serial", "cpu")
    assert weights == 4 * 16 + 16 + 16 * 2 + 2
    with pytest.raises(ConfigError, match=says("replay", "MinAtar/Breakout-v1")):
        measured_settings("MinAtar/Breakout-v1", {})
