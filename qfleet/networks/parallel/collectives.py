"""The exchanges of a split network, as autograd functions on activations ``[B, channels, …]``.

Each of them has the opposite exchange in its backward pass (Megatron-LM, 1909.08053). All ranks
have the same bits in an activation that is not split, and in its gradient.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

CHANNELS = 1
"""The dimension along which activations are split."""


class TensorRanks(Protocol):
    """The ranks that hold the parts of one network."""

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
    entered: Tensor = _Enter.apply(x, ranks)  # type: ignore[no-untyped-call]
    return entered


def add_up(x: Tensor, ranks: TensorRanks) -> Tensor:
    """Return the sum of ``x`` over all ranks."""
    summed: Tensor = _AddUp.apply(x, ranks)  # type: ignore[no-untyped-call]
    return summed


def gather_channels(x: Tensor, ranks: TensorRanks) -> Tensor:
    """Return the channels of all ranks."""
    gathered: Tensor = _Gather.apply(x, ranks)  # type: ignore[no-untyped-call]
    return gathered


def own_channels(x: Tensor, ranks: TensorRanks) -> Tensor:
    """Return this rank's part of the channels."""
    own: Tensor = _Own.apply(x, ranks)  # type: ignore[no-untyped-call]
    return own


def _summed(x: Tensor, ranks: TensorRanks) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    ranks.sum(total)
    return total


def _gathered(x: Tensor, ranks: TensorRanks) -> Tensor:
    return torch.cat(ranks.gather(x.contiguous()), CHANNELS)


def _own(x: Tensor, ranks: TensorRanks) -> Tensor:
    return x.chunk(ranks.size, CHANNELS)[ranks.rank].contiguous()


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: TensorRanks) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _summed(grad, ctx.ranks), None


class _AddUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: TensorRanks) -> Tensor:
        del ctx
        return _summed(x, ranks)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        del ctx
        return grad, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: TensorRanks) -> Tensor:
        ctx.ranks = ranks
        return _gathered(x, ranks)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _own(grad, ctx.ranks), None


class _Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: TensorRanks) -> Tensor:
        ctx.ranks = ranks
        return _own(x, ranks)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _gathered(grad, ctx.ranks), None
