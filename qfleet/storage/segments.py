"""A large tensor split into pieces, so that a checkpoint writes only the pieces that changed.

A memory puts a ``Segments`` into its state dict; a loaded checkpoint contains it again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor


class LazyPieces(Sequence[Tensor]):
    """Pieces that are read one by one, when they are used: memory need not hold all of them."""

    def __init__(self, count: int, read: Callable[[int], Tensor]) -> None:
        self._count, self._read = count, read

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        if index >= self._count:
            raise IndexError(index)
        return self._read(index)


class Streamed(NamedTuple):
    """A tensor of which memory need not hold all: its pieces are written one after the other."""

    like: Tensor
    """A tensor on the meta device with its shape and type."""
    pieces: Callable[[], Iterable[Tensor]]


@dataclass
class Segments:
    """Pieces of a tensor, each with a version.

    Within one run, piece i has equal contents in two checkpoints if its versions are equal.
    """

    tensors: Sequence[Tensor]
    versions: list[int]

    def __post_init__(self) -> None:
        if len(self.tensors) != len(self.versions):
            raise ValueError(f"{len(self.tensors)} tensors but {len(self.versions)} versions")
