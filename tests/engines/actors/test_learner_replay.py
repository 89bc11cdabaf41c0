"""Replay in the learner's process: rows of all actors side by side, whoever is early or dies."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import qfleet
from qfleet.config.config import Config
from qfleet.config.validation import validate
from qfleet.core.errors import CheckpointError, ClusterError, ConfigError
from qfleet.core.types import FIRST, SKIP, Block, EnvSpec
from qfleet.engines.actors import engine
from qfleet.engines.actors.account import Account
from qfleet.engines.actors.block_messages import encode
from qfleet.engines.actors.learner_replay import LearnerReplay
from qfleet.engines.actors.replay import RemoteBlock
from qfleet.engines.registry import build
from qfleet.memory.ring import Ring
from qfleet.memory.samplers import PrioritizedSampler, UniformSampler
from qfleet.storage.checkpoint import load_checkpoint
from qfleet.telemetry.faults import FaultLog
from qfleet.training.run import Run
from qfleet.training.run_state import RunOptions
from support.in_process_cluster import FRAMES, OneProcess, Reference, random_block, small
from support.messages import says

HOST = torch.device("cpu")


def own_ring(config: Config, prioritized: bool = False, spec: EnvSpec = FRAMES) -> Ring:
    envs, generator = config.workers * config.envs, torch.Generator().manual_seed(0)
    sampler: Any = UniformSampler(generator)
    if prioritized:
        rows = config.buffer_size // envs
        sampler = PrioritizedSampler(rows, envs, 1.0, 1e-6, HOST, generator)
    return Ring(spec, envs, config.buffer_size, config.n_steps, config.gamma, sampler, HOST)


def made(config: Config, ring: Ring, faults: FaultLog | None = None) -> LearnerReplay:
    cluster: Any = OneProcess()
    account = Account(config.workers, 0)
    return LearnerReplay(cluster, config, ring, faults or FaultLog(), account)


def send(
    memory: LearnerReplay, actor: int, block: Block, rows: slice, start: int, *,
    life: int = 0, priority: Any = None,
) -> None:  # fmt: skip
    part = Block(block.obs[rows], block.action[rows], block.reward[rows], block.flags[rows])
    message = encode(part, actor, life, start, 3, priority, "none")
    memory.extend(RemoteBlock.of(FRAMES, part.rows, 2, 0, actor, Reference(message)))


def columns(block: Block) -> tuple[torch.Tensor, ...]:
    return block.obs, block.action, block.reward, block.flags


def test_rows_of_actors_that_are_early_are_as_if_all_had_come_at_once() -> None:
    config = small(buffer_size=100, n_steps=3)
    first, second = random_block(20, 2, 1, FRAMES), random_block(20, 2, 2, FRAMES)
    ring, expected = own_ring(config), own_ring(config)
    memory = made(config, ring)
    send(memory, 0, first, slice(0, 8), 0)
    assert len(ring) == 0  # the rows of actor 1 are missing
    send(memory, 0, first, slice(8, 16), 8)
    send(memory, 1, second, slice(0, 5), 0)
    assert len(ring) == 5 * 4
    send(memory, 1, second, slice(5, 20), 5)
    send(memory, 0, first, slice(16, 20), 16)
    pairs = zip(columns(first), columns(second), strict=True)
    expected.extend(Block(*(torch.cat(pair, 1) for pair in pairs)))
    ours, theirs = ring.state_dict(), expected.state_dict()
    assert ours["total_rows"] == 20
    # A gap is seen where an actor begins, so its first row opens an episode, as in any ring.
    for name in ("action", "reward", "flags"):
        assert torch.equal(ours[name], theirs[name]), name
    for mine, other in zip(ours["frames"].tensors, theirs["frames"].tensors, strict=True):
        assert torch.equal(mine, other)
    batch, same = memory.sample(64, 0.0), expected.sample(64, 0.0)
    assert torch.equal(batch.obs, same.obs)
    assert torch.equal(batch.next_obs, same.next_obs)


@pytest.mark.parametrize("gap", ["another life", "a lost letter"])
@pytest.mark.parametrize("is_early", [False, True])
def test_a_gap_of_one_actor_ends_its_episodes_only(gap: str, is_early: bool) -> None:
    config = small(buffer_size=100, n_steps=3)
    first, second = (random_block(20, 2, seed, FRAMES, skip=0.0) for seed in (1, 2))
    ring = own_ring(config)
    faults = FaultLog()
    memory = made(config, ring, faults)
    life, start = (1, 0) if gap == "another life" else (0, 14)
    send(memory, 0, first, slice(0, 10), 0)
    if not is_early:
        send(memory, 1, second, slice(0, 10), 0)
    if gap == "a lost letter":
        lost = Reference(ClusterError("it was lost with its machine"))
        memory.extend(RemoteBlock.of(FRAMES, 4, 2, 0, 0, lost))
        assert faults.counts == {"letter": 1}
    send(memory, 0, first, slice(10, 20), start, life=life)
    if is_early:
        send(memory, 1, second, slice(0, 10), 0)
    send(memory, 1, second, slice(10, 20), 10)
    flags = ring._flag_rows
    assert flags[9].tolist() == [SKIP, SKIP, 0, 0]
    assert flags[10].tolist() == [FIRST, FIRST, 0, 0]


def test_first_priorities_reach_the_rows_that_they_are_of() -> None:
    config = small(buffer_size=100, n_steps=2, prioritized_replay=True)
    first, second = (random_block(10, 2, seed, FRAMES, skip=0.0) for seed in (1, 2))
    ring = own_ring(config, prioritized=True)
    memory = made(config, ring)
    early, late = (np.arange(16, dtype=np.float32).reshape(8, 2) + 1 + k for k in (0, 100))
    send(memory, 0, first, slice(0, 10), 0, priority=early)
    send(memory, 1, second, slice(0, 10), 0, priority=late)
    sampler = ring.sampler
    assert isinstance(sampler, PrioritizedSampler)
    leaves = sampler.leaves[: 8 * 4].view(8, 4)
    expected = torch.from_numpy(np.concatenate([early, late], 1))
    torch.testing.assert_close(leaves, expected + 1e-6)


@pytest.fixture
def clusters(monkeypatch: pytest.MonkeyPatch) -> list[OneProcess]:
    opened: list[OneProcess] = []

    @contextlib.contextmanager
    def open_one(*_: object, **__: object) -> Iterator[OneProcess]:
        opened.append(OneProcess())
        yield opened[-1]

    monkeypatch.setattr(engine, "open_cluster", open_one)
    return opened


@pytest.mark.parametrize(
    "fields",
    [{}, {"prioritized_replay": True, "workers": 3, "exploration_ladder": True}],
    ids=["uniform", "prioritised"],
)
def test_a_run_goes_through_and_is_resumed(
    fields: dict[str, Any], clusters: list[OneProcess], tmp_path: Path
) -> None:
    config = small(servers=0, **fields)
    result = Run(config, tmp_path / "run", RunOptions(stop_after=200)).go()
    assert result.updates == (result.env_steps - 40) // 4
    assert result.faults == {}
    assert not clusters[0].living("ReplayShard")
    assert result.fleet is not None
    assert result.fleet["shards"] == []
    received = result.communication["bytes_received"]
    assert received is not None
    assert received == result.fleet["traffic"]["bytes_sent"]  # each block once, no samples
    resumed = qfleet.resume(tmp_path / "run").result
    assert resumed.env_steps >= 400
    assert resumed.updates == (resumed.env_steps - 40) // 4


def test_an_actor_that_is_ahead_of_a_slow_one_rests(clusters: list[OneProcess]) -> None:
    """The slow one's report does not arrive: the others must not fill the memory with waits."""
    parts = build(small(servers=0, workers=3), FaultLog())
    try:
        cluster = clusters[0]
        slow: Any = None

        def others_ready(pending: list[Reference], _wait_s: float) -> list[Reference]:
            nonlocal slow
            slow = slow or pending[0]
            return [reference for reference in pending if reference is not slow]

        cluster.ready = others_ready  # type: ignore[method-assign]
        rows = [parts.collector.collect(5).rows for _ in range(20)]
        assert sum(rows) == 2 * 3 * 5  # two actors: the first block, and two ahead of the slow one
        assert rows[-1] == 0
        cluster.ready = lambda pending, _wait_s: pending  # type: ignore[method-assign]
        assert all(parts.collector.collect(5).rows == 5 for _ in range(20))
    finally:
        parts.close()


def test_memories_in_one_piece_and_in_shards_are_not_mixed(
    clusters: list[OneProcess], tmp_path: Path
) -> None:
    for stored, other in ((0, 1), (1, 0)):
        folder = tmp_path / f"run-{stored}"
        config = small(servers=stored)
        Run(config, folder, RunOptions(stop_after=200)).go()
        memory = load_checkpoint(folder / "checkpoints").parts["memory"]
        parts = build(config.replace(servers=other), FaultLog())
        try:
            with pytest.raises(CheckpointError, match=says(f"--servers {stored}")):
                parts.memory.load_state_dict(memory)
        finally:
            parts.close()
    del clusters


def test_replay_on_a_device_or_in_files_needs_the_learners_process() -> None:
    with pytest.raises(ConfigError, match=says("replay_dir", "--servers 0")):
        validate(small(replay_dir="somewhere"))
    validate(small(replay_dir="somewhere", servers=0))
    with pytest.raises(ConfigError, match=says("servers")):
        validate(small(engine="parameter-server", servers=0))
