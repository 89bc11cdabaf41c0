"""The ring against the episode model, for random episodes, measures and blocks."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qfleet.core.types import Batch
from qfleet.memory.ring import Ring
from qfleet.memory.samplers import Sampler
from support.episode_model import transition
from support.ring_cases import Case, assert_equal, cases, prioritized, uniform

steady = settings(derandomize=True, deadline=None, max_examples=120)


@steady
@given(cases())
def test_every_eligible_start_gives_the_models_transition(case: Case) -> None:
    ring = case.ring(uniform())
    total = 0
    for turn, length in enumerate(case.block_lengths):
        case.feed(ring, turn, turn + 1)
        total += length
        starts = case.eligible(total)
        assert ring.can_sample() == bool(starts)
        assert len(ring) == min(total, case.rows) * case.num_envs
        if not starts:
            continue
        row = torch.tensor([row for row, _ in starts])
        env = torch.tensor([env for _, env in starts])
        batch = ring.gather(row, env)
        expected = [transition(s, case.n_steps, case.stack) for s in starts.values()]
        np.testing.assert_array_equal(batch.obs, np.stack([e.obs for e in expected]))
        np.testing.assert_array_equal(batch.next_obs, np.stack([e.next_obs for e in expected]))
        assert batch.action.tolist() == [e.action for e in expected]
        assert batch.reward.tolist() == [e.reward for e in expected]
        assert batch.discount.tolist() == [e.discount for e in expected]
        assert batch.weight.tolist() == [1.0] * len(expected)
        assert torch.equal(batch.index, row * case.num_envs + env)


@steady
@given(cases())
def test_samples_are_the_eligible_starts_all_of_them_and_no_other(case: Case) -> None:
    total = sum(case.block_lengths)
    expected = {row * case.num_envs + env for row, env in case.eligible(total)}
    for sampler in (uniform(), prioritized(case.rows, case.num_envs)):
        ring = case.ring(sampler)
        case.feed(ring)
        if not expected:
            with pytest.raises(ValueError, match="nothing to sample"):
                ring.sample(1, 1.0)
            continue
        # So many that the chance to miss one of them is below e^-30.
        count = math.ceil(len(expected) * (math.log(len(expected)) + 30))
        batch = ring.sample(count, 1.0)
        assert set(batch.index.tolist()) == expected
        row, env = batch.index // case.num_envs, batch.index % case.num_envs
        gathered = ring.gather(row, env)
        gathered.weight = batch.weight
        assert_equal(batch, gathered)


@settings(steady, max_examples=60)
@given(cases(), st.integers(0, 8), st.booleans())
def test_a_restored_ring_continues_exactly(case: Case, cut: int, by_priority: bool) -> None:
    def sampler(seed: int) -> Sampler:
        return prioritized(case.rows, case.num_envs, seed) if by_priority else uniform(seed)

    def work(ring: Ring) -> list[Batch]:
        batches = []
        for _ in range(2 if ring.can_sample() else 0):
            batch = ring.sample(5, 0.4)
            ring.update_priorities(batch.index, batch.obs.flatten(1)[:, -1])
            batches.append(batch)
        return batches

    ring = case.ring(sampler(1))
    case.feed(ring, 0, cut)
    work(ring)
    other = case.ring(sampler(2))
    # What a ring held before must not matter.
    case.feed(other, 0, 1)
    other.load_state_dict(ring.state_dict())
    assert len(other) == len(ring)
    for left, right in zip(work(ring), work(other), strict=True):
        assert_equal(left, right)
    case.feed(ring, cut)
    case.feed(other, cut)
    for left, right in zip(work(ring), work(other), strict=True):
        assert_equal(left, right)
