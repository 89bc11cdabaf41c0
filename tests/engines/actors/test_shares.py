"""Many rings are sampled as one would be: exact shares, exact weights."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch

from qfleet.config.config import Config
from qfleet.core.types import SKIP
from qfleet.engines.actors.account import Account
from qfleet.engines.actors.block_messages import encode
from qfleet.engines.actors.replay import RemoteBlock, ShardedReplay
from qfleet.engines.actors.shares import Holding, allot, relative_rarity, shares_of
from qfleet.memory.ring import Ring
from qfleet.memory.samplers import PrioritizedSampler
from qfleet.telemetry.faults import FaultLog
from support.in_process_cluster import SPEC, OneProcess, pinned, random_block, small

ALPHA, EPS = 0.6, 1e-6
HOST = torch.device("cpu")


def make_replay(config: Config, cluster: OneProcess, spec: Any = SPEC) -> ShardedReplay:
    return ShardedReplay(
        cast("Any", cluster),
        config,
        spec,
        FaultLog(),
        Account(config.workers, config.servers),
        seed=3,
    )


def insert(
    replay: ShardedReplay, cluster: OneProcess, block: Any, actor: int, start: int, **more: Any
) -> None:
    envs = block.action.shape[1]
    fields = {"life": 0, "priority": None, "compression": "none", **more}
    letter = encode(block, actor, start=start, num_actions=SPEC.num_actions, **fields)
    far = RemoteBlock.of(SPEC, block.rows, envs, 0, actor, cluster.put(letter))
    replay.extend(far)


def test_shares_follow_the_masses() -> None:
    holdings = {0: Holding(3.0, 1.0, 5), 1: Holding(0.0, np.inf, 0), 2: Holding(1.0, 0.5, 2)}
    assert shares_of(holdings) == {0: 0.75, 2: 0.25}
    assert shares_of({0: Holding(0.0, np.inf, 0)}) == {}


@pytest.mark.parametrize("count", [1, 5, 32])
def test_on_average_a_ring_gets_its_share_exactly(count: int) -> None:
    shares = {0: 0.5, 3: 0.3125, 7: 0.1875}
    grid = 64  # with points at the middles of 64 parts of a slice the mean is exact for these
    total = dict.fromkeys(shares, 0)
    for part in range(grid):
        stub = type("Pinned", (), {"random": staticmethod(pinned((part + 0.5) / grid))})()
        given = allot(count, shares, cast("np.random.Generator", stub))
        assert sum(given.values()) == count
        for ring, number in given.items():
            assert abs(number - count * shares[ring]) < 1
            total[ring] += number
    assert {ring: number / grid for ring, number in total.items()} == {
        ring: count * share for ring, share in shares.items()
    }


@pytest.mark.parametrize("servers", [1, 2, 3])
def test_every_transition_has_the_probability_and_weight_of_one_big_memory(servers: int) -> None:
    workers, envs, rows, beta = 3, 2, 30, 0.4
    config = small(
        workers=workers, servers=servers, prioritized_replay=True, buffer_size=workers * envs * rows
    )
    cluster = OneProcess()
    replay = make_replay(config, cluster)
    blocks = [random_block(rows, envs, seed) for seed in range(workers)]
    random = np.random.default_rng(5)
    starts = rows - config.n_steps
    errors = random.exponential(size=(workers, starts, envs)).astype(np.float32)
    for actor, block in enumerate(blocks):
        insert(replay, cluster, block, actor, 0, priority=errors[actor])

    sampler = PrioritizedSampler(
        rows, workers * envs, ALPHA, EPS, HOST, torch.Generator().manual_seed(0)
    )
    big = Ring(
        SPEC, workers * envs, config.buffer_size, config.n_steps, config.gamma, sampler, HOST
    )
    together = random_block(rows, workers * envs, 0)
    for name in ("obs", "action", "reward", "flags"):
        joined = torch.cat([getattr(block, name) for block in blocks], dim=1)
        setattr(together, name, joined)
    big.extend(together)
    of_all = torch.from_numpy(np.concatenate(list(errors), axis=1))
    big.update_priorities(big.newest_starts(starts).view(-1), of_all.reshape(-1))
    total, least = sampler.mass()
    leaves = sampler.leaves[: rows * workers * envs].view(rows, workers, envs).double() / total

    assert replay.can_sample()
    shares = shares_of(replay.holdings())
    assert sorted(shares) == list(range(workers))
    for handle in cluster.living("ReplayShard"):
        for actor, kept in handle.instance._rings.items():
            everything = torch.arange(rows * envs)
            within = kept.probability(everything).reshape(rows, envs)
            np.testing.assert_allclose(shares[actor] * within, leaves[:, actor], rtol=1e-6)
            skipped = (blocks[actor].flags[:starts] & SKIP).bool().numpy()
            assert (within[:starts][skipped] == 0).all()
            assert (within[:starts][~skipped] > 0).all()

    batch = replay.sample(64, beta)
    ring, slot = batch.index // (rows * envs), batch.index % (rows * envs)
    row, env = slot // envs, slot % envs
    leaf = leaves[row, ring, env] * total
    torch.testing.assert_close(batch.weight.double(), (least / leaf).pow(beta), rtol=1e-5, atol=0)
    assert float(batch.weight.max()) <= 1
    expected = big.gather(row, ring * envs + env)
    for name in ("obs", "action", "reward", "discount", "next_obs"):
        assert torch.equal(getattr(batch, name), getattr(expected, name)), name


def test_the_rarest_transition_has_weight_1_wherever_it_is() -> None:
    holdings = {0: Holding(4.0, 1.0, 3), 1: Holding(1.0, 0.25, 3)}
    shares = shares_of(holdings)
    probability = np.array([2.0 / 4.0, 0.25 / 1.0])
    rarity = relative_rarity(probability, np.array([0, 1]), shares, holdings)
    np.testing.assert_allclose(rarity, [0.125, 1.0])


def test_weights_are_made_from_what_was_really_drawn() -> None:
    """The ring's mass has doubled since the shares: each of its samples was half as likely."""
    shares = {0: 0.5, 1: 0.5}
    later = {0: Holding(2.0, 1.0, 2), 1: Holding(1.0, 1.0, 1)}
    rarity = relative_rarity(np.array([0.5, 1.0]), np.array([0, 1]), shares, later)
    np.testing.assert_allclose(rarity, [1.0, 0.5])


