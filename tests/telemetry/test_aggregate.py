from __future__ import annotations

import numpy as np
import pytest

from qfleet.telemetry import aggregate
from qfleet.telemetry.aggregate import (
    MAX_GRID_POINTS,
    aggregate_curves,
    bootstrap_ci,
    compare_scores,
    iqm,
    iqm_curve,
)


def test_iqm_by_hand() -> None:
    assert iqm([1, 2, 3, 4, 5, 6, 7, 1000]) == 4.5  # (3 + 4 + 5 + 6) / 4
    assert iqm([100, 2, 3, 1, -50]) == 2.0  # one off each end: (1 + 2 + 3) / 3
    assert iqm([1, 2, 6]) == 3.0  # too few to trim
    assert iqm([7.5]) == 7.5
    with pytest.raises(ValueError, match="no values"):
        iqm([])


def test_bootstrap_of_two_values_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    # Means of resamples are 0, 5, 5, 10 with equal chance, so 2.5 % tails are the extremes.
    assert bootstrap_ci([0.0, 10.0]) == (0.0, 10.0)
    # A 40 % interval holds only the middle half of them.
    monkeypatch.setattr(aggregate, "TAILS", (0.3, 0.7))
    assert bootstrap_ci([0.0, 10.0]) == (5.0, 5.0)


def test_bootstrap_is_near_the_normal_interval_for_many_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(aggregate, "_iqm_last_axis", lambda rows: rows.mean(axis=-1))
    values = np.random.default_rng(1).normal(10.0, 2.0, size=400)
    low, high = bootstrap_ci(values)
    half = 1.96 * values.std() / 20
    assert low == pytest.approx(values.mean() - half, abs=0.03)
    assert high == pytest.approx(values.mean() + half, abs=0.03)


def test_bootstrap_equals_a_loop_over_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aggregate, "RESAMPLES", 200)
    values = np.array([3.0, 1.0, 4.0, 1.0, 5.0, 9.0])
    chosen = np.random.default_rng(0).integers(0, 6, size=(200, 6))
    slow = np.quantile([iqm(values[row]) for row in chosen], (0.025, 0.975))
    assert bootstrap_ci(values) == pytest.approx(tuple(slow))


def test_bootstrap_is_deterministic() -> None:
    values = np.arange(9.0) ** 2
    assert bootstrap_ci(values) == bootstrap_ci(values)
    assert bootstrap_ci([4.0]) == (4.0, 4.0)
    with pytest.raises(ValueError, match="no values"):
        bootstrap_ci([])


def test_curves_meet_on_their_common_range() -> None:
    grid, middle, low, high = aggregate_curves(
        [([0, 100, 200, 300], [0, 10, 20, 30]), ([100, 250], [20, 50])]
    )
    assert grid.tolist() == [100, 200, 250]
    assert middle.tolist() == [15.0, 30.0, 37.5]  # the second curve is 40 at 200
    assert low.tolist() == [10.0, 20.0, 25.0]
    assert high.tolist() == [20.0, 40.0, 50.0]


def test_a_curve_without_bounds_is_that_of_the_one_with_bounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    curves = [([0, 10, 20], [0.0, 1.0, 2.0]), ([5, 20], [4.0, 8.0])]
    with_bounds = aggregate_curves(curves)
    monkeypatch.setattr(aggregate, "_resample", None)  # a bootstrap would fail
    without = iqm_curve(curves)
    for ours, theirs in zip(without, with_bounds[:2], strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert not np.array_equal(without[1], with_bounds[2])
    assert iqm_curve([])[1].size == aggregate_curves([])[1].size == 0


def test_a_repeated_step_counts_once_with_its_last_value() -> None:
    grid, middle, _, _ = aggregate_curves([([200, 100, 100], [5, 1, 3]), ([100, 200], [3, 5])])
    assert grid.tolist() == [100, 200]
    assert middle.tolist() == [3.0, 5.0]


def test_long_curves_are_thinned_and_disjoint_ones_give_nothing() -> None:
    steps = np.arange(5000)
    grid, middle, _, _ = aggregate_curves([(steps, steps), (steps, steps)])
    assert grid.size == MAX_GRID_POINTS
    np.testing.assert_allclose(middle, grid)
    for curves in ([], [([], [])], [([1, 2], [0, 0]), ([3, 4], [0, 0])]):
        assert [part.size for part in aggregate_curves(curves)] == [0, 0, 0, 0]


def test_scores_are_compared_by_their_ranks() -> None:
    assert compare_scores([5, 6, 7, 8], [1, 2, 3, 4]) == "better"  # p = 2 / 70
    assert compare_scores([1, 2, 3, -1e9], [5, 6, 7, 8]) == "worse"
    assert compare_scores([4, 6, 7, 8], [1, 2, 3, 5]) == "cannot tell"  # p = 4 / 70
    assert compare_scores([7, 8, 9], [1, 2, 3]) == "cannot tell"  # p = 2 / 20, at the least
    assert compare_scores([7, 8, 9], [1, 2, 3, 4, 5]) == "better"  # p = 2 / 56
    assert compare_scores([1.0] * 8, [1.0] * 8) == "cannot tell"
    assert compare_scores([9.0], [1.0]) == compare_scores([], [1.0]) == "cannot tell"


def test_equal_distributions_are_told_apart_in_about_one_of_twenty_cases() -> None:
    rng = np.random.default_rng(0)
    verdicts = [compare_scores(*rng.normal(size=(2, 6))) for _ in range(400)]
    assert 0.01 < 1 - verdicts.count("cannot tell") / 400 < 0.07
    many = np.arange(30.0)  # too many to try all splits
    assert compare_scores(many, many + 1) == "cannot tell"
    assert compare_scores(many + 15, many) == "better"
