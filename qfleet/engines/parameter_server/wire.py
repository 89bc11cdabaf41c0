"""Messages between processes. In: what codecs and shards made; out: arrays and tuples, and back.

Ray moves arrays without copying them about, which it does not do with torch's tensors; and it asks
itself, in Python, what to do with every object that is neither an array nor built in. So vectors
travel as arrays, and messages as plain tuples.
"""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple, TypeAlias

import torch
from numpy.typing import NDArray
from torch import Tensor

from qfleet.engines.parameter_server.compression import Packed, Sent, decode

INLINE_VECTOR_BYTES = 2**20
"""Smaller ones travel within their message. Ray takes twice as long by way of its object store at
this size, and as long at twice this size (docs/performance.md)."""

# What Ray hands over lies in memory that others read too. Nobody here writes to it.
warnings.filterwarnings("ignore", message="The given NumPy array is not writable")


class Parcel(NamedTuple):
    """A packed vector, or the named entries of one, as it travels."""

    size: int
    values: NDArray[Any]
    is_bfloat16: bool = False
    """Of which arrays know nothing: its bits travel as integers."""
    places: NDArray[Any] | None = None


Wire: TypeAlias = NDArray[Any] | Parcel
"""A vector as it is, or packed."""


def to_wire(sent: Sent) -> Wire:
    if isinstance(sent, Tensor):
        return sent.numpy()
    values, is_bfloat16 = sent.values, sent.values.dtype == torch.bfloat16
    array = (values.view(torch.int16) if is_bfloat16 else values).numpy()
    places = None if sent.places is None else sent.places.numpy()
    return Parcel(sent.size, array, is_bfloat16, places)


def from_wire(wire: Wire) -> Sent:
    if not isinstance(wire, Parcel):
        return torch.from_numpy(wire)
    values = torch.from_numpy(wire.values)
    if wire.is_bfloat16:
        values = values.view(torch.bfloat16)
    return Packed(wire.size, values, None if wire.places is None else torch.from_numpy(wire.places))


def vector_from_wire(wire: Wire) -> NDArray[Any]:
    """The float32 vector; one that travelled as it is comes back as it is."""
    return decode(from_wire(wire)).numpy() if isinstance(wire, Parcel) else wire


def bytes_of_wire(wire: Wire) -> int:
    if not isinstance(wire, Parcel):
        return wire.nbytes
    return wire.values.nbytes + (0 if wire.places is None else wire.places.nbytes)


def plain(value: Any) -> Any:
    """The same without classes of ours: named tuples as tuples, in tuples too."""
    return tuple(plain(part) for part in value) if isinstance(value, tuple) else value


def wire_from_plain(value: Any) -> Any:
    return Parcel(*value) if isinstance(value, tuple) else value
