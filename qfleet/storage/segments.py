"""A large tensor split into pieces, so that a checkpoint writes only the pieces that changed.

A memory puts a ``Segments`` into its state dict; a loaded checkpoint contains it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


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
