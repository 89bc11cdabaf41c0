"""Cuts a flat vector over shards. In: the numbers of weights and shards. Out: even slices."""

from __future__ import annotations

import itertools

from qfleet.core.errors import ConfigError


def cut(size: int, shards: int) -> list[slice]:
    """Return one slice per shard, in order; the first ``size % shards`` are one longer."""
    if not 1 <= shards <= size:
        raise ConfigError(f"{size} weights need 1 to {size} shards, got {shards}")
    shortest, longer = divmod(size, shards)
    starts = [shard * shortest + min(shard, longer) for shard in range(shards + 1)]
    return [slice(start, stop) for start, stop in itertools.pairwise(starts)]
