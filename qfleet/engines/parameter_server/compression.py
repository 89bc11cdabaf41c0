"""Vectors on the wire. In: a float32 vector. Out: ``Packed``, whose bytes are counted, and back.

Casts are for gradients and weights; ``TopK`` is for gradients, and lives with the worker that sends
them: it keeps what was not sent and adds it to the next gradient (error feedback). What is not
finite stays so, for a shard must see it in order to refuse it. Half precision ends at 65504: a
larger number arrives as infinity and is refused like one.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from qfleet.core.errors import ConfigError


class Packed(NamedTuple):
    """A vector as it travels."""

    size: int
    """Entries of the vector."""
    values: Tensor
    """All of them, or those that ``places`` names."""
    places: Tensor | None = None
    """Of ``values`` in the vector; None: they are all there. What is not named is 0."""

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + (0 if self.places is None else self.places.nbytes)


Sent: TypeAlias = Tensor | Packed
"""A vector as it is, or packed."""


class Codec(Protocol):
    def encode(self, vector: Tensor) -> Packed: ...


class Cast:
    """Every entry in fewer bits: ``torch.float16``, ``torch.bfloat16``; float32 changes nothing."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def encode(self, vector: Tensor) -> Packed:
        return Packed(vector.numel(), vector.to(self._dtype, copy=True))


class TopK:
    """The largest entries of a gradient and of what earlier ones left behind (1712.01887).

    What is sent is gone from here, whatever becomes of it: a push that a server drops is lost as
    one that was not compressed. A gradient that is not finite leaves what is kept alone.
    """

    def __init__(self, share: float) -> None:
        """``share`` of the entries is sent, rounded up; 1 sends all of them as they are."""
        if not 0 < share <= 1:
            raise ConfigError(f"a share of {share:g} entries cannot be sent; use above 0 up to 1")
        self._share = share
        self._kept: Tensor | None = None

    @property
    def kept(self) -> Tensor | None:
        """What was not sent yet; None where nothing ever waits, or before the first gradient."""
        return self._kept

    def encode(self, vector: Tensor) -> Packed:
        size = vector.numel()
        count = math.ceil(self._share * size)
        if count == size:
            return Packed(size, vector.clone())
        total = vector.clone() if self._kept is None else self._kept + vector
        # Not-a-number counts as largest, so that something bad is always among what is sent.
        places = total.abs().topk(count, sorted=False).indices
        values = total[places]
        if bool(torch.isfinite(total).all()):
            total[places] = 0.0
            self._kept = total
        small = size <= torch.iinfo(torch.int32).max
        return Packed(size, values, places.to(torch.int32) if small else places)


def decode(sent: Sent) -> Tensor:
    """The float32 vector; one that was sent as it is comes back as it is."""
    if isinstance(sent, Tensor):
        return sent
    values = sent.values.to(torch.float32)
    if sent.places is None:
        return values
    return values.new_zeros(sent.size).scatter_(0, sent.places.long(), values)


def bytes_of(sent: Sent) -> int:
    return sent.nbytes
