"""Samplers that never ask the host draw what the asking ones draw."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from qfleet.core.types import FIRST, SKIP
from qfleet.memory.samplers import BLOCK, PrioritizedSampler, UniformSampler, Window
from support.listener import Listener

CPU = torch.device("cpu")


def uniform(capturable: bool, seed: int = 0) -> UniformSampler:
    return UniformSampler(torch.Generator().manual_seed(seed), capturable)


def prioritized(
    rows: int, num_envs: int = 1, alpha: float = 0.6, *, capturable: bool, seed: int = 0
) -> PrioritizedSampler:
    generator = torch.Generator().manual_seed(seed)
    return PrioritizedSampler(rows, num_envs, alpha, 1e-6, CPU, generator, capturable)


def some_skip(rows: int, num_envs: int, share: float, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    skip = torch.rand(rows, num_envs, generator=generator) < share
    first = torch.rand(rows, num_envs, generator=generator) < 0.2
    return (skip * SKIP + first * FIRST).to(torch.uint8)


def eligible(window: Window, flags: Tensor) -> set[int]:
    rows, num_envs = flags.shape
    return {
        row % rows * num_envs + env
        for row in range(*window)
        for env in range(num_envs)
        if not flags[row % rows, env] & SKIP
    }


def count_draws(
    sampler: UniformSampler | PrioritizedSampler, slots: int, draws: int, times: int
) -> Tensor:
    counts = torch.zeros(slots, dtype=torch.int64)
    for _ in range(times):
        counts += torch.bincount(sampler.draw(draws, 1.0)[0], minlength=slots)
    return counts


def chi_square_bound(freedom: int) -> float:
    """Five deviations above the mean of a chi-square variable."""
    return freedom + 5 * math.sqrt(2 * freedom)


# --- uniform ----------------------------------------------------------------------------------

WINDOWS = [Window(0, 40), Window(3, 31), Window(25, 62), Window(1017, 1050)]


@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_every_eligible_start_is_drawn_equally_often(window: Window) -> None:
    flags = some_skip(40, 3, share=0.3)
    sampler = uniform(capturable=True)
    sampler.move(window, flags)
    counts = count_draws(sampler, 120, draws=500, times=100)
    starts = sorted(eligible(window, flags))
    assert counts.sum() == counts[starts].sum()
    expected = 50_000 / len(starts)
    statistic = float(((counts[starts] - expected) ** 2 / expected).sum())
    assert statistic < chi_square_bound(len(starts) - 1)


def test_the_asking_and_the_unasked_one_have_one_distribution() -> None:
    flags, window = some_skip(40, 3, share=0.3), Window(25, 62)
    counts = []
    for capturable in (False, True):
        sampler = uniform(capturable, seed=5)
        sampler.move(window, flags)
        counts.append(count_draws(sampler, 120, draws=500, times=100).double())
    asking, other = (count[sorted(eligible(window, flags))] for count in counts)
    assert asking.min() > 0
    statistic = float(((asking - other) ** 2 / (asking + other)).sum())
    assert statistic < chi_square_bound(len(asking) - 1)


@pytest.mark.parametrize("count", [32, 256])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_a_skip_row_is_never_drawn_where_most_rows_are(window: Window, count: int) -> None:
    flags = some_skip(40, 3, share=0.9, seed=1)
    starts = eligible(window, flags)
    assert 0 < len(starts) < 0.2 * 120
    sampler = uniform(capturable=True)
    sampler.move(window, flags)
    drawn = {i for _ in range(200) for i in sampler.draw(count, 1.0)[0].tolist()}
    assert drawn == starts


def test_a_skip_row_is_never_drawn_in_a_batch_of_one() -> None:
    flags, window = some_skip(40, 3, share=0.9, seed=1), Window(0, 40)
    sampler = uniform(capturable=True)
    sampler.move(window, flags)
    drawn = {i for _ in range(200) for i in sampler.draw(1, 1.0)[0].tolist()}
    assert drawn <= eligible(window, flags)


def test_a_window_that_moves_is_followed_round_the_ring() -> None:
    flags = torch.zeros((10, 2), dtype=torch.uint8)
    flags[3] = SKIP
    sampler = uniform(capturable=True)
    for window in (Window(0, 1), Window(0, 4), Window(2, 11), Window(28, 35), Window(30, 40)):
        sampler.move(window, flags)
        index, weight = sampler.draw(1000, 1.0)
        assert set(index.tolist()) == eligible(window, flags)
        assert weight.tolist() == [1.0] * 1000


def test_a_restored_uniform_sampler_draws_alike() -> None:
    flags = some_skip(40, 3, share=0.3)
    one, two = uniform(True, seed=1), uniform(True, seed=2)
    one.move(Window(0, 30), flags)
    one.draw(17, 1.0)
    two.load_state_dict(one.state_dict())
    for window in (Window(0, 30), Window(25, 62)):
        for sampler in (one, two):
            sampler.move(window, flags)
        for count in (5, 64):
            assert torch.equal(one.draw(count, 1.0)[0], two.draw(count, 1.0)[0])
    assert not torch.equal(one.draw(64, 1.0)[0], uniform(True, seed=3).draw(64, 1.0)[0])


# --- prioritised ------------------------------------------------------------------------------


@pytest.mark.parametrize("capturable", [False, True])
def test_draws_follow_the_priorities(capturable: bool) -> None:
    """Both ways of drawing against P(i), hence against each other."""
    priority = [0.1, 1.0, 5.0, 0.0, 2.0, 10.0]
    sampler = prioritized(7, alpha=0.7, capturable=capturable)
    sampler.move(Window(0, 6), torch.zeros((7, 1), dtype=torch.uint8))
    sampler.update(torch.arange(6), torch.tensor(priority))
    counts = count_draws(sampler, 6, draws=60, times=1000)
    mass = [(p + 1e-6) ** 0.7 for p in priority]
    for count, share in zip(counts.tolist(), (m / sum(mass) for m in mass), strict=True):
        # Five deviations of independent draws; stratified ones vary less.
        assert abs(count - 60_000 * share) < 5 * math.sqrt(60_000 * share * (1 - share)) + 1


def test_every_slice_of_the_mass_is_drawn_once_and_in_random_order() -> None:
    sampler = prioritized(1000, capturable=True)
    sampler.move(Window(0, 1000), torch.zeros((1000, 1), dtype=torch.uint8))
    index = sampler.draw(100, 1.0)[0]
    assert sorted((index // 10).tolist()) == list(range(100))
    parts = sampler.draw(512, 1.0)[0].view(16, 32)
    assert all(part.min() < 250 and part.max() >= 750 for part in parts)


def test_weights_are_those_of_the_asking_one_also_with_beta_in_a_tensor() -> None:
    priority = torch.rand(700, generator=torch.Generator().manual_seed(1)) * 3
    leaf = (priority.double() + 1e-6) ** 0.6
    formula = (700 * leaf / leaf.sum()) ** -0.4
    sampler = prioritized(701, capturable=True)
    sampler.move(Window(0, 700), torch.zeros((701, 1), dtype=torch.uint8))
    sampler.update(torch.arange(700), priority)
    index, weight = sampler.draw(300, torch.tensor(0.4))
    expected = (formula / formula.max())[index].float()
    torch.testing.assert_close(weight, expected, rtol=1e-4, atol=0)


def test_leaves_move_as_those_of_the_asking_one() -> None:
    rows, num_envs = 300, 2
    asking, other = (
        prioritized(rows, num_envs, capturable=capturable) for capturable in (False, True)
    )
    flags = some_skip(rows, num_envs, share=0.5)
    random = torch.Generator().manual_seed(3)
    for window in (Window(0, 4), Window(0, 250), Window(40, 310), Window(700, 990)):
        index = torch.randint(rows * num_envs, (64,), generator=random)
        error = torch.randn(64, generator=random) * 4
        for sampler in (asking, other):
            sampler.move(window, flags)
            sampler.update(index, error)
        assert torch.equal(asking.leaves, other.leaves)
        assert torch.equal(asking.block_sums, other.block_sums)
        assert torch.equal(asking.block_minima, other.block_minima)
        assert set(other.draw(4000, 1.0)[0].tolist()) <= eligible(window, flags)


@pytest.mark.parametrize("at", [0, BLOCK - 1, BLOCK, 2 * BLOCK - 2])
def test_a_lone_start_is_found(at: int) -> None:
    flags = torch.full((2 * BLOCK - 1, 1), SKIP, dtype=torch.uint8)
    flags[at] = 0
    sampler = prioritized(2 * BLOCK - 1, capturable=True)
    sampler.move(Window(0, 2 * BLOCK - 1), flags)
    assert set(sampler.draw(100, 1.0)[0].tolist()) == {at}


def test_a_restored_prioritised_sampler_draws_and_learns_alike() -> None:
    rows = 700
    flags = torch.zeros((rows, 1), dtype=torch.uint8)
    one, two = (prioritized(rows, capturable=True, seed=seed) for seed in (1, 2))
    two.move(Window(0, 699), flags)  # what it held before must not matter
    one.move(Window(0, 500), flags)
    one.update(torch.arange(400), torch.arange(400) / 7)
    two.load_state_dict(one.state_dict())
    for window in (Window(0, 600), Window(150, 840)):
        for sampler in (one, two):
            sampler.move(window, flags)
        for _ in range(3):
            (left, left_weight), (right, right_weight) = one.draw(32, 0.4), two.draw(32, 0.4)
            assert torch.equal(left, right)
            assert torch.equal(left_weight, right_weight)
            for sampler in (one, two):
                sampler.update(left, left_weight * 90)
    assert torch.equal(one.leaves, two.leaves)


# --- capturable ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["uniform", "prioritised"])
def test_no_draw_asks_the_host(kind: str) -> None:
    flags = some_skip(40, 3, share=0.5)
    sampler: UniformSampler | PrioritizedSampler
    sampler = uniform(True) if kind == "uniform" else prioritized(40, 3, capturable=True)
    sampler.move(Window(25, 62), flags)
    with Listener() as listener:
        index, weight = sampler.draw(64, torch.tensor(0.4))
        sampler.update(index, weight)
        sampler.draw(64, torch.tensor(0.4))
    assert listener.asked == []


def test_the_asking_one_does_ask() -> None:
    sampler = uniform(capturable=False)
    sampler.move(Window(25, 62), some_skip(40, 3, share=0.5))
    with Listener() as listener:
        sampler.draw(64, 1.0)
    assert listener.asked
