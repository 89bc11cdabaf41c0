"""The arithmetic of parallel gradient descent: by hand, against the closed form, for any cut."""

from __future__ import annotations

import numpy as np
import pytest

from qfleet.core.errors import ConfigError
from qfleet.lab.mapreduce import (
    Problem,
    Slowness,
    broadcast_bytes,
    check_size,
    gradient,
    gradient_bytes,
    loss,
    make_problem,
    map_and_reduce,
    map_samples,
    shares,
)
from support.descents import descend
from support.messages import says

FEATURES = np.array([[1.0, 2.0], [3.0, -1.0], [0.0, 1.0]])
TARGETS = np.array([4.0, 1.0, 2.0])
WEIGHTS = np.array([1.0, 0.5])
# Residuals x·w − y: 2 − 4, 2.5 − 1, 0.5 − 2.
VECTORS = [[-2.0, -4.0], [4.5, -1.5], [0.0, -1.5]]


def test_gradients_and_loss_by_hand() -> None:
    assert map_samples(FEATURES, TARGETS, WEIGHTS).tolist() == VECTORS
    assert map_and_reduce(FEATURES, TARGETS, WEIGHTS).tolist() == [[2.5, -7.0]]
    assert loss(FEATURES, TARGETS, WEIGHTS) == (4 + 2.25 + 2.25) / 6


def test_reduce_by_hand() -> None:
    vectors = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, -3.0], [0.0, 1.0]])
    for parts in ([vectors], [vectors[:3], vectors[3:]], list(vectors[:, None])):
        assert gradient(parts, 1).tolist() == [9.0, 4.0]
        assert gradient(parts, 4).tolist() == [2.25, 1.0]


def test_the_gradient_is_the_loss_s_own_by_differences() -> None:
    found = gradient([map_and_reduce(FEATURES, TARGETS, WEIGHTS)], 3)
    for i in range(2):
        step = np.eye(2)[i] * 1e-6
        above, below = (loss(FEATURES, TARGETS, WEIGHTS + sign * step) for sign in (1, -1))
        assert found[i] == pytest.approx((above - below) / 2e-6, abs=1e-8)


def test_the_size_that_is_advised_is_taken() -> None:
    with pytest.raises(ConfigError, match=says("--samples", "416")):
        check_size(417, 9, available_bytes=100_000)  # 3 copies of 10 numbers of 8 bytes each
    check_size(416, 9, available_bytes=100_000)
    with pytest.raises(ConfigError, match=says("--features")):
        check_size(100, 100, available_bytes=100_000)


def test_one_round_by_hand() -> None:
    weights = descend(Problem(FEATURES, TARGETS), 2, 1, rate=0.3, local_reduction=True)
    # At 0 the residuals are −4, −1, −2: the gradient is [−7, −9] / 3.
    assert weights[0].tolist() == [0.0, 0.0]
    assert weights[1] == pytest.approx([0.7, 0.9])


def test_descent_reaches_the_closed_form() -> None:
    problem = make_problem(400, 7, noise=0.5, seed=1)
    weights = descend(problem, 3, 400, rate=0.3, local_reduction=True)
    normal = np.linalg.solve(problem.curvature, problem.features.T @ problem.targets / 400)
    assert problem.solution == pytest.approx(normal, rel=1e-10)
    assert problem.distance(weights[-1]) < 1e-12
    assert problem.distance(weights[0]) == 1.0


def test_excess_loss_is_the_difference_of_two_losses() -> None:
    problem = make_problem(50, 4, noise=1.0, seed=2)
    weights = problem.solution + 0.1
    difference = loss(problem.features, problem.targets, weights) - problem.least_loss
    assert problem.excess_loss(weights) == pytest.approx(difference, rel=1e-9)
    assert problem.excess_loss(problem.solution) == 0.0
    assert problem.least_loss > 0


