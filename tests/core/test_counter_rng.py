"""The counter-based random numbers: the hash they claim to be, evenness, independence."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from torch import Tensor

from qfleet.core.counter_rng import (
    draw_below,
    draw_bits,
    draw_uniform,
    first_counters,
    next_counters,
)
from qfleet.envs.device.cartpole import CartPole
from qfleet.envs.device.protocol import begin_episodes, step_episodes

ALL = (1 << 64) - 1
GOLDEN, LANE = 0x9E3779B97F4A7C15, 0xD1342543DE82EF95
# What splitmix64 gives first when seeded with 0, as its authors' and everyone's programs do.
FROM_ZERO = [
    0xE220A8397B1DCDAF,
    0x6E789E6AA1B965F4,
    0x06C45D188009454F,
    0xF88BB8A8724C81EC,
    0x1B39896A51A8749B,
]


def mix(bits: int) -> int:
    """splitmix64's output function, in Python's unbounded ints."""
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 & ALL
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EB & ALL
    return bits ^ bits >> 31


def signed(bits: int) -> int:
    return bits - (1 << 64) if bits >> 63 else bits


def counters_of_many_steps(envs: int, steps: int) -> Tensor:
    """``[steps, envs]``, as environments of the seeds 0, 1, … meet them."""
    counters = [first_counters(torch.arange(envs))]
    while len(counters) < steps:
        counters.append(next_counters(counters[-1]))
    return torch.stack(counters)


def sigmas(values: Tensor, mean: float, variance: float) -> float:
    """How many standard errors the mean of independent values is off."""
    off = abs(float(values.double().mean()) - mean)
    return off / math.sqrt(variance / values.numel())


def test_first_counters_are_splitmix64() -> None:
    assert [mix(number * GOLDEN & ALL) for number in range(1, 6)] == FROM_ZERO
    assert first_counters(torch.arange(1, 6)).tolist() == [signed(bits) for bits in FROM_ZERO]


def test_draws_are_the_upper_half_of_splitmix64() -> None:
    chance = random.Random(0)
    counters = [chance.getrandbits(64) for _ in range(2000)]
    counters += [0, 1, ALL, 1 << 63, (1 << 63) - 1]  # the ends of int64
    drawn = torch.tensor([signed(bits) for bits in counters])
    for lane in (0, 1, 2, 17, 1000):
        expected = [mix(bits + LANE * (lane + 1) & ALL) >> 32 for bits in counters]
        assert draw_bits(drawn, lane).tolist() == expected
        assert draw_uniform(drawn, lane).tolist() == [(bits >> 8) / 2**24 for bits in expected]
        assert draw_below(drawn, lane, 10).tolist() == [bits * 10 >> 32 for bits in expected]
    expected = [signed(bits + GOLDEN & ALL) for bits in counters]
    assert next_counters(drawn).tolist() == expected


def test_uniform_draws_have_the_right_moments() -> None:
    for lane in (0, 1, 5):
        drawn = draw_uniform(counters_of_many_steps(500, 400), lane).double()
        assert drawn.min() >= 0
        assert drawn.max() < 1
        assert sigmas(drawn, 1 / 2, 1 / 12) < 4
        # The mean of (u - ½)² is the variance; its own variance is 1/80 - 1/144.
        assert sigmas((drawn - 0.5).square(), 1 / 12, 1 / 80 - 1 / 144) < 4


def test_uniform_never_reaches_one() -> None:
    """Not even with all bits set: a counter is sought back from that output."""
    bits = ALL
    for shift, factor in ((31, 0x94D049BB133111EB), (27, 0xBF58476D1CE4E5B9), (30, 1)):
        undone = bits
        for _ in range(64 // shift):
            undone = bits ^ undone >> shift
        bits = undone * pow(factor, -1, 1 << 64) & ALL
    counters = torch.tensor([signed(bits - LANE & ALL)])
    assert draw_bits(counters, 0).tolist() == [2**32 - 1]
    assert draw_uniform(counters, 0).tolist() == [1 - 2**-24]
    assert draw_below(counters, 0, 7).tolist() == [6]


@pytest.mark.parametrize("bound", [1, 2, 3, 10, 1000])
def test_draws_below_a_bound_are_even(bound: int) -> None:
    drawn = draw_below(counters_of_many_steps(500, 400), 3, bound)
    assert drawn.min() >= 0
    assert drawn.max() < bound
    counts = torch.bincount(drawn.flatten(), minlength=bound).double()
    expected = drawn.numel() / bound
    chi_square = float(((counts - expected).square() / expected).sum())
    assert chi_square <= (bound - 1) + 4 * math.sqrt(2 * (bound - 1))


def test_a_bound_may_be_a_tensor() -> None:
    counters = first_counters(torch.arange(1000))
    bounds = torch.arange(1000) % 7 + 1
    drawn = draw_below(counters, 1, bounds)
    assert ((drawn >= 0) & (drawn < bounds)).all()
    for bound in range(1, 8):
        picks = bounds == bound
        assert torch.equal(drawn[picks], draw_below(counters, 1, bound)[picks])


def test_draws_do_not_depend_on_how_many_run_beside() -> None:
    seeds = torch.tensor([5, -3, 11, 2**62, 0])
    alone = [first_counters(seeds[i : i + 1]) for i in range(5)]
    together = first_counters(seeds)
    for _ in range(20):
        together, alone = next_counters(together), [next_counters(one) for one in alone]
        for lane in range(3):
            drawn = draw_bits(together, lane)
            assert torch.equal(drawn, torch.cat([draw_bits(one, lane) for one in alone]))

    env, few, many = CartPole(), torch.arange(3), torch.arange(64)
    less, more = begin_episodes(env, few), begin_episodes(env, many)
    for at in range(200):  # through several starts
        actions = (many * 7 + at) // 3 % 2
        less, _ = step_episodes(env, less, actions[:3])
        more, step = step_episodes(env, more, actions)
        assert torch.equal(less.inner["body"], more.inner["body"][:3])
        assert torch.equal(less.over, (step.terminated | step.truncated)[:3])


def test_lanes_steps_and_seeds_are_uncorrelated() -> None:
    lanes, steps, envs = 6, 200, 500
    counters = counters_of_many_steps(envs, steps)
    drawn = torch.stack([draw_uniform(counters, lane) for lane in range(lanes)]).double() - 0.5
    pairs = [(drawn[one], drawn[other]) for one in range(lanes) for other in range(one)]
    for by in (1, 2, 3):
        pairs.append((drawn[:, by:], drawn[:, :-by]))  # steps
        pairs.append((drawn[:, :, by:], drawn[:, :, :-by]))  # neighbouring seeds
        pairs.append((drawn[by:, :-by], drawn[:-by, by:]))  # later steps of lanes before
    for one, other in pairs:
        # A product of two independent draws has mean 0 and variance 1/144.
        assert sigmas(one * other, 0, 1 / 144) < 4


def test_no_lane_or_step_repeats_another() -> None:
    counters = counters_of_many_steps(200, 100)
    bits = torch.stack([draw_bits(counters, lane) for lane in range(8)])
    repeats = bits.numel() - len(bits.unique())
    # 160000 draws of 32 bits: three chance repeats are expected.
    assert repeats < 3 + 4 * math.sqrt(3)


def test_neighbouring_seeds_start_far_apart() -> None:
    counters = first_counters(torch.arange(-1000, 1000))
    assert len(counters.unique()) == 2000
    apart = [signed(int(b) - int(a) & ALL) for a, b in itertools.pairwise(counters)]
    # Nearer than 2^40 of ± 2^63 is a chance of one in millions, for any of them.
    assert min(map(abs, apart)) > 2**40
    # Nor does one walk into the other's draws within a million steps.
    undo = pow(GOLDEN, -1, 1 << 64)
    steps = [signed(difference * undo & ALL) for difference in apart]
    assert min(map(abs, steps)) > 10**6


def test_later_counters_are_those_of_as_many_steps() -> None:
    counters = first_counters(torch.arange(5))
    steps = torch.arange(1, 8).view(-1, 1)
    expected = []
    for _ in range(7):
        expected.append(next_counters(expected[-1] if expected else counters))
    assert torch.equal(next_counters(counters, steps), torch.stack(expected))
