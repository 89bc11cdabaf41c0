"""Compressed frames against plain ones: equal in every bit, and smaller."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import lz4.block
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qfleet.config.config import Config
from qfleet.core.errors import ConfigError
from qfleet.core.types import FIRST, Block, EnvSpec
from qfleet.envs.factory import make_envs
from qfleet.memory.compression import Compression
from qfleet.memory.ring import Ring
from qfleet.memory.samplers import Sampler
from qfleet.memory.sizing import replay_bytes
from qfleet.storage.checkpoint import load_checkpoint, save_checkpoint
from support.episode_model import as_block
from support.messages import says
from support.ring_cases import CPU, Case, assert_equal, cases, prioritized, uniform

HEIGHT, WIDTH = 6, 5
ATARI = EnvSpec("atari", (4, 84, 84), "uint8", 6, frame_stack=4)
steady = settings(derandomize=True, deadline=None, max_examples=80)


def image_ring(case: Case, compression: Compression, sampler: Sampler) -> Ring:
    shape = (HEIGHT, WIDTH) if case.stack == 1 else (case.stack, HEIGHT, WIDTH)
    spec = EnvSpec("images", shape, "uint8", 1000, frame_stack=case.stack)
    capacity = case.rows * case.num_envs
    return Ring(
        spec, case.num_envs, capacity, case.n_steps, 0.5, sampler, CPU, compression=compression
    )


def feed_images(case: Case, ring: Ring, begin: int = 0, end: int | None = None) -> None:
    """The case's rows, with an image in place of every frame, told apart by its id."""
    pixels = torch.arange(HEIGHT * WIDTH).view(HEIGHT, WIDTH)
    row = 0
    for turn, length in enumerate(case.block_lengths):
        if turn >= begin and (end is None or turn < end):
            block = as_block(case.envs, row, row + length)
            identity = block.obs[:, :, 0].long()[:, :, None, None]
            block.obs = (identity * 37 + pixels * (identity % 5)).remainder(256).to(torch.uint8)
            ring.extend(block)
        row += length


def assert_alike(case: Case, left: Ring, right: Ring, total: int) -> None:
    starts = case.eligible(total)
    assert left.can_sample() == right.can_sample() == bool(starts)
    if starts:
        row = torch.tensor([row for row, _ in starts])
        env = torch.tensor([env for _, env in starts])
        assert_equal(left.gather(row, env), right.gather(row, env))
        assert_equal(left.sample(7, 0.4), right.sample(7, 0.4))


@steady
@given(cases(), st.booleans())
def test_every_batch_is_the_plain_rings_after_every_block(case: Case, by_priority: bool) -> None:
    def sampler() -> Sampler:
        return prioritized(case.rows, case.num_envs) if by_priority else uniform()

    plain = image_ring(case, "none", sampler())
    compressed = image_ring(case, "lz4", sampler())
    total = 0
    for turn, length in enumerate(case.block_lengths):
        for ring in (plain, compressed):
            feed_images(case, ring, turn, turn + 1)
        total += length
        assert_alike(case, plain, compressed, total)


@steady
@given(cases(), st.integers(0, 8), st.sampled_from([("none", "lz4"), ("lz4", "none")]))
def test_a_checkpoint_of_one_kind_continues_in_the_other(
    case: Case, cut: int, kinds: tuple[Compression, Compression]
) -> None:
    source, other = image_ring(case, kinds[0], uniform(1)), image_ring(case, kinds[1], uniform(2))
    feed_images(case, source, 0, cut)
    # What a ring held before must not matter.
    feed_images(case, other, 0, 1)
    other.load_state_dict(source.state_dict())
    assert len(other) == len(source)
    assert_alike(case, source, other, sum(case.block_lengths[:cut]))
    for ring in (source, other):
        feed_images(case, ring, cut)
    assert_alike(case, source, other, sum(case.block_lengths))


# --- Atari-sized ---------------------------------------------------------------------------------


def atari_ring(
    compression: Compression, num_envs: int = 2, rows: int = 40, spec: EnvSpec = ATARI
) -> Ring:
    capacity = rows * num_envs
    return Ring(spec, num_envs, capacity, 3, 0.9, uniform(), CPU, compression=compression)


def frames_block(frames: torch.Tensor) -> Block:
    rows, num_envs = frames.shape[:2]
    flags = torch.zeros((rows, num_envs), dtype=torch.uint8)
    flags[::17] = FIRST
    return Block(
        obs=frames,
        action=torch.arange(rows * num_envs).view(rows, num_envs),
        reward=torch.ones((rows, num_envs)),
        flags=flags,
    )


