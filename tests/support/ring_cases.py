"""Rings to test with: samplers from seeds, and a case of episodes to fill a ring with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from hypothesis import strategies as st

from qfleet.core.types import BATCH_FIELDS, Batch
from qfleet.memory.host_sampler import HostPrioritizedSampler
from qfleet.memory.ring import Ring
from qfleet.memory.samplers import Sampler, UniformSampler
from support.episode_model import (
    FAULT,
    GAMMA,
    LIFE_LOST,
    PLAIN,
    Plan,
    Start,
    as_block,
    eligible_rows,
    lay_out,
    make_spec,
)

CPU = torch.device("cpu")


def uniform(seed: int = 0) -> UniformSampler:
    return UniformSampler(torch.Generator().manual_seed(seed))


def prioritized(rows: int, num_envs: int, seed: int = 0) -> HostPrioritizedSampler:
    generator = torch.Generator().manual_seed(seed)
    return HostPrioritizedSampler(rows, num_envs, 0.6, 1e-6, CPU, generator)


def assert_equal(left: Batch, right: Batch) -> None:
    for name in BATCH_FIELDS:
        assert torch.equal(getattr(left, name), getattr(right, name)), name


@dataclass
class Case:
    """A ring's measures and the rows to write into it, cut into blocks."""

    num_envs: int
    n_steps: int
    stack: int
    rows: int
    block_lengths: list[int]
    envs: list[list[Start]]

    def ring(self, sampler: Sampler, directory: Path | None = None) -> Ring:
        capacity = self.rows * self.num_envs + self.num_envs - 1
        spec = make_spec(self.stack)
        return Ring(spec, self.num_envs, capacity, self.n_steps, GAMMA, sampler, CPU, directory)

    def feed(self, ring: Ring, begin: int = 0, end: int | None = None) -> None:
        row = 0
        for turn, length in enumerate(self.block_lengths):
            if turn >= begin and (end is None or turn < end):
                ring.extend(as_block(self.envs, row, row + length))
            row += length

    def eligible(self, total: int) -> dict[tuple[int, int], Start]:
        """(ring row, env) → start."""
        rows = eligible_rows(total, self.rows, self.n_steps, self.stack)
        return {
            (row % self.rows, env): self.envs[env][row]
            for row in rows
            for env in range(self.num_envs)
            if self.envs[env][row].eligible
        }


plans = st.builds(
    Plan,
    steps=st.lists(st.sampled_from([PLAIN, PLAIN, LIFE_LOST, FAULT]), min_size=1, max_size=7).map(
        tuple
    ),
    terminated=st.booleans(),
)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    num_envs = draw(st.integers(1, 3))
    n_steps = draw(st.integers(1, 5))
    stack = draw(st.integers(1, 4))
    rows = draw(st.integers(n_steps + stack, n_steps + stack + 8))
    lengths = draw(st.lists(st.integers(1, rows), min_size=1, max_size=8))
    scripts = draw(
        st.lists(st.lists(plans, min_size=1, max_size=4), min_size=num_envs, max_size=num_envs)
    )
    envs = [lay_out(script, sum(lengths), env) for env, script in enumerate(scripts)]
    return Case(num_envs, n_steps, stack, rows, lengths, envs)
