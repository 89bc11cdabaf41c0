"""Codecs for replay frames beside a plain copy: how small, how slow. Needs lz4 and zstandard.

    python benchmarks/compression.py                      Pong, Breakout and Seaquest (a minute)
    python benchmarks/compression.py --games UpNDown --frames 1000
    python benchmarks/compression.py --all-games          the ratio of lz4 alone, worst games first

Frames come from random play. The first table gives a codec's ratio, its worst ratio on a frame and
the time of a frame as a multiple of copying it; ``xor`` stands for the difference to the frame
before. The second gives the time of whole batches of 32 stacks from a compressed ring as a multiple
of a plain ring's, and its memory as a share of the plain one's.
"""

from __future__ import annotations

import argparse
import statistics
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ale_py
import lz4.block
import numpy as np
import torch
import zstandard
from numpy.typing import NDArray

from qfleet.config.config import Config
from qfleet.core.errors import UnknownNameError
from qfleet.core.types import Block, EnvSpec
from qfleet.envs.factory import make_envs
from qfleet.memory.compression import Compression
from qfleet.memory.ring import Ring
from qfleet.memory.samplers import UniformSampler

NUM_ENVS = 4
FRAME_BYTES = 84 * 84
Coder = Callable[[bytes], Any]
RING_FRAMES = 20_000
"""More than any cache holds as plain frames, so that the copy pays for its misses too."""


def record(game: str, rows: int) -> NDArray[np.uint8]:
    """``[rows, NUM_ENVS, 84, 84]`` of random play."""
    envs = make_envs(
        Config(env=f"ALE/{game}-v5"), NUM_ENVS, 0, training=True, on_fault=lambda *_: None
    )
    generator = np.random.default_rng(0)
    frames = [envs.reset()[:, -1].copy()]
    while len(frames) < rows:
        actions = generator.integers(envs.spec.num_actions, size=NUM_ENVS)
        frames.append(envs.step(actions).obs[:, -1].copy())
    envs.close()
    return np.stack(frames)


def codecs() -> dict[str, tuple[Coder, Coder]]:
    found: dict[str, tuple[Coder, Coder]] = {
        "lz4": (lz4.block.compress, lz4.block.decompress),
        "lz4 acceleration 4": (
            lambda frame: lz4.block.compress(frame, mode="fast", acceleration=4),
            lz4.block.decompress,
        ),
        "lz4 hc 9": (
            lambda frame: lz4.block.compress(frame, mode="high_compression"),
            lz4.block.decompress,
        ),
    }
    for level in (-5, -1, 1, 3):
        pack = zstandard.ZstdCompressor(level=level).compress
        found[f"zstd {level}"] = (pack, zstandard.ZstdDecompressor().decompress)
    found["zlib 1"] = (lambda frame: zlib.compress(frame, 1), zlib.decompress)
    return found


def us_per_frame(work: Coder, frames: list[bytes]) -> tuple[float, list[Any]]:
    """The best of three rounds, and what came of it."""
    times_s = []
    for _ in range(3):
        start = time.perf_counter()
        results = [work(frame) for frame in frames]
        times_s.append(time.perf_counter() - start)
    return min(times_s) / len(frames) * 1e6, results


def compare_codecs(game: str, frames: NDArray[np.uint8]) -> None:
    differences = frames.copy()
    differences[1:] ^= frames[:-1]
    sources = {
        name: [frame.tobytes() for frame in source.reshape(-1, FRAME_BYTES)]
        for name, source in {"": frames, " xor": differences}.items()
    }
    target = bytearray(FRAME_BYTES)

    def copy(frame: bytes) -> None:
        target[:] = frame

    copy_us, _ = us_per_frame(copy, sources[""])
    print(f"{game}: {len(sources[''])} frames; copying one takes {copy_us:.2f} µs")
    print(f"  {'codec':<24}{'ratio':>7}{'worst':>7}{'compress':>12}{'decompress':>12}")
    for name, (pack, unpack) in codecs().items():
        for kind, source in sources.items():
            pack_us, packed = us_per_frame(pack, source)
            unpack_us, unpacked = us_per_frame(unpack, packed)
            assert unpacked == source
            sizes = [len(blob) for blob in packed]
            ratio, worst = FRAME_BYTES * len(sizes) / sum(sizes), FRAME_BYTES / max(sizes)
            print(
                f"  {name + kind:<24}{ratio:>7.1f}{worst:>7.1f}"
                f"{pack_us / copy_us:>11.1f}×{unpack_us / copy_us:>11.1f}×",
                flush=True,
            )