def pong_like(rows: int, num_envs: int = 2, seed: int = 0) -> torch.Tensor:
    """A flat field between two walls, with two paddles and a ball anywhere."""
    generator = np.random.default_rng(seed)
    frames = np.full((rows, num_envs, 84, 84), 87, dtype=np.uint8)
    frames[:, :, 10:14] = frames[:, :, 78:82] = 236
    for frame in frames.reshape(-1, 84, 84):
        left, right, ball_y, ball_x = generator.integers([15, 15, 15, 8], [70, 70, 76, 74])
        frame[left : left + 8, 6:8], frame[right : right + 8, 75:77] = 147, 148
        frame[ball_y : ball_y + 2, ball_x] = 236
    return torch.from_numpy(frames)


def noise(rows: int, num_envs: int = 2) -> torch.Tensor:
    generator = np.random.default_rng(0)
    return torch.from_numpy(generator.integers(256, size=(rows, num_envs, 84, 84), dtype=np.uint8))


@pytest.mark.parametrize("make", [pong_like, noise])
def test_frames_of_84_by_84_survive_two_turns_of_the_ring(
    make: Callable[[int], torch.Tensor],
) -> None:
    frames = make(100)
    plain, compressed = atari_ring("none"), atari_ring("lz4")
    for ring in (plain, compressed):
        for start, stop in ((0, 7), (7, 39), (39, 79), (79, 100)):
            ring.extend(frames_block(frames[start:stop]))
    batch = plain.sample(64, 1.0)
    assert_equal(batch, compressed.sample(64, 1.0))
    # Both kinds of rows are among them: with blank frames in the stack and without.
    blank = batch.obs.flatten(2).any(2).logical_not()
    assert blank.any()
    assert not blank[:, -1].any()
    assert not blank.all(1).any()


def test_frames_that_lie_askew_in_memory_are_stored_as_they_look() -> None:
    frames = noise(12)
    stacks = frames.unsqueeze(2).expand(-1, -1, 4, -1, -1).contiguous()
    every_second = frames.repeat_interleave(2, dim=3)[..., ::2]
    repeated = frames[:1].expand(12, -1, -1, -1)
    askew = [stacks[:, :, -1], frames.transpose(2, 3), every_second, repeated]
    for given_frames in askew:
        plain, compressed = atari_ring("none"), atari_ring("lz4")
        for ring in (plain, compressed):
            ring.extend(frames_block(given_frames))
        assert_equal(plain.sample(20, 1.0), compressed.sample(20, 1.0))


def test_changing_a_batch_does_not_change_the_ring() -> None:
    ring = atari_ring("lz4")
    ring.extend(frames_block(pong_like(10)))
    row, env = torch.tensor([4, 5]), torch.tensor([0, 1])
    before = ring.gather(row, env)
    ring.gather(row, env).obs.zero_()
    assert_equal(before, ring.gather(row, env))
    assert before.obs.any()


def test_pong_like_frames_take_a_tenth_of_the_memory_and_the_ring_says_how_much() -> None:
    frames = pong_like(250, num_envs=4)
    plain = atari_ring("none", 4, 250)
    assert plain.frame_bytes() == (1000 + 1) * 7056
    tracemalloc.start()
    try:
        compressed = atari_ring("lz4", 4, 250)
        compressed.extend(frames_block(frames))
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert compressed.frame_bytes() < plain.frame_bytes() / 10
    # What malloc itself adds to each object is counted by the ring but not traced.
    assert 0.8 * compressed.frame_bytes() < taken < 1.1 * compressed.frame_bytes()


def test_the_bytes_follow_what_is_overwritten() -> None:
    ring, fresh = atari_ring("lz4"), atari_ring("lz4")
    empty = ring.frame_bytes()
    ring.extend(frames_block(noise(40)))
    # Noise grows a little; that is the worst that can happen.
    assert 80 * 7056 < ring.frame_bytes() - empty < 80 * 7056 * 1.01
    for target in (ring, fresh):
        target.extend(frames_block(pong_like(40)))
    assert ring.frame_bytes() == fresh.frame_bytes()


