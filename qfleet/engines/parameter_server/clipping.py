"""A worker's last look at its gradient, before it is cut over shards. In and out: the vector."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def clip(gradient: Tensor, max_grad_norm: float) -> float:
    """Scale the gradient to ``max_grad_norm`` at most (0: as it is), in place; its norm before.

    The norm is that of all shards' parts together, so only the worker can know it. The same holds
    for a gradient that is bad in one part only: all of it becomes NaN, so that every shard refuses
    it and none makes half an update.
    """
    norm = float(torch.linalg.vector_norm(gradient))
    if not math.isfinite(norm):
        gradient.fill_(math.nan)
    elif 0 < max_grad_norm < norm:
        gradient.mul_(max_grad_norm / (norm + 1e-6))  # as LocalUpdater clips, to the last bit
    return norm
