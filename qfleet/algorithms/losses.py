"""Losses: pure functions from predictions and targets to a loss per sample.

The losses are not averaged over the batch, so that the caller can apply importance weights.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def huber(td: Tensor) -> Tensor:
    """Return ½·td² up to |td| = 1 and |td| − ½ beyond (Huber 1964; Nature DQN's clipped errors)."""
    assert td.dim() == 1, f"td must be [B], not {td.shape}"
    assert td.is_floating_point(), f"td must be floating-point, not {td.dtype}"
    return F.huber_loss(td, torch.zeros_like(td), reduction="none")


def squared(td: Tensor) -> Tensor:
    """Return ½·td², which is equal to ``huber`` near 0 (1312.5602)."""
    assert td.dim() == 1, f"td must be [B], not {td.shape}"
    assert td.is_floating_point(), f"td must be floating-point, not {td.dtype}"
    return 0.5 * td.square()


def categorical_cross_entropy(logits: Tensor, target_probs: Tensor) -> Tensor:
    """Return the cross-entropy −Σ_k p_k log softmax(logits)_k, ``[B]`` (C51, 1707.06887)."""
    assert logits.dim() == 2, f"logits must be [B, K], not {logits.shape}"
    assert target_probs.shape == logits.shape, f"{target_probs.shape} for logits {logits.shape}"
    assert logits.is_floating_point(), f"logits must be floating-point, not {logits.dtype}"
    return -(target_probs * torch.log_softmax(logits, dim=1)).sum(1)


def action_cross_entropy(logits: Tensor, action: Tensor) -> Tensor:
    """Return −log softmax(logits)_action, ``[B]``: the loss of behaviour cloning."""
    assert logits.dim() == 2, f"logits must be [B, A], not {logits.shape}"
    assert action.shape == logits.shape[:1], f"action {action.shape} for logits {logits.shape}"
    return F.cross_entropy(logits, action, reduction="none")


def conservative_penalty(values: Tensor, action: Tensor) -> Tensor:
    """Return logΣ_a exp Q(s, a) − Q(s, action), ``[B]``: CQL(H) for discrete actions (2006.04779).

    It lowers the values of all actions, raises that of the data's action, and is never negative.
    """
    assert values.dim() == 2, f"values must be [B, A], not {values.shape}"
    return action_cross_entropy(values, action)


def imitation(logits: Tensor, action: Tensor) -> Tensor:
    """Return the loss ``[B]`` of discrete BCQ's model of the data's policy (1910.01708).

    It is the cross-entropy of the action plus 0.01 times the mean squared logit of legal actions;
    logits below −10²⁹ are those of illegal ones.
    """
    legal = logits > -1e29
    squares = torch.where(legal, logits, 0.0).square().sum(1) / legal.sum(1)
    return action_cross_entropy(logits, action) + 0.01 * squares


def quantile_huber(
    prediction: Tensor, fractions: Tensor, target: Tensor, kappa: float = 1.0
) -> Tensor:
    """Return the quantile Huber loss ``[B]`` (1710.10044, eq. 10; 1806.06923, eq. 3).

    With δ_kj = target_j − prediction_k: Σ_k mean_j |τ_k − 1{δ_kj < 0}| · huber_κ(δ_kj)/κ.
    ``prediction`` is ``[B, K]``, ``fractions`` ``[K]`` or ``[B, K]``, ``target`` ``[B, M]``.
    """
    assert prediction.dim() == 2, f"prediction must be [B, K], not {prediction.shape}"
    assert target.dim() == 2, f"target must be [B, M], not {target.shape}"
    assert target.shape[0] == prediction.shape[0], f"{target.shape} for {prediction.shape}"
    assert fractions.shape in (prediction.shape, prediction.shape[1:]), (
        f"fractions {fractions.shape} for prediction {prediction.shape}"
    )
    assert prediction.is_floating_point(), f"prediction has dtype {prediction.dtype}"
    assert kappa > 0, f"kappa must be positive, not {kappa}"
    shape = (*prediction.shape, target.shape[1])
    predicted, wanted = prediction.unsqueeze(2).expand(shape), target.unsqueeze(1).expand(shape)
    below = (wanted.detach() < predicted.detach()).to(prediction.dtype)
    weight = (fractions.unsqueeze(-1) - below).abs()
    error = F.huber_loss(predicted, wanted, reduction="none", delta=kappa)
    return (weight * error).mean(2).sum(1) / kappa


def entropy(logits: Tensor) -> Tensor:
    """Return the entropy −Σ_a π_a log π_a of π = softmax(logits) ``[B, A]``, as ``[B]``."""
    assert logits.dim() == 2, f"logits must be [B, A], not {logits.shape}"
    log_policy = torch.log_softmax(logits, dim=1)
    return -(log_policy.exp() * log_policy).sum(1)


def actor_critic(
    logits: Tensor,
    value: Tensor,
    action: Tensor,
    returns: Tensor,
    value_weight: float,
    entropy_weight: float,
) -> Tensor:
    """Return the actor-critic loss ``[B]`` (A3C, 1602.01783, section 4).

    The loss is c_v (R − V)² − (R − V) log π(a|s) − β H(π). In the second term the advantage R − V
    is detached: the gradient of that term reaches only the policy.
    """
    assert value.shape == returns.shape == action.shape == logits.shape[:1], (
        f"value {value.shape}, returns {returns.shape}, action {action.shape}, "
        f"logits {logits.shape}"
    )
    advantage = returns - value
    log_chosen = torch.log_softmax(logits, dim=1).gather(1, action.unsqueeze(1)).squeeze(1)
    policy = advantage.detach() * log_chosen + entropy_weight * entropy(logits)
    return value_weight * advantage.square() - policy
