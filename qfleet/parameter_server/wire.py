"""Vectors between processes. In: what a codec made; out: plain arrays, and back.

Ray moves arrays without copying them about, which it does not do with torch's tensors.
"""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray
from torch import Tensor

from qfleet.parameter_server.compression import Packed, Sent

# What Ray hands over lies in memory that others read too. Nobody here writes to it.
warnings.filterwarnings("ignore", message="The given NumPy array is not writable")


class Wire(NamedTuple):
    """A vector, or the named entries of one, as it travels."""

    size: int
    values: NDArray[Any]
    is_bfloat16: bool = False
    """Of which arrays know nothing: its bits travel as integers."""
    places: NDArray[Any] | None = None
    is_packed: bool = False


def to_wire(sent: Sent) -> Wire:
    if isinstance(sent, Tensor):
        return Wire(sent.numel(), sent.numpy())
    values, is_bfloat16 = sent.values, sent.values.dtype == torch.bfloat16
    array = (values.view(torch.int16) if is_bfloat16 else values).numpy()
    places = None if sent.places is None else sent.places.numpy()
    return Wire(sent.size, array, is_bfloat16, places, is_packed=True)


def from_wire(wire: Wire) -> Sent:
    values = torch.from_numpy(wire.values)
    if not wire.is_packed:
        return values
    if wire.is_bfloat16:
        values = values.view(torch.bfloat16)
    return Packed(wire.size, values, None if wire.places is None else torch.from_numpy(wire.places))