def filled_ring(frames: NDArray[np.uint8], compression: Compression) -> tuple[Ring, float]:
    """A full ring, and the seconds that writing it over took."""
    spec = EnvSpec("atari", (4, 84, 84), "uint8", 6, frame_stack=4)
    sampler = UniformSampler(torch.Generator().manual_seed(0))
    device = torch.device("cpu")
    ring = Ring(spec, NUM_ENVS, RING_FRAMES, 1, 0.99, sampler, device, compression=compression)
    shape = frames.shape[:2]
    block = Block(
        obs=torch.from_numpy(frames),
        action=torch.zeros(shape, dtype=torch.int64),
        reward=torch.zeros(shape),
        flags=torch.zeros(shape, dtype=torch.uint8),
    )
    turn = -(-RING_FRAMES // (shape[0] * NUM_ENVS))
    for _ in range(turn):
        ring.extend(block)
    # Not the first turn: that one asks the system for the memory.
    start = time.perf_counter()
    for _ in range(turn):
        ring.extend(block)
    return ring, time.perf_counter() - start


def compare_rings(frames: NDArray[np.uint8]) -> None:
    plain, plain_write_s = filled_ring(frames, "none")
    packed, packed_write_s = filled_ring(frames, "lz4")
    times_s: dict[Ring, list[float]] = {plain: [], packed: []}
    for _ in range(300):
        for ring, times in times_s.items():  # in turns: a slow moment hits both
            start = time.perf_counter()
            ring.sample(32, 1.0)
            times.append(time.perf_counter() - start)
    plain_s, packed_s = (statistics.median(times) for times in times_s.values())
    print(
        f"  ring of {RING_FRAMES} frames, lz4 / plain: batch of 32 {packed_s / plain_s:.1f}× "
        f"({packed_s * 1e6:.0f} / {plain_s * 1e6:.0f} µs), "
        f"writing {packed_write_s / plain_write_s:.1f}×, "
        f"memory {packed.frame_bytes() / plain.frame_bytes():.3f}\n"
    )


def survey() -> None:
    """lz4's ratio on every game of ale-py."""
    rows = []
    for rom in sorted((Path(ale_py.__file__).parent / "roms").glob("*.bin")):
        game = "".join(word.capitalize() for word in rom.stem.split("_"))
        try:
            frames = record(game, 200).reshape(-1, FRAME_BYTES)
        except UnknownNameError:
            continue  # a game for two players only
        sizes = [len(lz4.block.compress(frame)) for frame in frames]
        rows.append((FRAME_BYTES * len(sizes) / sum(sizes), FRAME_BYTES / max(sizes), game))
    rows.sort()
    for ratio, worst, game in rows:
        print(f"{game:<24}{ratio:>7.2f}{worst:>7.2f}")
    print(f"{len(rows)} games, median {statistics.median(ratio for ratio, _, _ in rows):.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--games", nargs="+", default=["Pong", "Breakout", "Seaquest"])
    parser.add_argument("--frames", type=int, default=4000)
    parser.add_argument("--all-games", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.all_games:
        survey()
        return
    for game in arguments.games:
        frames = record(game, arguments.frames // NUM_ENVS)
        compare_codecs(game, frames)
        compare_rings(frames)


if __name__ == "__main__":
    main()
