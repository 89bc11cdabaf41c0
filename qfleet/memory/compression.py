"""Compressed frames of a replay ring: each frame is compressed separately with lz4, without loss.

In: rows of uint8 frames, and the slots that a batch is gathered from. Out: the same frames, bit for
bit. ``benchmarks/compression.py`` compares codecs. On 84×84 frames of random Atari play and two
cores of an ARM server it measured these ratios, and these times per frame in multiples of the time
of copying a frame:

    codec         Pong   Breakout   Seaquest   compress   decompress
    lz4             26         17          9        3–4      2.0–2.4
    zstd −1         39         21         14        5–8      3.5–4.8
    zstd 1          40         24         14       8–12      5.4–6.3
    zlib 1          30         20         11      22–43        10–16
    lz4 of XOR      52         70         34        2–3      1.8–2.6, for every link of the chain

lz4 was chosen because reading speed decides (an update of 32 stacks reads 256 frames for the 4 that
were written since the last one) and lz4 decompresses fastest by far: batches of 32 take 1.7–1.9
times as long as from uncompressed frames. With the XOR with the previous frame, reading one frame
would need all frames back to the last complete one. Threads do not help, although lz4 releases the
GIL: with two of them a batch took 1.1–1.3 times as long as with none, because one frame is too
little work for a thread.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor

from qfleet.core.errors import ConfigError
from qfleet.core.types import EnvSpec
from qfleet.storage.segments import LazyPieces

Compression: TypeAlias = Literal["none", "lz4"]
"""The compression of a ring's frames."""

ASSUMED_RATIO = 2
"""The compression ratio that ``sizing`` assumes. Of all 104 games of ale-py the worst is UpNDown:
2.8 on average, 2.5 at its worst frame; half of the games lie above 8. Noise does not compress at
all, so this ratio is not guaranteed."""

ENTRY_BYTES = 56
"""Overhead of a frame in addition to its compressed bytes: pointer, header of a bytes object,
rounding. Once a ring of 300,000 frames has wrapped around, memory fragmentation adds about 50 bytes
per frame."""


def check_compressible(spec: EnvSpec, device: torch.device, directory: Path | None) -> None:
    """Raise ConfigError if frames cannot be stored compressed."""
    if spec.obs_dtype != "uint8" or len(spec.frame_shape) < 2:
        raise ConfigError(
            f"replay_compression 'lz4' needs uint8 images, but observations of '{spec.env_id}' are "
            f"{spec.obs_dtype} of shape {spec.frame_shape}; use replay_compression none"
        )
    if device.type != "cpu":
        raise ConfigError(
            f"replay_compression 'lz4' needs a replay memory on the CPU, not on {device}; "
            "use replay_compression none or keep replay on the CPU"
        )
    if directory is not None:
        raise ConfigError(
            "replay_compression 'lz4' keeps frames in RAM and cannot be combined with replay_dir "
            f"'{directory}', whose files have slots of a fixed size; drop one of the two"
        )


def compressed_bytes(spec: EnvSpec, slots: int) -> int:
    """Return the estimated bytes of the frames; ``CompressedFrames.nbytes`` returns the actual."""
    return (slots + 1) * (math.prod(spec.frame_shape) // ASSUMED_RATIO + ENTRY_BYTES)


class CompressedFrames:
    """The frames of a ring, each compressed; the methods are those of ``ring.PlainFrames``."""

    def __init__(self, spec: EnvSpec, rows: int, num_envs: int) -> None:
        self._compress, self._decompress = load_codec()
        self._num_envs, self._frame_shape = num_envs, spec.frame_shape
        self._frame_bytes = math.prod(spec.frame_shape)
        # An array, not a list: the garbage collector would traverse a list of millions of entries.
        self._blobs = np.full(rows * num_envs + 1, b"", dtype=object)
        self._blobs[-1] = self._compress(bytes(self._frame_bytes))
        self._blob_bytes = len(self._blobs[-1])

    def write(self, row: int, frames: Tensor) -> None:
        start, count = row * self._num_envs, frames.shape[0] * self._num_envs
        plain = frames.reshape(count, self._frame_bytes).to("cpu", torch.uint8).contiguous()
        # Each frame is stored with its size in front: decompressing it then needs no keyword
        # argument, which is a tenth faster.
        new = [self._compress(frame) for frame in plain.numpy()]
        slots = slice(start, start + count)
        self._blob_bytes += sum(map(len, new)) - sum(map(len, self._blobs[slots]))
        self._blobs[slots] = new

    def index_select(self, slot: Tensor, out: Tensor | None = None) -> Tensor:
        return self._decompressed(self._blobs[slot.numpy()].tolist(), out)

    def pieces(self, cuts: Sequence[tuple[int, int]]) -> Sequence[Tensor]:
        return LazyPieces(len(cuts), lambda piece: self._read_rows(*cuts[piece]))

    def nbytes(self) -> int:
        return self._blob_bytes + ENTRY_BYTES * self._blobs.shape[0]

    def _read_rows(self, start: int, stop: int) -> Tensor:
        blobs = self._blobs[start * self._num_envs : stop * self._num_envs].tolist()
        return self._decompressed(blobs).view(-1, self._num_envs, *self._frame_shape)

    def _decompressed(self, blobs: list[bytes], out: Tensor | None = None) -> Tensor:
        """Return the decompressed frames, in ``out`` or in a new tensor."""
        decompress, frame_bytes = self._decompress, self._frame_bytes
        if out is None:
            out = torch.empty((len(blobs), *self._frame_shape), dtype=torch.uint8)
        into = out.view(-1).numpy().data
        at = 0
        for blob in blobs:
            into[at : at + frame_bytes] = decompress(blob)
            at += frame_bytes
        return out


def load_codec() -> tuple[Callable[[object], bytes], Callable[[bytes], bytes]]:
    """Return lz4's compress and decompress; compressed data starts with its uncompressed size."""
    # Imported here because the package is optional.
    try:
        block = importlib.import_module("lz4.block")
    except ImportError:
        raise ConfigError(
            "replay_compression 'lz4' needs the package lz4, which is not installed; "
            "pip install lz4, or use replay_compression none"
        ) from None
    return (
        cast("Callable[[object], bytes]", block.compress),
        cast("Callable[[bytes], bytes]", block.decompress),
    )
