"""How often to act at random: the clock in, ε out; and drawing actions from a policy."""

from __future__ import annotations

import torch
from torch import Tensor


def linear_epsilon(
    env_steps: int, total_steps: int, fraction: float, initial: float, final: float
) -> float:
    """ε falls linearly over the first ``fraction`` of the run, then stays (as in SB3)."""
    assert total_steps > 0, f"total_steps must be positive, not {total_steps}"
    progress = env_steps / total_steps
    if progress >= fraction:
        return final
    return initial + progress * (final - initial) / fraction


def epsilon_ladder(num_envs: int, base: float) -> Tensor:
    """A constant ε per env, base^(1 + 7i/(N−1)), float32 ``[N]`` (Ape-X, 1803.00933)."""
    assert num_envs > 0, f"num_envs must be positive, not {num_envs}"
    exponent = 1 + 7 * torch.arange(num_envs, dtype=torch.float64) / max(num_envs - 1, 1)
    return torch.pow(base, exponent).float()


def sample_actions(logits: Tensor, chance: Tensor) -> Tensor:
    """One action of each policy softmax(logits) ``[B, A]``, by a number in [0, 1) each, ``[B]``.

    It is the first action up to which the policy's probabilities add up to more than ``chance``;
    that the last of the sums may be a little less than 1 does not matter.
    """
    assert chance.shape == logits.shape[:1], f"chance {chance.shape} for logits {logits.shape}"
    reached = torch.softmax(logits, dim=1).cumsum(1)[:, :-1]
    return (reached <= chance.unsqueeze(1)).sum(1)
