"""Targets of learning: pure functions from batch tensors to targets.

γ, n and episodes do not appear here: ``discount`` is γ^k, and 0 where the episode terminated.
"""

from __future__ import annotations

import torch
from torch import Tensor


def take(values: Tensor, action: Tensor) -> Tensor:
    """Return the entries of the actions: ``[B, A]`` → ``[B]``, ``[B, A, K]`` → ``[B, K]``."""
    assert values.dim() in (2, 3), f"values must be [B, A] or [B, A, K], not {values.shape}"
    assert action.dtype == torch.int64, f"action must be int64, not {action.dtype}"
    assert action.shape == values.shape[:1], f"action {action.shape} for values {values.shape}"
    if values.dim() == 2:
        return values.gather(1, action.unsqueeze(1)).squeeze(1)
    index = action.view(-1, 1, 1).expand(-1, 1, values.shape[2])
    return values.gather(1, index).squeeze(1)


def td_target(reward: Tensor, discount: Tensor, next_value: Tensor) -> Tensor:
    """Return r + discount·v (Watkins 1989; 1312.5602), for every entry of v ``[B, …]``."""
    assert reward.dim() == 1, f"reward must be [B], not {reward.shape}"
    assert discount.shape == reward.shape, f"discount {discount.shape}, reward {reward.shape}"
    assert next_value.shape[:1] == reward.shape, f"{next_value.shape} for reward {reward.shape}"
    _assert_floating(reward, discount, next_value)
    for _ in next_value.shape[1:]:
        reward, discount = reward.unsqueeze(-1), discount.unsqueeze(-1)
    return torch.addcmul(reward, discount, next_value)


def soft_policy(q: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return the softmax policy π ∝ exp(q/τ) and log π, both ``[B, A]`` (2007.14430).

    The maximum is subtracted before the division, so that a small τ does not magnify the rounding
    of large values; log π stays finite where π underflows to 0.
    """
    assert q.dim() == 2, f"q must be [B, A], not {q.shape}"
    assert temperature > 0, f"temperature must be positive, not {temperature}"
    _assert_floating(q)
    log_policy = torch.log_softmax((q - q.amax(1, keepdim=True)) / temperature, dim=1)
    return log_policy.exp(), log_policy


def soft_value(
    next_values: Tensor, policy: Tensor, log_policy: Tensor, temperature: float
) -> Tensor:
    """Return Σ_a π(a) (z(a) − τ log π(a)), per atom if z is ``[B, A, K]`` (2007.14430)."""
    assert next_values.dim() in (2, 3), f"next_values has shape {next_values.shape}"
    assert policy.shape == next_values.shape[:2], f"{policy.shape} for {next_values.shape}"
    assert log_policy.shape == policy.shape, f"log_policy {log_policy.shape}, not {policy.shape}"
    _assert_floating(next_values, policy, log_policy)
    entropy_bonus = temperature * log_policy
    if next_values.dim() == 3:
        policy, entropy_bonus = policy.unsqueeze(2), entropy_bonus.unsqueeze(2)
    return (policy * (next_values - entropy_bonus)).sum(1)


def munchausen_bonus(
    q: Tensor, action: Tensor, alpha: float, temperature: float, clip: float
) -> Tensor:
    """Return Munchausen's reward bonus α·clamp(τ log π(a|s), clip, 0) ``[B]`` (2007.14430)."""
    assert clip <= 0, f"clip must be ≤ 0, got {clip}"
    _, log_policy = soft_policy(q, temperature)
    return alpha * (temperature * take(log_policy, action)).clamp(clip, 0.0)


def project_categorical(probs: Tensor, atoms: Tensor, support: Tensor) -> Tensor:
    """Project masses ``probs`` at ``atoms`` onto ``support`` ``[K]`` (C51, 1707.06887, eq. 7).

    ``atoms`` is ``[B, K]``; ``probs`` is ``[B, K]``, or ``[B, A, K]`` for several distributions on
    the same atoms.

    The mass of an atom between two support points is split between them linearly; the mass of an
    atom beyond the ends goes to the end. The position of an atom is computed from the values of its
    two neighbours, so that an atom on a support point stays there exactly. The shares are a dense
    matrix and not a scatter-add, which on a GPU would sum in no fixed order.
    """
    assert probs.dim() in (2, 3), f"probs must be [B, K] or [B, A, K], not {probs.shape}"
    assert atoms.dim() == 2, f"atoms must be [B, K], not {atoms.shape}"
    assert atoms.shape[0] == probs.shape[0], f"atoms {atoms.shape}, probs {probs.shape}"
    assert atoms.shape[1] == probs.shape[-1], f"atoms {atoms.shape}, probs {probs.shape}"
    assert support.shape == atoms.shape[1:], f"support {support.shape} for atoms {atoms.shape}"
    _assert_floating(probs, atoms, support)
    last = support.shape[0] - 1
    clipped = torch.minimum(torch.maximum(atoms, support[0]), support[last])
    lower = (torch.searchsorted(support, clipped, right=True) - 1).clamp(0, last - 1)
    low, high = support[lower], support[lower + 1]
    position = lower + (clipped - low) / (high - low)
    index = torch.arange(last + 1, dtype=probs.dtype, device=probs.device)
    share = (1 - (position.unsqueeze(2) - index).abs()).clamp(min=0)
    if probs.dim() == 3:
        return torch.bmm(probs, share)
    return torch.bmm(probs.unsqueeze(1), share).squeeze(1)


def _assert_floating(*tensors: Tensor) -> None:
    for tensor in tensors:
        assert tensor.is_floating_point(), f"expected a floating-point tensor, not {tensor.dtype}"
