"""A flat vector cut over shards. In: how many weights and shards. Out: slices as even as can be."""

from __future__ import annotations

import itertools

from qfleet.core.errors import ConfigError


def cut(size: int, shards: int) -> list[slice]:
    """One slice per shard, in order; the first ``size % shards`` of them are one longer."""
    if not 1 <= shards <= size:
        raise ConfigError(f"{shards} shards cannot share {size} weights; use 1 to {size} shards")
    shortest, longer = divmod(size, shards)
    starts = [shard * shortest + min(shard, longer) for shard in range(shards + 1)]
    return [slice(start, stop) for start, stop in itertools.pairwise(starts)]
