"""A big tensor cut into pieces, so that a checkpoint writes only the pieces that changed.

In: a memory hands over its pieces with a version each. Out: a loaded checkpoint hands them back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass
class Segments:
    """Pieces of a ring. Equal versions of piece i promise equal contents within one run."""

    tensors: Sequence[Tensor]
    versions: list[int]

    def __post_init__(self) -> None:
        if len(self.tensors) != len(self.versions):
            raise ValueError(f"{len(self.tensors)} tensors but {len(self.versions)} versions")
