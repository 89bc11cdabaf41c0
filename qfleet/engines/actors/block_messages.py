"""Blocks of rows as messages: a ``Block`` is encoded as a ``BlockMessage``, and decoded again.

Actions are uint8 if all fit. uint8 frames are compressed if the replay memory is.
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
    """Number of the first row, counted from the first row of this life, to detect gaps."""
    version: int
    frames: NDArray[Any] | bytes
    """``[T, N, *frame_shape]``; bytes if they are compressed."""
    frame_shape: tuple[int, ...]
    action: NDArray[Any]
    reward: NDArray[np.float32]
    flags: NDArray[np.uint8]
    priority: NDArray[np.float32] | None
    """``[P, N]``: priorities of the newest P rows that have n rows after them."""

    @property
    def nbytes(self) -> int:
        """Bytes of the columns, without Ray's headers."""
        frames = len(self.frames) if isinstance(self.frames, bytes) else self.frames.nbytes
        priority = 0 if self.priority is None else self.priority.nbytes
        return frames + self.action.nbytes + self.reward.nbytes + self.flags.nbytes + priority

    @property
    def plain_nbytes(self) -> int:
        """Bytes of the columns without compression."""
        if not isinstance(self.frames, bytes):
            return self.nbytes
        # Only uint8 frames are compressed.
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
    """Return a copy of the block as a message: the block may be overwritten afterwards."""
    frames: NDArray[Any] | bytes = np.array(block.obs.numpy(), order="C")
    if compression == "lz4":
        compress, _ = load_codec()
        frames = compress(frames)
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


def decode(message: BlockMessage) -> Block:
    """Return the block, copied: arrays of another process may be read-only."""
    if isinstance(message.frames, bytes):
        _, decompress = load_codec()
        plain = np.frombuffer(bytearray(decompress(message.frames)), dtype=np.uint8)
        frames = plain.reshape(*message.action.shape, *message.frame_shape)
    else:
        frames = np.array(message.frames)
    return Block(
        obs=torch.from_numpy(frames),
        action=torch.from_numpy(message.action.astype(np.int64)),
        reward=torch.from_numpy(np.array(message.reward)),
        flags=torch.from_numpy(np.array(message.flags)),
        version=message.version,
    )
