"""Clipping of a worker's gradient before it is cut over shards. In and out: the vector."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def clip(gradient: Tensor, max_grad_norm: float) -> float:
    """Scale the gradient in place to a norm of at most ``max_grad_norm`` (0: unchanged).

    Return the norm before. It is the norm over all shards' slices, so only the worker knows it. In
    the same way, a gradient with a non-finite entry becomes NaN everywhere, so that every shard
    refuses it and no shard makes half of an update.
    """
    norm = float(torch.linalg.vector_norm(gradient))
    if not math.isfinite(norm):
        gradient.fill_(math.nan)
    elif 0 < max_grad_norm < norm:
        gradient.mul_(max_grad_norm / (norm + 1e-6))  # as LocalUpdater clips, to the last bit
    return norm
