"""Seeding: derive a seed per consumer from one seed, and restore generators of a checkpoint."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Seeds:
    """One independent seed per consumer, all derived from ``config.seed``."""

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
    """Set the generator's state; derive a seed from it if it is of another kind of device.

    A resumed run may place a component on another device, whose generator has another kind of
    state. The run then continues reproducibly, but not with the numbers it would have drawn.
    """
    if state.shape == generator.get_state().shape:
        generator.set_state(state)
    else:
        digest = hashlib.sha256(state.cpu().numpy().tobytes()).digest()
        generator.manual_seed(int.from_bytes(digest[:7], "little"))


_SEED_LIMIT = 2**31
"""The Atari emulator's seeds are signed 32-bit numbers; it reads a negative one as "no seed"."""


def env_seeds(seed: int, count: int) -> list[int]:
    """Return ``count`` distinct seeds; seed i does not depend on ``count``."""
    sequence = np.random.SeedSequence(seed)
    seeds: dict[int, None] = {}
    while len(seeds) < count:
        (child,) = sequence.spawn(1)
        seeds[int(child.generate_state(1)[0]) % _SEED_LIMIT] = None
    return list(seeds)


def mix_seeds(seed: int, salt: int) -> int:
    """Return a seed derived from ``seed`` and ``salt``."""
    return int(np.random.SeedSequence([seed, salt]).generate_state(1)[0]) % _SEED_LIMIT
