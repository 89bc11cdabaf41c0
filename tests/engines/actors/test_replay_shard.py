"""Letters, rings and shards: nothing is lost or mixed up on the way, whoever dies."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from qfleet.config.config import Config
from qfleet.core.types import SKIP, Block, EnvSpec
from qfleet.engines.actors.block_messages import BlockMessage, decode, encode
from qfleet.engines.actors.messages import PriorityUpdate
from qfleet.engines.actors.shard import ReplayShard
from qfleet.memory.ring import Ring
from qfleet.memory.samplers import UniformSampler
from support.in_process_cluster import FRAMES, SPEC, random_block, small

HOST = torch.device("cpu")


def letter_of(
    block: Block,
    start: int,
    life: int = 0,
    priority: np.ndarray[tuple[int, int], np.dtype[np.float32]] | None = None,
    compression: str = "none",
) -> BlockMessage:
    assert compression in ("none", "lz4")
    return encode(block, 0, life, start, 3, priority, compression)  # type: ignore[arg-type]


def part(block: Block, start: int, stop: int) -> Block:
    rows = slice(start, stop)
    return Block(block.obs[rows], block.action[rows], block.reward[rows], block.flags[rows])


def reference(config: Config, block: Block, spec: EnvSpec = SPEC) -> Ring:
    """One ring that was given everything at once."""
    sampler = UniformSampler(torch.Generator().manual_seed(0))
    capacity = config.buffer_size // config.workers
    ring = Ring(spec, config.envs, capacity, config.n_steps, config.gamma, sampler, HOST)
    ring.extend(block)
    return ring


@pytest.mark.parametrize("compression", ["none", "lz4"])
def test_a_letter_holds_what_was_sealed(compression: str) -> None:
    block = random_block(7, 2, 1, FRAMES)
    letter = letter_of(block, 0, compression=compression)
    assert isinstance(letter.frames, bytes) == (compression == "lz4")
    expected = [getattr(block, name).clone() for name in ("obs", "action", "reward", "flags")]
    block.obs.zero_()  # the actor fills the same memory again
    block.reward.zero_()
    back = decode(letter)
    for name, column in zip(("obs", "action", "reward", "flags"), expected, strict=True):
        assert torch.equal(getattr(back, name), column), name
        assert getattr(back, name).dtype == column.dtype
    assert back.version == letter.version == 1


def test_compressed_letters_of_plain_frames_are_smaller() -> None:
    block = random_block(7, 2, 1, FRAMES)
    block.obs.zero_()
    sizes = [letter_of(block, 0, compression=kind).nbytes for kind in ("none", "lz4")]
    rest = 7 * 2 * (1 + 4 + 1)  # action, reward, flags
    assert sizes[0] == rest + 7 * 2 * 15
    assert sizes[1] < sizes[0]


def test_actions_beyond_a_byte_survive() -> None:
    block = random_block(3, 2, 1)
    block.action[0, 0] = 300
    assert int(decode(encode(block, 0, 0, 0, 1000, None, "none")).action[0, 0]) == 300


def test_rows_that_come_in_pieces_are_sampled_as_if_they_had_come_at_once() -> None:
    config = small(workers=1, buffer_size=100)
    block = random_block(30, 2, 4, FRAMES)
    shard = ReplayShard(config, FRAMES, [0])
    for start in range(0, 30, 6):
        answer = shard.insert(letter_of(part(block, start, start + 6), start))
    ring = reference(config, block, FRAMES)
    assert answer.holdings[0].starts == ring.starts() > 0
    drawn = shard.exchange([], {0: 50})
    expected = ring.gather(
        torch.from_numpy(drawn.index) // 2,
        torch.from_numpy(drawn.index) % 2,
    )
    names = ("obs", "action", "reward", "discount", "next_obs")
    for name, column in zip(names, drawn.columns, strict=True):
        assert np.array_equal(column, getattr(expected, name).numpy()), name


@pytest.mark.parametrize("gap", ["another life", "a lost letter"])
def test_rows_that_do_not_follow_each_other_are_kept_apart(gap: str) -> None:
    config = small(workers=1, buffer_size=100, n_steps=3)
    block = random_block(20, 2, 4, FRAMES, skip=0.0)
    shard = ReplayShard(config, FRAMES, [0])
    shard.insert(letter_of(part(block, 0, 10), 0))
    life, start = (1, 0) if gap == "another life" else (0, 14)
    shard.insert(letter_of(part(block, 10, 20), start, life))
    ring = shard._rings[0].ring
    # The last row before the gap is where its episode was cut, and no start any more.
    assert bool((ring._flag_rows[9] & SKIP).bool().all())
    before = ring.gather(torch.tensor([8]), torch.tensor([0]))
    assert float(before.discount) == pytest.approx(0.9)  # one step, then the bootstrap
    assert float(before.reward) == float(block.reward[8, 0])
    # And no stack reaches over it.
    after = ring.gather(torch.tensor([10]), torch.tensor([0]))
    assert not after.obs[0, 0].any()
    assert torch.equal(after.obs[0, 1], block.obs[10, 0])


def test_first_priorities_reach_the_rows_that_they_are_of() -> None:
    config = small(workers=1, buffer_size=100, prioritized_replay=True)
    block = random_block(20, 2, 4, skip=0.0)
    errors = np.arange(1, 41, dtype=np.float32).reshape(20, 2)
    shard = ReplayShard(config, SPEC, [0])
    shard.insert(letter_of(part(block, 0, 10), 0, priority=errors[:8]))
    shard.insert(letter_of(part(block, 10, 20), 10, priority=errors[8:18]))
    sampler = shard._rings[0].sampler
    assert sampler is not None
    expected = np.power(errors[:18] + 1e-6, 0.6)
    np.testing.assert_allclose(sampler.leaves[:36].view(18, 2), expected, rtol=1e-5)
    mass, least = sampler.mass()
    assert mass == pytest.approx(float(expected.sum()), rel=1e-5)
    assert least == pytest.approx(float(expected.min()), rel=1e-5)
    holding = shard.insert(letter_of(part(block, 0, 1), 20)).holdings[0]
    assert holding.starts == 2 * 19


def test_a_new_shard_takes_the_newest_of_an_old_actors_priorities() -> None:
    config = small(workers=1, buffer_size=100, prioritized_replay=True)
    block = random_block(10, 2, 4, skip=0.0)
    errors = np.arange(1, 21, dtype=np.float32).reshape(10, 2)
    shard = ReplayShard(config, SPEC, [0])
    # The actor knows of ten rows before these; the shard does not.
    shard.insert(letter_of(block, 10, priority=errors))
    sampler = shard._rings[0].sampler
    assert sampler is not None
    sampler.mass()
    expected = np.power(errors[2:] + 1e-6, 0.6)
    np.testing.assert_allclose(sampler.leaves[:16].view(8, 2), expected, rtol=1e-5)


def test_news_change_priorities_before_the_draw() -> None:
    config = small(workers=1, buffer_size=100, prioritized_replay=True)
    shard = ReplayShard(config, SPEC, [0])
    block = random_block(20, 2, 4, skip=0.0)
    shard.insert(letter_of(block, 0, priority=np.full((18, 2), 1e-3, np.float32)))
    news = PriorityUpdate(0, np.array([7]), np.array([1e9], dtype=np.float32))
    drawn = shard.exchange([news], {0: 20})
    assert (drawn.index == 7).all()
    assert (drawn.actor == 0).all()
    np.testing.assert_allclose(drawn.probability, 1.0, atol=1e-5)
    nothing = shard.exchange([], {})
    assert nothing.columns == ()
    assert nothing.nbytes == 0


@pytest.mark.parametrize("prioritized", [False, True])
def test_a_ring_comes_back_from_its_state(prioritized: bool) -> None:
    config = small(workers=1, buffer_size=40, prioritized_replay=prioritized)
    shard = ReplayShard(config, FRAMES, [0])
    block = random_block(30, 2, 4, FRAMES)
    for start in range(0, 30, 10):  # more than the ring holds
        shard.insert(letter_of(part(block, start, start + 10), start))
    state, versions = shard.describe(0)
    other = ReplayShard(config, FRAMES, [0], life=1)
    row = 0
    for piece in range(len(versions)):
        frames = shard.frames(0, piece)
        other.restore_frames(0, row, frames)
        row += len(frames)
    answer = other.restore(0, state)
    assert answer.holdings == shard.exchange([], {}).holdings
    one, two = shard.exchange([], {0: 25}), other.exchange([], {0: 25})
    assert np.array_equal(one.index, two.index)  # the random stream goes on, too
    for mine, theirs in zip(one.columns, two.columns, strict=True):
        assert np.array_equal(mine, theirs)
