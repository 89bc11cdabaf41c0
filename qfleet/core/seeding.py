"""Where chance comes from: one seed in, a seed per consumer out; generators from a checkpoint."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Seeds:
    """One independent stream per consumer, all from ``config.seed``."""

    network: int
    memory: int
    actor: int
    learner: int
    objective: int
    envs: int
    eval_envs: int

    @classmethod
    def of(cls, seed: int) -> Seeds:
        children = np.random.SeedSequence(seed).spawn(7)
        return cls(*(int(child.generate_state(1, np.uint32)[0]) for child in children))


def restore_generator(generator: torch.Generator, state: Tensor) -> None:
    """Set the state; where it is another kind of device's, draw a seed from it instead.

    Where a part lives may change between two sittings, and with it the kind of its generator. The
    run then goes on reproducibly, though not with the numbers it would have drawn.
    """
    if state.shape == generator.get_state().shape:
        generator.set_state(state)
    else:
        digest = hashlib.sha256(state.cpu().numpy().tobytes()).digest()
        generator.manual_seed(int.from_bytes(digest[:7], "little"))


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
