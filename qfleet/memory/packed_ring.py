"""A ring on the host whose samples reach an accelerator in one copy.

Observations of a batch share frames: with stacks of 4 and one-step returns, a sample's two stacks
have 5 different frames, not 8. Every different frame is copied once, packed with all other columns
into page-locked memory, and the stacks are put together on the accelerator.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qfleet.core.types import Batch, EnvSpec
from qfleet.memory.ring import Ring

ALIGNMENT = 16
"""Columns begin at multiples of this many bytes, as kernels prefer."""


class Form(NamedTuple):
    """Shape and type of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def padded_bytes(self) -> int:
        return math.ceil(self.nbytes / ALIGNMENT) * ALIGNMENT


class PackedRing(Ring):
    """A ``Ring`` that returns the same samples on device ``to``."""

    def __init__(self, spec: EnvSpec, *arguments: Any, to: torch.device, **options: Any) -> None:
        super().__init__(spec, *arguments, **options)
        self._frame_dtype = spec.torch_dtype
        # Two, because one is filled while the other is still being copied.
        self._buffers = [PinnedBuffer(to), PinnedBuffer(to)]

    def _gather(self, index: Tensor, weight: Tensor) -> Batch:
        reward, discount, next_index = self._returns(index)
        slots = torch.cat((self._frame_slots(index), self._frame_slots(next_index)))
        distinct, position = torch.unique(slots, return_inverse=True)
        action = self._action.index_select(0, index)
        columns = [action, reward, discount, weight, index, position]
        forms = [Form(column.shape, column.dtype) for column in columns]
        forms.append(Form((len(distinct), *self._frame_shape), self._frame_dtype))
        self._buffers.reverse()
        *here, frames = self._buffers[0].begin(forms)
        for column, own in zip(columns, here, strict=True):
            own.copy_(column)
        self._frames.index_select(distinct, out=frames)
        action, reward, discount, weight, index, position, frames = self._buffers[0].send()
        obs, next_obs = frames[position].view(2, -1, *self._obs_shape)
        return Batch(obs, action, reward, discount, next_obs, weight, index)


class PinnedBuffer:
    """Page-locked memory through which tensors reach a device together."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._forms: list[Form] = []
        self._size = 0
        self._sent: torch.Event | None = None

    def begin(self, forms: list[Form]) -> list[Tensor]:
        """Return tensors of these forms to write to; waits for the copy of the last call."""
        if self._sent is not None:
            self._sent.synchronize()
        self._forms = forms
        self._size = sum(form.padded_bytes for form in forms)
        if self._size > len(self._bytes):
            pin = self._device.type != "cpu"
            self._bytes = torch.empty(self._size, dtype=torch.uint8, pin_memory=pin)
        return _split(self._bytes, forms)

    def send(self) -> list[Tensor]:
        """Return copies of the tensors on the device; the host does not wait for them."""
        there = torch.empty(self._size, dtype=torch.uint8, device=self._device)
        there.copy_(self._bytes[: self._size], non_blocking=True)
        if self._device.type != "cpu":
            self._sent = torch.Event(self._device)
            self._sent.record(torch.accelerator.current_stream(self._device))
        return _split(there, self._forms)


def _split(flat: Tensor, forms: list[Form]) -> list[Tensor]:
    """Return views of ``flat``, one after another."""
    views, start = [], 0
    for form in forms:
        part = flat[start : start + form.nbytes]
        views.append(part.view(form.dtype).view(form.shape))
        start += form.padded_bytes
    return views
