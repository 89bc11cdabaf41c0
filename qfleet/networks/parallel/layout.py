"""Which part of each parameter a rank holds. In: whole flat vectors; out: parts of them, and back.

A parameter is split evenly along one of its dimensions, or every rank holds all of it. The order of
parameters in a flat vector is that of the plain network, so that a joined vector is the one that a
run without splitting has.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Piece(NamedTuple):
    """A parameter and the dimension along which it is split; None: it is not."""

    name: str
    shape: tuple[int, ...]
    """Of the whole parameter."""
    dim: int | None

    def local_shape(self, ranks: int) -> tuple[int, ...]:
        shape = list(self.shape)
        if self.dim is not None:
            shape[self.dim] //= ranks
        return tuple(shape)


class Layout:
    """The parts of all parameters of a network that is split among ``ranks`` ranks."""

    def __init__(self, pieces: Sequence[Piece], ranks: int) -> None:
        self.pieces, self.ranks = list(pieces), ranks

    @property
    def whole_size(self) -> int:
        """Weights of the whole network."""
        return sum(math.prod(piece.shape) for piece in self.pieces)

    @property
    def local_size(self) -> int:
        """Weights that each rank holds."""
        return sum(self.local_sizes())

    def local_sizes(self) -> list[int]:
        """Return the weights of each parameter that a rank holds."""
        return [math.prod(piece.local_shape(self.ranks)) for piece in self.pieces]

    def cut(self, whole: Tensor, rank: int) -> Tensor:
        """Return a rank's part of a whole flat vector."""
        parts = torch.split(whole, [math.prod(piece.shape) for piece in self.pieces])
        own = []
        for piece, part in zip(self.pieces, parts, strict=True):
            if piece.dim is not None:
                chunks = part.view(piece.shape).chunk(self.ranks, piece.dim)
                part = chunks[rank].reshape(-1)
            own.append(part)
        return torch.cat(own)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the whole flat vector of the parts of all ranks, by rank."""
        split = [torch.split(part, self.local_sizes()) for part in parts]
        whole = []
        for piece, *own in zip(self.pieces, *split, strict=True):
            if piece.dim is None:
                whole.append(own[0])
            else:
                shape = piece.local_shape(self.ranks)
                whole.append(torch.cat([part.view(shape) for part in own], piece.dim).view(-1))
        return torch.cat(whole)