@pytest.mark.parametrize(("share", "converges"), [(0.99, True), (1.01, False)])
def test_the_largest_rate_divides_convergence_from_divergence(
    share: float, converges: bool
) -> None:
    problem = make_problem(60, 3, noise=0.1, seed=3)
    rate = share * problem.largest_rate
    weights = descend(problem, 2, 2000, rate, local_reduction=True)
    assert (problem.distance(weights[-1]) < problem.distance(weights[0])) is converges


@pytest.mark.parametrize("workers", [2, 3, 7, 50])
def test_any_number_of_workers_is_one(workers: int) -> None:
    problem = make_problem(50, 37, noise=0.3, seed=4)
    one, several = (descend(problem, m, 30, 0.2, local_reduction=True) for m in (1, workers))
    assert several == pytest.approx(one, rel=1e-12, abs=1e-13)


@pytest.mark.parametrize("workers", [2, 3, 7, 50])
def test_without_local_reduction_the_cut_changes_no_bit(workers: int) -> None:
    problem = make_problem(50, 37, noise=0.3, seed=4)
    one, several = (descend(problem, m, 30, 0.2, local_reduction=False) for m in (1, workers))
    assert np.array_equal(several, one)


def test_local_reduction_changes_the_traffic_and_nothing_else() -> None:
    problem = make_problem(120, 5, noise=0.3, seed=5)
    reduced, whole = (
        descend(problem, 4, 40, 0.2, local_reduction=reduction) for reduction in (True, False)
    )
    assert reduced == pytest.approx(whole, rel=1e-12, abs=1e-13)
    assert gradient_bytes(4, 120, 5, local_reduction=True) == 4 * 5 * 8
    assert gradient_bytes(4, 120, 5, local_reduction=False) == 120 * 5 * 8
    assert broadcast_bytes(4, 5) == 4 * 5 * 8


@pytest.mark.parametrize(("samples", "workers"), [(10, 3), (7, 7), (8, 1), (100, 6)])
def test_shares_are_a_partition_and_even(samples: int, workers: int) -> None:
    cuts = shares(samples, workers)
    assert [i for cut in cuts for i in range(samples)[cut]] == list(range(samples))
    sizes = [cut.stop - cut.start for cut in cuts]
    assert len(sizes) == workers
    assert max(sizes) - min(sizes) <= 1


def test_data_are_the_seed_s() -> None:
    first, again, other = (make_problem(20, 3, 0.1, seed) for seed in (1, 1, 2))
    assert np.array_equal(first.features, again.features)
    assert np.array_equal(first.targets, again.targets)
    assert not np.array_equal(first.features, other.features)


def test_without_noise_the_fit_is_exact() -> None:
    assert make_problem(20, 3, 0.0, 0).least_loss < 1e-25


def test_slowness_is_read_as_it_is_written() -> None:
    assert Slowness.parse("4x") == Slowness(factor=4.0)
    assert Slowness.parse("2.5ms") == Slowness(latency_s=0.0025)
    assert Slowness.parse("4x").pause_s(0.5) == 1.5
    assert Slowness.parse("50ms").pause_s(0.5) == 0.05
    assert Slowness().pause_s(0.5) == 0.0


@pytest.mark.parametrize("text", ["4", "0.5x", "-3ms", "x", "50 s", ""])
def test_bad_slowness_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="straggler"):
        Slowness.parse(text)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"dimensions": 0}, "features 0"),
        ({"samples": 2}, "samples 2 features 3"),
        ({"noise": -1.0}, "noise"),
        ({"seed": -1}, "seed"),
    ],
)
def test_bad_problems_are_refused(change: dict[str, float], named: str) -> None:
    given = {"samples": 10, "dimensions": 3, "noise": 0.1, "seed": 0} | change
    with pytest.raises(ConfigError, match=says(*named.split())):
        make_problem(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize("workers", [0, 11])
def test_a_worker_without_samples_is_refused(workers: int) -> None:
    with pytest.raises(ConfigError, match=says("workers", str(workers))):
        shares(10, workers)
