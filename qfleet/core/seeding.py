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