def test_uniform_shares_follow_the_number_of_transitions_and_weights_are_1() -> None:
    config = small(servers=2)
    cluster = OneProcess()
    replay = make_replay(config, cluster)
    long, short = random_block(40, 2, 1), random_block(10, 2, 2)
    insert(replay, cluster, long, 0, 0)
    insert(replay, cluster, short, 1, 0)
    starts = [int(((block.flags[:-2] & SKIP) == 0).sum()) for block in (long, short)]
    shares = shares_of(replay.holdings())
    assert shares == pytest.approx({i: n / sum(starts) for i, n in enumerate(starts)})
    batch = replay.sample(32, 0.4)
    assert bool((batch.weight == 1).all())


def test_batches_of_a_burst_are_alike() -> None:
    """A burst is cut into batches: samples of one ring must not fill the first of them."""
    config = small(servers=1)
    cluster = OneProcess()
    replay = make_replay(config, cluster)
    for actor in range(2):
        insert(replay, cluster, random_block(40, 2, actor), actor, 0)
    batch = replay.sample(256, 0.4)
    ring = (batch.index // replay._slots).numpy()
    halves = ring[:128].mean(), ring[128:].mean()
    assert abs(halves[0] - halves[1]) < 0.25
    assert 0.3 < ring.mean() < 0.7
