"""The columns of a replay memory: how wide each is, and where its bytes live.

In: an environment's spec, a number of slots (rows × envs), a device and perhaps a folder.
Out: one flat tensor per column, in RAM, on the device, or mapped from a file in that folder.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from qfleet.core import EnvSpec
from qfleet.errors import ConfigError, MemoryRefusedError
from qfleet.storage.rundir import RunLock


class Columns(NamedTuple):
    """One entry per slot; ``frames`` has one more at its end, which is always blank."""

    frames: Tensor
    """``[slots + 1, *frame_shape]``; stacks point at the blank frame before an episode's start."""
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


def column_bytes(spec: EnvSpec, slots: int) -> int:
    """Bytes of all columns together."""
    layout = column_layout(spec, slots).values()
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in layout)


def column_path(directory: Path, name: str) -> Path:
    return directory / f"replay-{name}.bin"


def allocate(spec: EnvSpec, slots: int, device: torch.device, directory: Path | None) -> Columns:
    """Columns with undefined contents (what was never written is never read)."""
    layout = column_layout(spec, slots)
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
    columns["frames"][slots].zero_()
    return Columns(**columns)


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
