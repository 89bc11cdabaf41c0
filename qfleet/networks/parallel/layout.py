"""Which part of each parameter a rank holds. In: whole flat vectors; out: parts of them, and back.

A parameter is split evenly along one of its dimensions, or every rank of its stage holds all of it.
The order of parameters in a flat vector is that of the plain network, so that a joined vector is
the one that a run without splitting has.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Piece(NamedTuple):
    """A parameter, the dimension along which it is split (None: it is not), and its stage."""

    name: str
    shape: tuple[int, ...]
    """Of the whole parameter."""
    dim: int | None
    stage: int = 0

    def local_shape(self, tensor: int) -> tuple[int, ...]:
        shape = list(self.shape)
        if self.dim is not None:
            shape[self.dim] //= tensor
        return tuple(shape)


class Layout:
    """The parts of all parameters of a network.

    It has ``stages`` stages, each split among ``tensor`` ranks, which are numbered stage by stage.
    """

    def __init__(self, pieces: Sequence[Piece], tensor: int, stages: int = 1) -> None:
        self.pieces, self.tensor, self.ranks = list(pieces), tensor, tensor * stages

    @property
    def whole_size(self) -> int:
        """Weights of the whole network."""
        return sum(math.prod(piece.shape) for piece in self.pieces)

    def local_size(self, rank: int) -> int:
        """Return the number of weights that a rank holds."""
        return sum(self.local_sizes(rank))

    def own_pieces(self, rank: int) -> list[Piece]:
        """Return the parameters of which a rank holds a part, or all."""
        return [piece for piece in self.pieces if piece.stage == rank // self.tensor]

    def local_sizes(self, rank: int) -> list[int]:
        """Return the weights of each of them that the rank holds."""
        return [math.prod(piece.local_shape(self.tensor)) for piece in self.own_pieces(rank)]

    def cut(self, whole: Tensor, rank: int) -> Tensor:
        """Return a rank's part of a whole flat vector."""
        parts = torch.split(whole, [math.prod(piece.shape) for piece in self.pieces])
        own = []
        for piece, part in zip(self.pieces, parts, strict=True):
            if piece.stage != rank // self.tensor:
                continue
            if piece.dim is not None:
                chunks = part.view(piece.shape).chunk(self.tensor, piece.dim)
                part = chunks[rank % self.tensor].reshape(-1)
            own.append(part)
        return torch.cat(own)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the whole flat vector of the parts of all ranks, by rank."""
        split = [iter(torch.split(part, self.local_sizes(rank))) for rank, part in enumerate(parts)]
        whole = []
        for piece in self.pieces:
            first = piece.stage * self.tensor
            own = [next(split[rank]) for rank in range(first, first + self.tensor)]
            if piece.dim is None:
                whole.append(own[0])
            else:
                shape = piece.local_shape(self.tensor)
                whole.append(torch.cat([part.view(shape) for part in own], piece.dim).view(-1))
        return torch.cat(whole)
