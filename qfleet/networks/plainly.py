"""A switch that disables optimisations which torch.func's transforms do not support.

Hand-written autograd nodes and memory formats make a single network faster on a CPU. In a
``plainly`` context networks use plain operations only, so that ``torch.func.vmap`` can batch them
over K agents.
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
