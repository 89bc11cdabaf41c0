"""The columns of a replay memory: how wide each is, and where its bytes live.

In: an environment's spec, rows × envs, a device and perhaps a folder.
Out: one flat tensor per column, in RAM, on the device, or mapped from a file in that folder; the
frames behind a few operations, because they may be compressed instead.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from qfleet.core.errors import ConfigError, MemoryRefusedError
from qfleet.core.types import EnvSpec
from qfleet.memory.compression import CompressedFrames, Compression, compressed_bytes
from qfleet.storage.rundir import RunLock


class FrameColumn(Protocol):
    """Slots + 1 frames, of which the last is always blank.

    Stacks point at the blank frame before an episode's start.
    """

    def write(self, row: int, frames: Tensor) -> None:
        """Rows from ``row`` on become ``frames`` ``[rows, num_envs, *frame_shape]``."""
        ...

    def index_select(self, slot: Tensor) -> Tensor:
        """``[len(slot), *frame_shape]``, a copy."""
        ...

    def pieces(self, cuts: Sequence[tuple[int, int]]) -> Sequence[Tensor]:
        """Rows start … stop − 1 of each cut, as frames ``[rows, num_envs, *frame_shape]``.

        To be read before the next write.
        """
        ...

    def nbytes(self) -> int:
        """What the frames take at this moment."""
        ...


class PlainFrames:
    """A ``FrameColumn`` that is one tensor."""

    def __init__(self, frames: Tensor, rows: int, num_envs: int) -> None:
        """``frames`` is ``[rows * num_envs + 1, *frame_shape]`` with undefined contents."""
        self._frames = frames
        self._rows = frames[:-1].view(rows, num_envs, *frames.shape[1:])
        frames[-1].zero_()

    def write(self, row: int, frames: Tensor) -> None:
        self._rows[row : row + frames.shape[0]].copy_(frames)

    def index_select(self, slot: Tensor) -> Tensor:
        return self._frames.index_select(0, slot)

    def pieces(self, cuts: Sequence[tuple[int, int]]) -> Sequence[Tensor]:
        return [self._rows[start:stop] for start, stop in cuts]

    def nbytes(self) -> int:
        return self._frames.nbytes


class Columns(NamedTuple):
    """One entry per slot, and the blank frame."""

    frames: FrameColumn
    action: Tensor
    reward: Tensor
    flags: Tensor


def column_layout(spec: EnvSpec, slots: int) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of each column."""
    return {
        "frames": ((slots + 1, *spec.frame_shape), spec.torch_dtype),
        "action": ((slots,), torch.int64),
        "reward": ((slots,), torch.float32),
        "flags": ((slots,), torch.uint8),
    }


def column_bytes(spec: EnvSpec, slots: int, compression: Compression) -> int:
    """Bytes of all columns together; of compressed frames, what they are assumed to take."""
    layout = column_layout(spec, slots)
    sizes = {name: math.prod(shape) * dtype.itemsize for name, (shape, dtype) in layout.items()}
    if compression == "lz4":
        sizes["frames"] = compressed_bytes(spec, slots)
    return sum(sizes.values())


def column_path(directory: Path, name: str) -> Path:
    return directory / f"replay-{name}.bin"


def allocate(
    spec: EnvSpec,
    rows: int,
    num_envs: int,
    device: torch.device,
    directory: Path | None,
    compression: Compression,
) -> Columns:
    """Columns with undefined contents (what was never written is never read)."""
    layout = dict(column_layout(spec, rows * num_envs))
    if compression == "lz4":
        del layout["frames"]
    if directory is None:
        columns = {
            name: torch.empty(shape, dtype=dtype, device=device)
            for name, (shape, dtype) in layout.items()
        }
    else:
        if device.type != "cpu":
            raise ConfigError(
                f"replay_dir '{directory}' needs a replay memory on the CPU, not on {device}; "
                "drop replay_dir or choose device cpu"
            )
        columns = {
            name: _map_file(column_path(directory, name), shape, dtype)
            for name, (shape, dtype) in layout.items()
        }
    frames: FrameColumn
    if compression == "lz4":
        frames = CompressedFrames(spec, rows, num_envs)
    else:
        frames = PlainFrames(columns["frames"], rows, num_envs)
    return Columns(frames, columns["action"], columns["reward"], columns["flags"])


def lock_directory(directory: Path) -> RunLock:
    """Two rings in one folder would write over each other, or cut each other's files."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MemoryRefusedError(
            f"cannot make '{directory}': {error.strerror}; choose another --replay-dir"
        ) from None
    lock = RunLock(directory)
    lock.__enter__()
    return lock


def _map_file(path: Path, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    size = math.prod(shape)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            os.ftruncate(file.fileno(), size * dtype.itemsize)
            # A sparse file on a disk that fills up later kills the process with SIGBUS, beyond
            # the reach of any handler; taking the blocks now turns that into an error.
            if sys.platform == "linux":
                os.posix_fallocate(file.fileno(), 0, size * dtype.itemsize)
    except OSError as error:
        raise MemoryRefusedError(
            f"cannot reserve {size * dtype.itemsize} bytes for replay in '{path}': "
            f"{error.strerror}; lower --buffer-size or choose another --replay-dir"
        ) from None
    return torch.from_file(str(path), shared=True, size=size, dtype=dtype).view(shape)
