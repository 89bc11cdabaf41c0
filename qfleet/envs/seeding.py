"""One seed in, the seeds of many environments out: distinct, reproducible, well mixed."""

from __future__ import annotations

import numpy as np

_SEED_LIMIT = 2**31
"""The emulator's seeds are signed 32-bit numbers, and it reads a negative one as "no seed"."""


def env_seeds(seed: int, count: int) -> list[int]:
    """Seeds of ``count`` environments; the first ones do not depend on ``count``."""
    sequence = np.random.SeedSequence(seed)
    seeds: dict[int, None] = {}
    while len(seeds) < count:
        (child,) = sequence.spawn(1)
        seeds[int(child.generate_state(1)[0]) % _SEED_LIMIT] = None
    return list(seeds)


def rebuilt_seed(seed: int, rebuilds: int) -> int:
    """Seed of an environment that was rebuilt; its first one would replay the same failure."""
    return mix_seeds(seed, rebuilds)


def mix_seeds(seed: int, salt: int) -> int:
    """Another seed, decided by both."""
    return int(np.random.SeedSequence([seed, salt]).generate_state(1)[0]) % _SEED_LIMIT
