"""Prioritised draws: probabilities, weights, sums, and what must never be drawn."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qfleet.core.types import FIRST, SKIP
from qfleet.memory.host_sampler import HostPrioritizedSampler
from qfleet.memory.samplers import BLOCK, HOST_BLOCK, PrioritizedSampler, Window

CPU = torch.device("cpu")


def make(
    rows: int, num_envs: int = 1, alpha: float = 0.6, eps: float = 1e-6, seed: int = 0
) -> PrioritizedSampler:
    generator = torch.Generator().manual_seed(seed)
    return HostPrioritizedSampler(rows, num_envs, alpha, eps, CPU, generator)


def no_flags(rows: int, num_envs: int = 1) -> torch.Tensor:
    return torch.zeros((rows, num_envs), dtype=torch.uint8)


def filled(priority: list[float], alpha: float = 0.6, seed: int = 0) -> PrioritizedSampler:
    """One start per priority."""
    rows = len(priority)
    sampler = make(rows + 1, alpha=alpha, seed=seed)
    sampler.move(Window(0, rows), no_flags(rows + 1))
    sampler.update(torch.arange(rows), torch.tensor(priority))
    return sampler


def assert_consistent(sampler: PrioritizedSampler) -> None:
    """Block sums and minima against a plain recomputation from the leaves."""
    leaves = sampler.leaves.tolist()
    for block in range(len(leaves) // HOST_BLOCK):
        own = leaves[block * HOST_BLOCK : (block + 1) * HOST_BLOCK]
        assert math.isclose(sampler.block_sums[block].item(), math.fsum(own), rel_tol=1e-12)
        positive = [leaf for leaf in own if leaf > 0]
        assert sampler.block_minima[block].item() == min(positive, default=math.inf)


def test_probabilities_follow_the_priorities() -> None:
    priority = [0.1, 1.0, 5.0, 0.0, 2.0, 10.0]
    sampler = filled(priority, alpha=0.7)
    mass = [(p + 1e-6) ** 0.7 for p in priority]
    draws = 60
    counts = torch.zeros(len(priority))
    for _ in range(1000):
        counts += torch.bincount(sampler.draw(draws, 1.0)[0], minlength=len(priority))
    for count, share in zip(counts.tolist(), (m / sum(mass) for m in mass), strict=True):
        # Five deviations of independent draws; stratified ones vary less.
        bound = 5 * math.sqrt(1000 * draws * share * (1 - share)) + 1
        assert abs(count - 1000 * draws * share) < bound


def test_every_slice_of_the_mass_is_drawn_once() -> None:
    sampler = filled([1.0] * 1000)
    index, _ = sampler.draw(100, 1.0)
    assert sorted((index // 10).tolist()) == list(range(100))


def test_a_burst_is_in_random_order_so_that_each_part_of_it_spans_the_memory() -> None:
    sampler = filled([1.0] * 1000)
    parts = sampler.draw(512, 1.0)[0].view(16, 32)
    assert all(part.min() < 250 and part.max() >= 750 for part in parts)


def test_weights_by_hand() -> None:
    # Leaves 1, 4 and 16 (α = 2, ε vanishing): M·P = 3/21, 12/21, 48/21. With β = ½ the weights are
    # (M·P)^-½ ∝ 1, ½, ¼, and the largest is that of the smallest leaf, drawn or not.
    sampler = filled([1.0, 2.0, 4.0], alpha=2.0)
    index, weight = sampler.draw(200, 0.5)
    assert set(index.tolist()) == {0, 1, 2}
    torch.testing.assert_close(weight, torch.tensor([1.0, 0.5, 0.25])[index], rtol=1e-5, atol=0)
    index, weight = sampler.draw(200, 0.0)
    assert weight.tolist() == [1.0] * 200


def test_weights_equal_the_papers_formula() -> None:
    priority = torch.rand(700, generator=torch.Generator().manual_seed(1)) * 3
    sampler = filled(priority.tolist(), alpha=0.6)
    index, weight = sampler.draw(300, 0.4)
    leaf = (priority.double() + 1e-6) ** 0.6
    formula = (700 * leaf / leaf.sum()) ** -0.4
    expected = (formula / formula.max())[index].float()
    torch.testing.assert_close(weight, expected, rtol=1e-4, atol=0)


def test_new_rows_get_the_largest_priority_so_far_when_they_enter() -> None:
    sampler = make(10, alpha=1.0, eps=0.5)
    flags = no_flags(10)
    sampler.move(Window(0, 2), flags)
    assert sampler.draw(1, 1.0)[1].tolist() == [1.0]
    assert sampler.leaves[:3].tolist() == [1.0, 1.0, 0.0]
    sampler.move(Window(0, 3), flags)
    sampler.update(torch.tensor([0, 1]), torch.tensor([3.0, -0.25]))
    sampler.move(Window(0, 5), flags)
    sampler.draw(1, 1.0)
    # Row 2 entered before the error of 3 was seen; rows 3 and 4 after.
    assert sampler.leaves[:6].tolist() == [3.5, 0.75, 1.0, 3.5, 3.5, 0.0]


def test_skipped_left_and_unwritten_slots_are_never_drawn() -> None:
    sampler = make(300, num_envs=2)
    flags = no_flags(300, 2)
    flags[5:290, 0] = SKIP
    flags[:, 1] = SKIP | FIRST
    flags[280, 1] = FIRST
    sampler.move(Window(2, 295), flags)
    expected = {2 * row for row in (2, 3, 4, *range(290, 295))} | {2 * 280 + 1}
    assert set(sampler.draw(2000, 1.0)[0].tolist()) == expected


def test_the_window_may_turn_round_the_ring_and_outrun_itself() -> None:
    sampler = make(10)
    flags = no_flags(10)
    flags[3] = SKIP
    for window, expected in [
        (Window(0, 4), {0, 1, 2}),
        (Window(2, 11), {0, 2, 4, 5, 6, 7, 8, 9}),
        (Window(28, 35), {8, 9, 0, 1, 2, 4}),
    ]:
        sampler.move(window, flags)
        assert set(sampler.draw(1000, 1.0)[0].tolist()) == expected
        assert_consistent(sampler)


def test_updates_of_slots_that_left_change_nothing() -> None:
    sampler = make(10, alpha=1.0)
    sampler.move(Window(0, 5), no_flags(10))
    sampler.draw(1, 1.0)
    sampler.move(Window(2, 5), no_flags(10))
    sampler.update(torch.tensor([0, 1, 2, 7]), torch.tensor([50.0, math.nan, 2.0, 50.0]))
    assert sampler.leaves[:10].tolist() == pytest.approx([0, 0, 2, 1, 1, 0, 0, 0, 0, 0])
    sampler.move(Window(2, 6), no_flags(10))
    sampler.draw(1, 1.0)
    assert sampler.leaves[5].item() == pytest.approx(2.0)  # not 50: nobody there had that error


def test_of_several_errors_for_one_slot_the_largest_counts() -> None:
    sampler = make(4, alpha=1.0, eps=0.25)
    sampler.move(Window(0, 3), no_flags(4))
    sampler.update(torch.tensor([1, 1, 0, 1]), torch.tensor([0.5, 2.0, 0.25, 1.0]))
    assert sampler.leaves[:4].tolist() == [0.5, 2.25, 1.0, 0.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_non_finite_error_counts_as_the_largest_and_poisons_nothing(bad: float) -> None:
    sampler = make(4, alpha=1.0, eps=0.5)
    sampler.move(Window(0, 3), no_flags(4))
    sampler.update(torch.tensor([0, 1, 2]), torch.tensor([bad, 3.5, 0.5]))
    assert sampler.leaves[:4].tolist() == [4.0, 4.0, 1.0, 0.0]
    assert_consistent(sampler)
    index, weight = sampler.draw(90, 1.0)
    assert set(index.tolist()) == {0, 1, 2}
    assert weight.isfinite().all()


def test_powers_that_leave_the_range_of_floats_stay_drawable() -> None:
    sampler = make(3, alpha=20.0, eps=1e-6)
    sampler.move(Window(0, 3), no_flags(3))
    sampler.update(torch.tensor([0, 1, 2]), torch.tensor([0.0, 1e30, 1.0]))
    assert sampler.leaves[0] > 0
    assert sampler.leaves[1] == sampler.leaves[2] > 0
    assert set(sampler.draw(50, 1.0)[0].tolist()) == {1, 2}


def test_no_errors_are_no_change() -> None:
    sampler = filled([1.0, 2.0])
    before = sampler.leaves.clone()
    sampler.update(torch.zeros(0, dtype=torch.int64), torch.zeros(0))
    assert torch.equal(sampler.leaves, before)


@pytest.mark.parametrize(
    "at", [0, 1, HOST_BLOCK - 1, HOST_BLOCK, 2 * HOST_BLOCK - 1, 2 * HOST_BLOCK, 3 * HOST_BLOCK - 2]
)
def test_a_lone_start_is_found_wherever_it_lies(at: int) -> None:
    rows = 3 * HOST_BLOCK - 1
    sampler = make(rows)
    flags = torch.full((rows, 1), SKIP, dtype=torch.uint8)
    flags[at] = 0
    sampler.move(Window(0, rows), flags)
    assert set(sampler.draw(100, 1.0)[0].tolist()) == {at}


def test_rounding_at_the_edges_of_slices_never_reaches_an_ineligible_slot() -> None:
    rows = 4 * HOST_BLOCK
    generator = torch.Generator().manual_seed(2)
    for _ in range(50):
        sampler = make(rows, alpha=1.0)
        flags = torch.randint(0, 2, (rows, 1), generator=generator).to(torch.uint8) * SKIP
        flags[:HOST_BLOCK] = SKIP
        flags[-HOST_BLOCK:] = SKIP
        flags[HOST_BLOCK - 1 :: HOST_BLOCK] = SKIP
        sampler.move(Window(0, rows), flags)
        # So many magnitudes that sums in another order differ in their last bits.
        exponent = torch.rand(rows, generator=generator) * 12 - 6
        sampler.update(torch.arange(rows), 10**exponent)
        edge = sampler.block_sums.cumsum(0) / sampler.block_sums.sum()
        around = [edge, edge.nextafter(edge - 1), edge.nextafter(edge + 1), edge[:1] * 0]
        index = sampler._search(torch.cat(around).clamp(0, 1))
        assert (sampler.leaves[index] > 0).all()


def test_a_million_leaves_are_searched_exactly_enough() -> None:
    rows = 1_000_000
    sampler = make(rows, alpha=1.0)
    sampler.move(Window(0, rows), no_flags(rows))
    priority = torch.rand(rows, generator=torch.Generator().manual_seed(3)) * 9
    sampler.update(torch.arange(rows), priority)
    fraction = torch.rand(2000, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    cumulative = sampler.leaves[:rows].double().cumsum(0)
    expected = torch.searchsorted(cumulative, fraction * cumulative[-1], right=True)
    assert (sampler._search(fraction) - expected).abs().max() <= 1


@settings(derandomize=True, deadline=None, max_examples=40)
@given(st.data())
def test_sums_and_minima_never_drift_from_the_leaves(data: st.DataObject) -> None:
    num_envs = data.draw(st.sampled_from([1, 3, 40]))
    rows = data.draw(st.integers(8, 24)) * (1 if num_envs == 40 else 12)
    sampler = make(rows, num_envs)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    flags = no_flags(rows, num_envs)
    first = stop = 0
    for _ in range(data.draw(st.integers(1, 6))):
        stop += data.draw(st.integers(0, rows))
        first = max(first, stop - rows + data.draw(st.integers(0, 3)))
        stop = max(stop, first)
        flags.copy_(torch.randint(0, 3, flags.shape, generator=generator) // 2 * SKIP)
        sampler.move(Window(first, stop), flags)
        count = data.draw(st.sampled_from([1, 2, 30, 3000]))
        index = torch.randint(rows * num_envs, (count,), generator=generator)
        sampler.update(index, torch.randn(count, generator=generator) * 5)
        assert_consistent(sampler)
        inside = torch.zeros(rows, num_envs, dtype=torch.bool)
        inside[torch.arange(first, stop) % rows] = True
        assert not sampler.leaves[: rows * num_envs][~inside.view(-1)].any()
        assert not sampler.leaves[rows * num_envs :].any()


def test_a_restored_sampler_draws_and_learns_exactly_alike() -> None:
    rows = 700
    flags = no_flags(rows)
    one, two = make(rows, seed=1), make(rows, seed=2)
    two.move(Window(0, 699), flags)  # what it held before must not matter
    two.draw(5, 1.0)
    one.move(Window(0, 500), flags)
    one.update(torch.arange(400), torch.arange(400) / 7)
    one.move(Window(0, 600), flags)
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
    assert torch.equal(one.block_sums, two.block_sums)
    assert torch.equal(one.block_minima, two.block_minima)


class LargeBlocks(HostPrioritizedSampler):
    block = BLOCK


@pytest.mark.parametrize("num_envs", [1, 2])
def test_the_host_draws_and_keeps_what_a_device_would(num_envs: int) -> None:
    rows, random = 900, torch.Generator().manual_seed(1)
    flags = torch.where(torch.rand((rows, num_envs), generator=random) < 0.1, SKIP, 0).byte()
    on_host, plain = (
        kind(rows, num_envs, 0.6, 1e-6, CPU, torch.Generator().manual_seed(0))
        for kind in (LargeBlocks, PrioritizedSampler)
    )
    stop = 5
    for count in [1, 3, 64, 200] * 50:
        stop += int(torch.randint(40, (), generator=random))
        priority = 10 * torch.randn(count, generator=random)
        priority[0] = torch.tensor([torch.nan, torch.inf, 1e-30, 1.0])[stop % 4]
        drawn = []
        for sampler in (on_host, plain):
            sampler.move(Window(max(0, stop - rows + 3), stop), flags)
            middle = sampler.draw(count, 0.4)
            edges = sampler._find_leaves(torch.tensor([0.0, 1.0], dtype=torch.float64), 0.4)
            assert (sampler.leaves[edges[0]] > 0).all()
            drawn.append((*middle, *edges))
            sampler.update(middle[0], priority)
        for ours, theirs in zip(*drawn, strict=True):
            assert torch.equal(ours, theirs)
        for name in ("leaves", "block_minima"):
            assert torch.equal(getattr(on_host, name), getattr(plain, name))
        torch.testing.assert_close(on_host.block_sums, plain.block_sums, rtol=1e-14, atol=0)
