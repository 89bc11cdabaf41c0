"""Blocks of rows as messages: a ``Block`` is encoded as a ``BlockMessage``, and decoded again.

Actions travel in as few bytes as hold them, uint8 frames compressed where replay is to be.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from qfleet.core.types import Block
from qfleet.memory.compression import Compression, load_codec


@dataclass(frozen=True)
class BlockMessage:
    """What N envs of one actor did in T steps."""

    actor: int
    life: int
    """How often this actor was replaced before."""
    start: int
    """Number of the first row, counted from the first of this life: so that gaps are seen."""
    version: int
    frames: NDArray[Any] | bytes
    """``[T, N, *frame_shape]``; bytes where they are compressed."""
    frame_shape: tuple[int, ...]
    action: NDArray[Any]
    reward: NDArray[np.float32]
    flags: NDArray[np.uint8]
    priority: NDArray[np.float32] | None
    """``[P, N]``, of the newest P rows that have n rows after them."""

    @property
    def nbytes(self) -> int:
        """Of the columns; what wraps them is not counted."""
        frames = len(self.frames) if isinstance(self.frames, bytes) else self.frames.nbytes
        priority = 0 if self.priority is None else self.priority.nbytes
        return frames + self.action.nbytes + self.reward.nbytes + self.flags.nbytes + priority

    @property
    def plain_nbytes(self) -> int:
        """The same, were frames not compressed."""
        if not isinstance(self.frames, bytes):
            return self.nbytes
        # Only frames of single bytes are.
        return self.nbytes - len(self.frames) + self.action.size * math.prod(self.frame_shape)


def encode(
    block: Block,
    actor: int,
    life: int,
    start: int,
    num_actions: int,
    priority: NDArray[np.float32] | None,
    compression: Compression,
) -> BlockMessage:
    """A copy: the block may be overwritten afterwards."""
    frames: NDArray[Any] | bytes = np.ascontiguousarray(block.obs.numpy())
    if compression == "lz4":
        compress, _ = load_codec()
        frames = compress(frames)
    else:
        frames = np.array(frames)
    narrow = np.uint8 if num_actions <= 256 else np.int64
    return BlockMessage(
        actor=actor,
        life=life,
        start=start,
        version=block.version,
        frames=frames,
        frame_shape=tuple(block.obs.shape[2:]),
        action=block.action.numpy().astype(narrow),
        reward=np.array(block.reward.numpy()),
        flags=np.array(block.flags.numpy()),
        priority=priority,
    )


def decode(letter: BlockMessage) -> Block:
    """The block, in memory of its own: what comes from another process may be read-only."""
    rows, envs = letter.action.shape
    if isinstance(letter.frames, bytes):
        _, decompress = load_codec()
        plain = np.frombuffer(bytearray(decompress(letter.frames)), dtype=np.uint8)
        frames = plain.reshape(rows, envs, *letter.frame_shape)
    else:
        frames = np.array(letter.frames)
    return Block(
        obs=torch.from_numpy(frames),
        action=torch.from_numpy(letter.action.astype(np.int64)),
        reward=torch.from_numpy(np.array(letter.reward)),
        flags=torch.from_numpy(np.array(letter.flags)),
        version=letter.version,
    )
