"""Safetensors files: writing and verified reading.

Files are written here as a stream (hash and data in one pass, no second copy of a tensor in memory,
and a full disk raises OSError); they are read by the safetensors library.
"""

from __future__ import annotations

import hashlib
import json
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from qfleet.core import files
from qfleet.core.errors import CheckpointError
from qfleet.storage.segments import Streamed

_DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_RESERVED_KEY = "__metadata__"


@dataclass(frozen=True)
class FileRecord:
    """The size and checksum of a file in a manifest."""

    size_bytes: int
    sha256: str


def check_storable(name: str, tensor: Tensor) -> None:
    """Raise CheckpointError if safetensors cannot store this tensor under this name."""
    try:
        name.encode()
    except UnicodeEncodeError:
        raise CheckpointError(f"state key {name!r} is not valid Unicode; rename it") from None
    if name == _RESERVED_KEY:
        raise CheckpointError(f"state key '{name}' is reserved by safetensors; rename it")
    if tensor.layout != torch.strided or tensor.dtype not in _DTYPE_NAMES:
        kind = f"{tensor.dtype}, {tensor.layout}"
        raise CheckpointError(f"state '{name}' is a tensor of {kind}; store a dense real tensor")


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor | Streamed], metadata: Mapping[str, str] | None = None
) -> FileRecord:
    """Write a safetensors file and sync it. Views and aliases are stored as separate tensors."""
    # The widest elements come first, which keeps every tensor aligned, as in the format's own
    # writer.
    like = {key: t.like if isinstance(t, Streamed) else t for key, t in tensors.items()}
    order = sorted(tensors, key=lambda key: (-like[key].element_size(), key))
    header: dict[str, Any] = {_RESERVED_KEY: dict(metadata)} if metadata else {}
    offset = 0
    for key in order:
        tensor = like[key]
        end = offset + tensor.numel() * tensor.element_size()
        header[key] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    header_bytes = json.dumps(header).encode()
    header_bytes += b" " * (-len(header_bytes) % 8)
    digest = hashlib.sha256()
    files.write_point(f"create {path.name}")
    with path.open("xb") as file:
        for prefix in (len(header_bytes).to_bytes(8, "little"), header_bytes):
            digest.update(prefix)
            file.write(prefix)
        files.write_point(f"write {path.name}")
        for key in order:
            given = tensors[key]
            for piece in given.pieces() if isinstance(given, Streamed) else (given,):
                flat = piece.detach().cpu().contiguous().reshape(-1)
                if not flat.numel():
                    continue  # an empty tensor may have strides that cannot be viewed as bytes
                data = flat.view(torch.uint8).numpy().data
                digest.update(data)
                file.write(data)
        files.sync(file, path.name)
    return FileRecord(8 + len(header_bytes) + offset, digest.hexdigest())


def read_tensors(path: Path, record: FileRecord) -> dict[str, Tensor]:
    """Verify a file against its record, then load it. Nothing in it is ever executed."""
    try:
        status = path.lstat()
        # A symbolic link may point outside the run, and reading a pipe may block forever.
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"'{path}' is not a regular file")
        if status.st_size != record.size_bytes:
            raise CheckpointError(
                f"'{path}' failed the size check: {status.st_size} bytes, "
                f"its manifest says {record.size_bytes}"
            )
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != record.sha256:
            raise CheckpointError(
                f"'{path}' failed the SHA-256 check: {found[:12]}…, "
                f"its manifest says {record.sha256[:12]}…"
            )
    except OSError as error:
        raise CheckpointError(f"'{path}' cannot be read: {error.strerror or error}") from None
    return read_unverified(path)[0]


def read_unverified(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Load a file's tensors and metadata. Nothing in it is ever executed."""
    try:
        with safe_open(str(path), framework="pt", device="cpu") as file:
            # The library memory-maps the file; a copy stays valid after the file is closed.
            tensors = {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118
            return tensors, file.metadata() or {}
    except OSError as error:
        raise CheckpointError(f"'{path}' cannot be read: {error.strerror or error}") from None
    except SafetensorError as error:
        raise CheckpointError(f"'{path}' is not a safetensors file: {error}") from None
