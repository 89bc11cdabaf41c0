"""Compression of the vectors in messages. In: a float32 tensor. Out: a ``Vector``, and back.

Casts serve gradients and weights. ``TopK`` serves gradients and belongs to the worker that sends
them: it keeps the entries that were not sent and adds them to the next gradient (error feedback). A
non-finite entry stays non-finite, because a shard must see it in order to refuse the gradient.
float16 ends at 65504: a larger number arrives as infinity and is refused as well.
"""

from __future__ import annotations

import math
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qfleet.config.config import Config

Array: TypeAlias = NDArray[Any]
"""All entries of a vector, as float32, as float16, or as int16: the bits of bfloat16, a type that
NumPy does not have."""
Vector: TypeAlias = Array | tuple[int, Array, Array] | Tensor
"""In a message an array, or the size of the vector, some of its entries and their indices (all
other entries are 0). A tensor once a shard has unpacked it."""
CASTS = {"fp16": torch.float16, "bf16": torch.bfloat16}


class Compressor(Protocol):
    def pack(self, vector: Tensor) -> Vector: ...


class Cast:
    """Sends every entry in fewer bits; a cast to float32 changes nothing."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def pack(self, vector: Tensor) -> Array:
        packed = vector.to(self._dtype, copy=True)
        return (packed.view(torch.int16) if self._dtype == torch.bfloat16 else packed).numpy()


class TopK:
    """Sends the largest entries of a gradient plus those kept from earlier ones (1712.01887).

    An entry that was sent is no longer kept, even if the server drops the push, as it would be
    without compression. A non-finite gradient does not change what is kept.
    """

    def __init__(self, share: float) -> None:
        """Send this ``share`` of the entries, rounded up; 1 sends all of them unchanged."""
        self._share = share
        self.kept: Tensor | None = None
        """The entries not sent yet; None before the first gradient, and always for share 1."""

    def pack(self, vector: Tensor) -> Vector:
        size = vector.numel()
        count = math.ceil(self._share * size)
        if count == size:
            return vector.clone().numpy()
        total = vector.clone() if self.kept is None else self.kept + vector
        # NaN counts as largest, so that a non-finite entry is always among those sent.
        indices = total.abs().topk(count, sorted=False).indices
        values = total[indices]
        if bool(torch.isfinite(total).all()):
            total[indices] = 0.0
            self.kept = total
        small = size <= torch.iinfo(torch.int32).max
        return size, values.numpy(), (indices.to(torch.int32) if small else indices).numpy()


def make_compressor(config: Config) -> Compressor | None:
    """Return the compressor of one shard's gradients; None sends them unchanged."""
    if config.gradient_compression == "top-k":
        return TopK(config.top_k_share)
    return make_cast(config.gradient_compression)


def make_cast(kind: str) -> Cast | None:
    return None if kind == "none" else Cast(CASTS[kind])


def unpack(vector: Vector) -> Tensor:
    """Return the float32 vector; one that was not compressed shares its memory."""
    if isinstance(vector, Tensor):
        return vector
    if isinstance(vector, tuple):
        size, values, indices = vector
        return torch.zeros(size).scatter_(
            0, torch.from_numpy(indices).long(), torch.from_numpy(values)
        )
    tensor = torch.from_numpy(vector)
    if vector.dtype == np.int16:
        tensor = tensor.view(torch.bfloat16)
    return tensor.float() if vector.itemsize == 2 else tensor


def bytes_of(vector: Vector) -> int:
    return vector[1].nbytes + vector[2].nbytes if isinstance(vector, tuple) else vector.nbytes
