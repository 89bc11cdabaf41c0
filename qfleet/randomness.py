"""Random generators from a checkpoint: a saved state in, a generator that goes on from it out."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


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
