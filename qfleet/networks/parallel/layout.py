"""Which part of each parameter a rank holds. In: whole flat vectors; out: parts of them, and back.

A parameter is split evenly along one of its dimensions, or every rank of its stage holds all of it.
The order of parameters in a flat vector is that of the plain network, so that a joined vector is
the one that a run without splitting has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
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


class Layout:
    """The parts of all parameters of a network.

    It has ``stages`` stages, each split among ``tensor`` ranks, which are numbered stage by stage.
    """

    def __init__(self, pieces: Sequence[Piece], tensor: int, stages: int = 1) -> None:
        self.pieces, self.tensor, self.ranks = list(pieces), tensor, tensor * stages
        self.whole_size = sum(math.prod(piece.shape) for piece in self.pieces)
        """Weights of the whole network."""

    def own_pieces(self, rank: int) -> list[Piece]:
        """Return the parameters of which a rank holds a part, or all."""
        return [piece for piece in self.pieces if piece.stage == rank // self.tensor]

    def local_sizes(self, rank: int) -> list[int]:
        """Return the weights of each of them that the rank holds."""
        own = self.own_pieces(rank)
        return [math.prod(p.shape) // (1 if p.dim is None else self.tensor) for p in own]

    def local_size(self, rank: int) -> int:
        """Return the number of weights that a rank holds."""
        return sum(self.local_sizes(rank))

    def holders(self, piece: Piece) -> range:
        """Return the ranks whose parts together are the parameter."""
        first = piece.stage * self.tensor
        return range(first, first + (1 if piece.dim is None else self.tensor))

    def cut_one(self, whole: Tensor, piece: Piece, rank: int) -> Tensor:
        """Return a rank's part of a whole parameter."""
        return (
            whole if piece.dim is None else whole.chunk(self.tensor, piece.dim)[rank % self.tensor]
        )

    def cut(self, whole: Tensor, rank: int) -> Tensor:
        """Return a rank's part of a whole flat vector."""
        parts = torch.split(whole, [math.prod(piece.shape) for piece in self.pieces])
        shaped = zip(self.pieces, parts, strict=True)
        stage = rank // self.tensor
        own = [self.cut_one(w.view(p.shape), p, rank) for p, w in shaped if p.stage == stage]
        return torch.cat([part.reshape(-1) for part in own])

    def join_each(self, part_of: Callable[[int, Piece], Tensor]) -> Iterator[Tensor]:
        """Yield the whole parameters, flat, one by one; ``part_of`` returns what a rank holds."""
        for piece in self.pieces:
            parts = [part_of(rank, piece) for rank in self.holders(piece)]
            if piece.dim is not None:
                shape = list(piece.shape)
                shape[piece.dim] //= self.tensor
                parts = [torch.cat([part.view(shape) for part in parts], piece.dim)]
            yield parts[0].reshape(-1)

    def split_vector(self, own: Tensor, rank: int) -> dict[str, Tensor]:
        """Return parameter name → its part in a rank's flat vector."""
        names = [piece.name for piece in self.own_pieces(rank)]
        return dict(zip(names, torch.split(own, self.local_sizes(rank)), strict=True))

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the whole flat vector of the parts of all ranks, by rank."""
        held = [self.split_vector(part, rank) for rank, part in enumerate(parts)]
        return torch.cat(list(self.join_each(lambda rank, piece: held[rank][piece.name])))