def test_the_hardest_atari_game_stays_below_the_prediction() -> None:
    envs = make_envs(Config(env="ALE/UpNDown-v5"), 2, 0, training=True, on_fault=lambda *_: None)
    try:
        generator = np.random.default_rng(0)
        rows = [envs.reset()[:, -1].copy()]
        for _ in range(99):
            actions = generator.integers(envs.spec.num_actions, size=2)
            rows.append(envs.step(actions).obs[:, -1].copy())
    finally:
        envs.close()
    ring = atari_ring("lz4", 2, 100, envs.spec)
    ring.extend(frames_block(torch.from_numpy(np.stack(rows))))
    predicted = replay_bytes(envs.spec, 2, 200, False, "lz4") - 200 * 13
    assert 0.5 * predicted < ring.frame_bytes() < 0.9 * predicted


# --- checkpoints ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kinds", [("none", "lz4"), ("lz4", "none")])
def test_checkpoints_on_disk_are_the_same_files_and_load_both_ways(
    tmp_path: Path, kinds: tuple[Compression, Compression], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Pieces of 15 rows: 0-14, 15-29, 30-39.
    monkeypatch.setattr("qfleet.memory.ring.SEGMENT_BYTES", 15 * 2 * 7056)
    frames, written = pong_like(55), []
    for kind in kinds:
        ring = atari_ring(kind)
        ring.extend(frames_block(frames[:40]))
        ring.extend(frames_block(frames[40:]))
        folder = tmp_path / kind
        save_checkpoint(folder, 1, {"memory": ring.state_dict()}, {}, keep=1)
        pieces = sorted((folder / "1").glob("memory.frames.*"))
        written.append([path.read_bytes() for path in pieces])
        assert len(pieces) == 3
    assert written[0] == written[1]
    restored = atari_ring(kinds[1])
    restored.load_state_dict(load_checkpoint(tmp_path / kinds[0]).parts["memory"])
    assert_equal(restored.sample(30, 1.0), ring.sample(30, 1.0))


def test_a_state_unpacks_only_the_piece_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    decompress: Callable[[bytes], bytes] = lz4.block.decompress
    unpacked: list[bytes] = []

    def counting(blob: bytes) -> bytes:
        unpacked.append(blob)
        return decompress(blob)

    monkeypatch.setattr("lz4.block.decompress", counting)
    monkeypatch.setattr("qfleet.memory.ring.SEGMENT_BYTES", 15 * 2 * 7056)
    ring, frames = atari_ring("lz4"), pong_like(40)
    ring.extend(frames_block(frames))
    pieces = ring.state_dict()["frames"].tensors
    assert len(pieces) == 3
    assert not unpacked
    assert torch.equal(pieces[1], frames[15:30])
    assert len(unpacked) == 30
    assert torch.equal(torch.cat(list(pieces)), frames)
    assert [piece.shape[0] for piece in pieces] == [15, 15, 10]


def test_a_state_with_frames_of_another_size_is_refused() -> None:
    small = EnvSpec("small", (4, 42, 42), "uint8", 6, frame_stack=4)
    source = atari_ring("none", spec=small)
    source.extend(frames_block(noise(10)[:, :, :42, :42]))
    with pytest.raises(RuntimeError, match="invalid for input of size"):
        atari_ring("lz4").load_state_dict(source.state_dict())


# --- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        (EnvSpec("vector", (4,), "float32", 2), "vector float32 (4,)"),
        (EnvSpec("real", (4, 84, 84), "float32", 2, frame_stack=4), "real float32 (84, 84)"),
        (EnvSpec("ram", (4, 128), "uint8", 2, frame_stack=4), "ram uint8 (128,)"),
        (EnvSpec("one", (), "int64", 2, num_obs_values=3), "one int64 ()"),
    ],
)
def test_only_images_of_bytes_are_compressed(spec: EnvSpec, told: str) -> None:
    with pytest.raises(ConfigError, match=says("replay_compression none", *told.split())):
        atari_ring("lz4", spec=spec)


def test_frames_on_a_device_or_in_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says("CPU", "meta")):
        Ring(ATARI, 1, 40, 1, 0.9, uniform(), torch.device("meta"), compression="lz4")
    folder = tmp_path / "replay"
    with pytest.raises(ConfigError, match=says("replay_dir")):
        Ring(ATARI, 1, 40, 1, 0.9, uniform(), CPU, folder, "lz4")
    assert not folder.exists()


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lz4.block", None)
    with pytest.raises(ConfigError, match="pip install lz4"):
        atari_ring("lz4")
    assert atari_ring("none").frame_bytes() == 81 * 7056
