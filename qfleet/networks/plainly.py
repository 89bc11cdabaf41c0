"""A switch for shortcuts that torch.func's transforms cannot see through.

Hand-written autograd nodes and memory formats make one network quicker on a CPU; within ``plainly``
networks are built of plain operations alone, so that ``torch.func.vmap`` can make K of one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_depth = 0


def is_plain() -> bool:
    return _depth > 0


@contextmanager
def plainly() -> Iterator[None]:
    global _depth
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1
