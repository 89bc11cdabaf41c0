"""Compression of the gradients that ranks add up. In: this rank's gradient. Out: the sum of all.

Every rank computes the sum from the same messages in the same order, so that it is the same to the
last bit everywhere. What top-k and PowerSGD leave out is added to the rank's next gradient (error
feedback). A non-finite gradient of any rank gives a non-finite sum, and that rank keeps nothing
of it.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from qfleet.agent.weights import FlatWeights
from qfleet.config.config import Config
from qfleet.core.types import StateDict
from qfleet.engines.parameter_server.compression import CASTS, TopK
from qfleet.networks.parallel.collectives import TensorRanks


class Ranks(TensorRanks, Protocol):
    """What an exchange needs of the ranks."""

    bytes_sent: int
    messages: int

    @property
    def exchanges(self) -> bool:
        """Whether there is anything to exchange."""
        ...


class Exchange(Protocol):
    """The way in which ranks add up their gradients."""

    def sum(self, gradient: Tensor, ranks: Ranks) -> None:
        """Replace the gradient by its sum over all ranks."""
        ...

    def state_dict(self) -> StateDict:
        """Return what this rank has not sent yet."""
        return {}

    def load_state_dict(self, state: StateDict) -> None:
        del state


class Dense(Exchange):
    """Sends every entry, in fewer bits if ``dtype`` has fewer."""

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self._dtype = dtype

    def sum(self, gradient: Tensor, ranks: Ranks) -> None:
        if self._dtype is None:
            ranks.sum(gradient)
        else:
            packed = gradient.to(self._dtype)
            ranks.sum(packed)
            gradient.copy_(packed)


class Sparse(Exchange):
    """Sends the largest entries and their indices (1712.01887)."""

    def __init__(self, share: float) -> None:
        self._top_k = TopK(share)

    def sum(self, gradient: Tensor, ranks: Ranks) -> None:
        packed = self._top_k.pack(gradient.cpu())
        if not isinstance(packed, tuple):
            ranks.sum(gradient)
            return
        values, indices = (ranks.gather(torch.from_numpy(array)) for array in packed[1:])
        gradient.zero_()
        for value, index in zip(values, indices, strict=True):
            # In this order on every device: one addition after another to each entry.
            gradient.index_add_(0, index.to(gradient.device).long(), value.to(gradient.device))

    def state_dict(self) -> StateDict:
        return {} if self._top_k.kept is None else {"kept": self._top_k.kept}

    def load_state_dict(self, state: StateDict) -> None:
        self._top_k.kept = state.get("kept")


class PowerSGD(Exchange):
    """Sends the gradient of a matrix as two thin factors (1905.13727).

    P = M·Q and then Q = Mᵀ·P, with P orthonormal, are added up; P·Qᵀ is M projected onto ``rank``
    directions, those of the last step improved. Vectors and small matrices are sent whole.
    """

    def __init__(self, weights: FlatWeights, rank: int) -> None:
        self._shapes: list[tuple[int, int, int]] = []
        """Offset, rows and columns of each matrix that is compressed."""
        whole = torch.ones_like(weights.data, dtype=torch.bool)
        for offset, (_, shape) in zip(weights.offsets, weights.layout, strict=True):
            rows, columns = shape[0] if shape else 1, math.prod(shape[1:])
            if (rows + columns) * rank < rows * columns:
                self._shapes.append((offset, rows, columns))
                whole[offset : offset + rows * columns] = False
        self._whole = whole.nonzero().squeeze(1)
        self._kept = torch.zeros_like(weights.data)
        generator = torch.Generator().manual_seed(0)  # the same on every rank
        self._right = [
            torch.randn(columns, rank, generator=generator).to(weights.data)
            for _, _, columns in self._shapes
        ]

    def sum(self, gradient: Tensor, ranks: Ranks) -> None:
        total = gradient + self._kept
        matrices = [total[at : at + n * m].view(n, m) for at, n, m in self._shapes]
        lefts = [matrix @ right for matrix, right in zip(matrices, self._right, strict=True)]
        *lefts, whole = _sums(ranks, [*lefts, total[self._whole]])
        if not all(bool(torch.isfinite(summed).all()) for summed in (*lefts, whole)):
            gradient.fill_(torch.nan)
            return
        lefts = [torch.linalg.qr(left).Q for left in lefts]
        own = [matrix.t() @ left for matrix, left in zip(matrices, lefts, strict=True)]
        self._right = _sums(ranks, own)
        gradient[self._whole] = whole
        for (at, n, m), matrix, left, mine, right in zip(
            self._shapes, matrices, lefts, own, self._right, strict=True
        ):
            self._kept[at : at + n * m] = (matrix - left @ mine.t()).view(-1)
            gradient[at : at + n * m] = (left @ right.t()).view(-1)

    def state_dict(self) -> StateDict:
        right = {str(i): right for i, right in enumerate(self._right)}
        return {"kept": self._kept, "right": right}

    def load_state_dict(self, state: StateDict) -> None:
        if state:
            self._kept.copy_(state["kept"])
            right = state["right"]  # by number; a checkpoint sorts the names as text
            self._right = [right[str(i)].to(old) for i, old in enumerate(self._right)]


def _sums(ranks: Ranks, tensors: list[Tensor]) -> list[Tensor]:
    """Return the sums of several tensors over all ranks, in one message."""
    if not tensors:
        return []
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    ranks.sum(flat)
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def make_exchange(config: Config, weights: FlatWeights) -> Exchange:
    kind = config.gradient_compression
    if kind == "top-k":
        return Sparse(config.top_k_share)
    if kind == "powersgd":
        return PowerSGD(weights, config.powersgd_rank)
    return Dense(CASTS.get(kind))
