"""A rollout against slow loops over single envs: λ-returns, coverage, agents, checkpoints."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qfleet.core.errors import CheckpointError
from qfleet.core.types import FIRST, SKIP, Batch, Block
from qfleet.memory.rollout import Rollout
from support.episode_model import (
    FAULT,
    LIFE_LOST,
    PLAIN,
    Plan,
    Start,
    action_of,
    as_block,
    lay_out,
    make_spec,
    observation,
    reward_of,
)
from support.listener import Listener
from support.messages import says
from support.ring_cases import assert_equal

CPU = torch.device("cpu")
GAMMA, LAMBDA = 0.9, 0.7
ROWS = 5


def worth(obs: Tensor) -> Tensor:
    """A value that tells stacks and frames apart."""
    flat = obs.flatten(1)
    return (flat * torch.arange(1, flat.shape[1] + 1)).sum(1) / 100


def make(
    num_envs: int,
    stack: int = 1,
    *,
    gamma: float = GAMMA,
    td_lambda: float = LAMBDA,
    values: Callable[[Tensor], Tensor] = worth,
    agents: int = 1,
    batch_size: int = 1,
    epochs: int = 1,
    rows: int = ROWS,
    first_seed: int = 3,
) -> Rollout:
    return Rollout(
        make_spec(stack),
        num_envs,
        rows,
        gamma,
        td_lambda,
        values,
        range(first_seed, first_seed + agents),
        CPU,
        batch_size=batch_size,
        epochs=epochs,
    )


def value_of(start: Start, time: int, stack: int) -> float:
    return float(worth(torch.from_numpy(observation(start, time, stack))[None]))


def lambda_return(starts: list[Start], row: int, newest: int, stack: int) -> float:
    """Of one env, told from its episode: play on until it gives no more, or nobody saw more."""
    start = starts[row]
    steps, time = start.plan.steps, start.time
    is_last = time == len(steps) - 1
    if steps[time] == LIFE_LOST or (is_last and start.plan.terminated):
        return reward_of(start)
    ahead = value_of(start, time + 1, stack)
    leads_on = not is_last and steps[time + 1] != FAULT and row + 1 < newest
    if leads_on:
        further = lambda_return(starts, row + 1, newest, stack)
        ahead = (1 - LAMBDA) * ahead + LAMBDA * further
    return reward_of(start) + GAMMA * ahead


plans = st.builds(
    Plan,
    steps=st.lists(st.sampled_from([PLAIN, PLAIN, PLAIN, LIFE_LOST, FAULT]), min_size=1, max_size=7)
    .map(tuple),
    terminated=st.booleans(),
)  # fmt: skip


@settings(derandomize=True, deadline=None, max_examples=80)
@given(
    st.lists(st.lists(plans, min_size=1, max_size=4), min_size=1, max_size=3),
    st.integers(1, 3),
    st.lists(st.integers(1, ROWS), min_size=1, max_size=6),
)
def test_every_start_has_the_models_return(
    scripts: list[list[Plan]], stack: int, lengths: list[int]
) -> None:
    """Terminations, truncations, faults with NaN rewards, stacks, and a buffer not yet full."""
    envs = [lay_out(script, sum(lengths), env) for env, script in enumerate(scripts)]
    memory, total = make(len(envs), stack), 0
    for length in lengths:
        memory.extend(as_block(envs, total, total + length))
        total += length
        assert memory.can_sample() == (total > 1)
        batch = memory.sample(ROWS * len(envs), 1.0)
        assert sorted(batch.index.tolist()) == list(range(ROWS * len(envs)))
        assert batch.reward.isfinite().all()
        assert batch.obs is batch.next_obs
        assert not batch.discount.any()
        for i, index in enumerate(batch.index.tolist()):
            row, env = total - 1 - ROWS + index // len(envs), index % len(envs)
            usable = row >= 0 and envs[env][row].eligible
            assert batch.weight[i] == usable
            if not usable:
                continue
            start = envs[env][row]
            expected = lambda_return(envs[env], row, total - 1, stack)
            assert float(batch.reward[i]) == pytest.approx(expected, rel=1e-5, abs=1e-4)
            np.testing.assert_array_equal(batch.obs[i], observation(start, start.time, stack))
            assert batch.action[i] == action_of(start)


def test_a_worked_table() -> None:
    """Two steps, a truncation, its SKIP row with a NaN reward, and an episode's first row."""
    memory = make(1, rows=4)
    numbers = torch.tensor([10.0, 11.0, 12.0, 20.0, 21.0]).view(5, 1, 1)
    rewards = torch.tensor([1.0, 2.0, math.nan, 4.0, 0.0]).view(5, 1)
    flags = torch.tensor([FIRST, 0, SKIP, FIRST, 0], dtype=torch.uint8).view(5, 1)
    blank = torch.zeros(5, 1, dtype=torch.int64)
    block = Block(numbers.expand(5, 1, 2), blank, rewards, flags)
    memory.extend(Block(*(column[:1] for column in (block.obs, blank, rewards, flags))))
    memory.extend(Block(*(column[1:] for column in (block.obs, blank, rewards, flags))))
    batch = memory.sample(4, 1.0)
    returns = dict(zip(batch.index.tolist(), batch.reward.tolist(), strict=True))
    v = {n: 3 * n / 100 for n in (11, 12, 20, 21)}
    ends = 2 + GAMMA * v[12]
    assert returns[1] == pytest.approx(ends)
    assert returns[0] == pytest.approx(1 + GAMMA * ((1 - LAMBDA) * v[11] + LAMBDA * ends))
    assert returns[3] == pytest.approx(4 + GAMMA * v[21])
    weights = dict(zip(batch.index.tolist(), batch.weight.tolist(), strict=True))
    assert weights == {0: 1.0, 1: 1.0, 2: 0.0, 3: 1.0}


