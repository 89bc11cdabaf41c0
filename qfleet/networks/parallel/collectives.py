"""The exchanges of a split network, as autograd functions on activations ``[B, channels, …]``.

Each of them has the opposite exchange in its backward pass (Megatron-LM, 1909.08053). All ranks
have the same bits in an activation that is not split, and in its gradient. Tensors on the meta
device, which only have shapes, are not exchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

CHANNELS = 1
"""The dimension along which activations are split."""


class TensorRanks(Protocol):
    """Ranks that exchange tensors: here, those that hold the parts of one network."""

    @property
    def rank(self) -> int:
        """The number of this rank among them."""
        ...

    @property
    def size(self) -> int: ...

    def sum(self, tensor: Tensor) -> None:
        """Replace the tensor by its sum over these ranks, the same bits on each."""
        ...

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of these ranks, by rank; they have the same shape."""
        ...


def enter(x: Tensor, ranks: TensorRanks) -> Tensor:
    """Return ``x``, which enters parts of a layer; its gradient is the sum of what each returns."""
    return _exchange(x, ranks, _same, _summed)


def add_up(x: Tensor, ranks: TensorRanks) -> Tensor:
    """Return the sum of ``x`` over all ranks."""
    return _exchange(x, ranks, _summed, _same)


def gather_channels(x: Tensor, ranks: TensorRanks) -> Tensor:
    """Return the channels of all ranks."""
    return _exchange(x, ranks, _gathered, _own)


def own_channels(x: Tensor, ranks: TensorRanks) -> Tensor:
    """Return this rank's part of the channels."""
    return _exchange(x, ranks, _own, _gathered)


def _same(x: Tensor, _: TensorRanks) -> Tensor:
    return x.view_as(x)


def _summed(x: Tensor, ranks: TensorRanks) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    if not x.is_meta:
        ranks.sum(total)
    return total


def _gathered(x: Tensor, ranks: TensorRanks) -> Tensor:
    parts = [x] * ranks.size if x.is_meta else ranks.gather(x.contiguous())
    return torch.cat(parts, CHANNELS)


def _own(x: Tensor, ranks: TensorRanks) -> Tensor:
    return x.chunk(ranks.size, CHANNELS)[ranks.rank].contiguous()


_Way: TypeAlias = Callable[[Tensor, TensorRanks], Tensor]


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: TensorRanks, ahead: _Way, back: _Way) -> Tensor:
        ctx.ranks, ctx.back = ranks, back
        return ahead(x, ranks)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.back(grad, ctx.ranks), None, None, None


def _exchange(x: Tensor, ranks: TensorRanks, ahead: _Way, back: _Way) -> Tensor:
    exchanged: Tensor = _Exchange.apply(x, ranks, ahead, back)  # type: ignore[no-untyped-call]
    return exchanged
