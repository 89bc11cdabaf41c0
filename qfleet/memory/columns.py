"""The columns of a replay memory: their shapes, dtypes and storage.

In: an environment's spec, the number of rows and envs, a device and optionally a folder.
Out: one flat tensor per column, in RAM, on the device, or mapped from a file in that folder;
compressed frames are a ``CompressedFrames``.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from qfleet.core.errors import CheckpointError, ConfigError, MemoryRefusedError
from qfleet.core.types import FIRST, SKIP, TERMINATED, EnvSpec, StateDict
from qfleet.memory.compression import CompressedFrames, Compression, compressed_bytes
from qfleet.storage.locks import RunLock
from qfleet.storage.segments import Segments


def column_layout(spec: EnvSpec, slots: int) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return the shape and dtype of each column."""
    return {
        "frames": ((slots + 1, *spec.frame_shape), spec.torch_dtype),
        "action": ((slots,), torch.int64),
        "reward": ((slots,), torch.float32),
        "flags": ((slots,), torch.uint8),
    }


def check_transitions(stored: StateDict, spec: EnvSpec) -> None:
    """Raise CheckpointError if a stored memory holds what no environment of ``spec`` gives."""
    frames, action, flags = stored["frames"], stored["action"], stored["flags"]
    pieces = frames.tensors if isinstance(frames, Segments) else [frames]
    row = (stored["shape"]["num_envs"], *spec.frame_shape)
    low, high = (-1, max(spec.num_obs_values, 2)) if spec.num_obs_values else (-math.inf, math.inf)
    in_range = [spec.obs_dtype == "uint8" or ((low < p) & (p < high)).all() for p in pieces]
    for name, ok in {
        "frames": all((p.shape[1:], p.dtype) == (row, spec.torch_dtype) for p in pieces),
        "observation": all(in_range) and sum(map(len, pieces)) * row[0] == flags.numel(),
        "action": ((action >= 0) & (action < spec.num_actions)).all(),
        "reward": stored["reward"][flags & SKIP == 0].isfinite().all(),  # others are never read
        "flags": (flags <= TERMINATED | SKIP | FIRST).all(),
    }.items():
        if not ok:
            raise CheckpointError(f"memory/{name} cannot be of environment '{spec.env_id}'")


def column_bytes(spec: EnvSpec, slots: int, compression: Compression) -> int:
    """Return the bytes of all columns together.

    The size of compressed frames is an estimate (``compression.ASSUMED_RATIO``).
    """
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
) -> tuple[Tensor | CompressedFrames, Tensor, Tensor, Tensor]:
    """Allocate frames, actions, rewards and flags: one per slot, and one frame more at the end.

    The contents are undefined: a slot is never read before it is written.
    """
    if directory is not None and device.type != "cpu":
        raise ConfigError(
            f"replay_dir '{directory}' needs a replay memory on the CPU, not on {device}; "
            "drop replay_dir or choose device cpu"
        )
    layout = column_layout(spec, rows * num_envs)

    def column(name: str) -> Tensor:
        shape, dtype = layout[name]
        if directory is None:
            return torch.empty(shape, dtype=dtype, device=device)
        return _map_file(column_path(directory, name), shape, dtype)

    frames = column("frames") if compression == "none" else CompressedFrames(spec, rows, num_envs)
    return frames, column("action"), column("reward"), column("flags")


def lock_directory(directory: Path) -> RunLock:
    """Create and lock the folder of a memory-mapped ring.

    Two rings in one folder would overwrite or truncate each other's files.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MemoryRefusedError(
            f"cannot create folder '{directory}': {error.strerror}; choose another --replay-dir"
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
            # Writing to a sparse file on a disk that fills up later kills the process with SIGBUS,
            # which no handler can catch; allocating the blocks now turns that into an error.
            if sys.platform == "linux":
                os.posix_fallocate(file.fileno(), 0, size * dtype.itemsize)
    except OSError as error:
        raise MemoryRefusedError(
            f"cannot reserve {size * dtype.itemsize} bytes for replay in '{path}': "
            f"{error.strerror}; lower --buffer-size or choose another --replay-dir"
        ) from None
    return torch.from_file(str(path), shared=True, size=size, dtype=dtype).view(shape)