def random_block(rows: int, num_envs: int, seed: int) -> Block:
    random = torch.Generator().manual_seed(seed)
    kind = torch.randint(0, 8, (rows, num_envs), generator=random)
    return Block(
        obs=torch.randn(rows, num_envs, 2, generator=random),
        action=torch.randint(0, 9, (rows, num_envs), generator=random),
        reward=torch.randn(rows, num_envs, generator=random),
        flags=((kind == 1) + (kind == 2) * SKIP + (kind == 3) * FIRST).to(torch.uint8),
    )


def joined(batches: list[Batch]) -> Batch:
    names = ("obs", "action", "reward", "discount", "next_obs", "weight", "index")
    return Batch(*(torch.cat([getattr(batch, name) for batch in batches]) for name in names))


@pytest.mark.parametrize("part", [4, 12, 20, 60])
def test_every_start_is_drawn_once_per_epoch_however_it_is_asked(part: int) -> None:
    whole, parted = (make(4, batch_size=4, epochs=3) for _ in range(2))
    for seed in range(3):
        for memory in (whole, parted):
            memory.extend(random_block(ROWS, 4, seed))
        at_once = whole.sample(60, 1.0)
        assert_equal(at_once, joined([parted.sample(part, 1.0) for _ in range(60 // part)]))
        epochs = at_once.index.view(3, 20)
        assert [sorted(epoch.tolist()) for epoch in epochs] == [list(range(20))] * 3
        assert len({tuple(epoch.tolist()) for epoch in epochs}) == 3


def test_batches_may_reach_from_one_epoch_into_the_next() -> None:
    memory = make(4, batch_size=8, epochs=2)
    memory.extend(random_block(ROWS, 4, 0))
    drawn = [i for _ in range(5) for i in memory.sample(8, 1.0).index.tolist()]
    assert Counter(drawn) == Counter(list(range(20)) * 2)


def test_returns_are_those_of_the_first_draw_and_new_with_every_rollout() -> None:
    calls: list[int] = []

    def values(obs: Tensor) -> Tensor:
        calls.append(len(obs))
        return worth(obs) + 100 * len(calls)

    memory = make(4, batch_size=4, epochs=2, values=values)
    memory.extend(random_block(ROWS, 4, 0))
    drawn = [memory.sample(20, 1.0) for _ in range(2)]
    assert calls == [20]
    first, again = (batch.reward[batch.index.argsort()] for batch in drawn)
    assert torch.equal(first, again)
    memory.extend(random_block(ROWS, 4, 1))
    memory.sample(40, 1.0)
    assert calls == [20, 20]


def test_many_observations_are_valued_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def values(obs: Tensor) -> Tensor:
        calls.append(len(obs))
        return worth(obs)

    monkeypatch.setattr("qfleet.memory.rollout.VALUED_BYTES", 4 * 2 * 8)  # eight observations
    memory, whole = make(4, values=values), make(4)
    monkeypatch.undo()
    for filled in (memory, whole):
        filled.extend(random_block(ROWS, 4, 0))
    assert_equal(memory.sample(20, 1.0), whole.sample(20, 1.0))
    assert calls == [8, 8, 4]


def test_a_rollout_is_finished_before_the_next_begins() -> None:
    memory = make(4, batch_size=4)
    memory.extend(random_block(ROWS, 4, 0))
    memory.sample(12, 1.0)
    with pytest.raises(ValueError, match=says("12", "20")):
        memory.extend(random_block(1, 4, 1))
    with pytest.raises(ValueError, match=says("12", "20")):
        memory.sample(12, 1.0)


# --- agents -----------------------------------------------------------------------------------


def test_agents_take_turns_in_every_minibatch() -> None:
    memory = make(6, agents=3, batch_size=2, epochs=2)
    memory.extend(random_block(ROWS, 6, 0))
    env = memory.sample(60, 1.0).index % 6
    turns = (env // 2).view(10, 3, 2)  # minibatch, agent, sample
    assert torch.equal(turns, torch.arange(3).view(1, 3, 1).expand(10, 3, 2))


def test_each_agent_has_its_own_order_and_sees_each_of_its_starts_once_per_epoch() -> None:
    memory = make(6, agents=3, batch_size=2, epochs=2)
    memory.extend(random_block(ROWS, 6, 0))
    index = memory.sample(60, 1.0).index.view(10, 3, 2)
    orders = set()
    for agent in range(3):
        own = index[:, agent].reshape(2, 10)
        starts = [row * 6 + env for row in range(ROWS) for env in (2 * agent, 2 * agent + 1)]
        assert [sorted(epoch.tolist()) for epoch in own] == [starts] * 2
        orders.add(tuple((own - 2 * agent).flatten().tolist()))
    assert len(orders) == 3


def test_envs_have_their_own_discount_and_lambda() -> None:
    gamma, td_lambda = torch.tensor([0.5, 0.9, 0.9]), torch.tensor([0.2, 0.2, 1.0])
    together = make(3)
    together.gamma.copy_(gamma)
    together.td_lambda.copy_(td_lambda)
    block = random_block(ROWS, 3, 5)
    together.extend(block)
    batch = together.sample(15, 1.0)
    for env in range(3):
        alone = make(1, gamma=float(gamma[env]), td_lambda=float(td_lambda[env]))
        column = slice(env, env + 1)
        alone.extend(Block(block.obs[:, column], *(getattr(block, n)[:, column] for n in COLUMNS)))
        expected = alone.sample(5, 1.0)
        mine = batch.index % 3 == env
        found = batch.reward[mine][batch.index[mine].argsort()]
        torch.testing.assert_close(found, expected.reward[expected.index.argsort()])


def test_an_agent_draws_and_values_as_if_it_were_alone() -> None:
    """Agents side by side: each has its own order, and its own network values what it saw."""

    def of_three(obs: Tensor) -> Tensor:
        return (worth(obs).view(3, -1) * torch.tensor([[1.0], [2.0], [3.0]])).view(-1)

    together = make(6, agents=3, batch_size=5, epochs=2, values=of_three)
    block = random_block(ROWS, 6, 5)
    together.extend(block)
    batch = together.sample(60, 1.0)
    for agent in range(3):
        alone = make(
            2, batch_size=5, epochs=2, first_seed=3 + agent,
            values=lambda obs, factor=agent + 1.0: worth(obs) * factor,
        )  # fmt: skip
        columns = slice(2 * agent, 2 * agent + 2)
        others = (getattr(block, name)[:, columns] for name in COLUMNS)
        alone.extend(Block(block.obs[:, columns], *others))
        expected = alone.sample(20, 1.0)
        for name in ("action", "reward", "weight"):
            found = getattr(batch, name).view(-1, 3, 5)[:, agent].reshape(-1)
            torch.testing.assert_close(found, getattr(expected, name))


COLUMNS = ("action", "reward", "flags")


# --- the rest of a memory ---------------------------------------------------------------------


def test_it_goes_on_from_its_state_also_in_the_middle() -> None:
    one, other = make(4, batch_size=4, epochs=2), make(4, batch_size=4, epochs=2)
    for seed in range(2):
        one.extend(random_block(ROWS, 4, seed))
        one.sample(40 if seed == 0 else 12, 1.0)
    other.load_state_dict(one.state_dict())
    assert_equal(other.sample(28, 1.0), one.sample(28, 1.0))
    for memory in (one, other):
        memory.extend(random_block(3, 4, 9))
    assert_equal(other.sample(40, 1.0), one.sample(40, 1.0))


def test_the_state_of_another_shape_is_refused() -> None:
    with pytest.raises(CheckpointError, match=says("num_envs", "3", "4")):
        make(4).load_state_dict(make(3).state_dict())


def test_an_episode_that_cannot_go_on_ends_in_its_last_observation() -> None:
    memory = make(1, rows=3)
    block = Block(
        torch.ones(3, 1, 2), torch.zeros(3, 1).long(), torch.ones(3, 1), torch.zeros(3, 1).byte()
    )
    memory.extend(block)
    memory.end_open_episodes()
    memory.sample(3, 1.0)
    opening = Block(9 * torch.ones(1, 1, 2), *(getattr(block, n)[:1] for n in COLUMNS))
    opening.flags = torch.full((1, 1), FIRST, dtype=torch.uint8)
    memory.extend(opening)
    batch = memory.sample(3, 1.0)
    found = dict(zip(batch.index.tolist(), batch.weight.tolist(), strict=True))
    assert found == {0: 1.0, 1: 1.0, 2: 0.0}
    returns = dict(zip(batch.index.tolist(), batch.reward.tolist(), strict=True))
    assert returns[1] == pytest.approx(1 + GAMMA * 0.03)


def test_drawing_never_asks_the_host() -> None:
    memory = make(4, stack=2, batch_size=4, epochs=2)
    memory.extend(random_block(ROWS, 4, 0))
    with Listener() as listener:
        memory.sample(40, 1.0)
    assert listener.asked == []


def test_a_block_of_another_width_is_refused() -> None:
    with pytest.raises(ValueError, match=says("block.obs")):
        make(4).extend(random_block(ROWS, 3, 0))
    with pytest.raises(ValueError, match=says("6 rows", "rollout", "5")):
        make(4).extend(random_block(6, 4, 0))


@pytest.mark.parametrize("lengths", [[1] * 10, [2, 3, 4, 1], [5, 5]])
def test_how_a_rollout_was_cut_into_blocks_does_not_matter(lengths: list[int]) -> None:
    envs = [lay_out([Plan((PLAIN,) * 3, terminated=False)], 10, env) for env in range(2)]
    memory, row = make(2, stack=3), 0
    for length in lengths:
        memory.extend(as_block(envs, row, row + length))
        row += length
    whole = make(2, stack=3)
    whole.extend(as_block(envs, 0, 5))
    whole.extend(as_block(envs, 5, 10))
    assert_equal(memory.sample(10, 1.0), whole.sample(10, 1.0))
