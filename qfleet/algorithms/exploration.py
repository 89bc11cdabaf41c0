"""Exploration: one ε per env, and sampling of actions from a policy."""

from __future__ import annotations

import torch
from torch import Tensor


def epsilon_ladder(num_envs: int, base: float) -> Tensor:
    """Return a constant ε per env, base^(1 + 7i/(N−1)), float32 ``[N]`` (Ape-X, 1803.00933)."""
    assert num_envs > 0, f"num_envs must be positive, not {num_envs}"
    exponent = 1 + 7 * torch.arange(num_envs, dtype=torch.float64) / max(num_envs - 1, 1)
    return torch.pow(base, exponent).float()


def sample_actions(logits: Tensor, chance: Tensor) -> Tensor:
    """Sample one action from each policy softmax(logits) ``[B, A]``.

    ``chance`` ``[B]`` is a uniform random number in [0, 1) per policy. The result is the first
    action whose cumulative probability exceeds ``chance``. The last cumulative probability may be
    slightly below 1 by rounding, which does not matter.
    """
    assert chance.shape == logits.shape[:1], f"chance {chance.shape} for logits {logits.shape}"
    reached = torch.softmax(logits, dim=1).cumsum(1)[:, :-1]
    return (reached <= chance.unsqueeze(1)).sum(1)
