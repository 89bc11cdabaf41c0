"""Exploration: one ε per env, and sampling of actions from a policy or from the legal ones."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from numpy.typing import NDArray
from torch import Tensor

AnyArray = TypeVar("AnyArray", NDArray[Any], Tensor)


def epsilon_ladder(num_envs: int, base: float) -> Tensor:
    """Return a constant ε per env, base^(1 + 7i/(N−1)), float32 ``[N]`` (Ape-X, 1803.00933)."""
    assert num_envs > 0, f"num_envs must be positive, not {num_envs}"
    exponent = 1 + 7 * torch.arange(num_envs, dtype=torch.float64) / max(num_envs - 1, 1)
    return torch.pow(base, exponent).float()


def sample_actions(logits: Tensor, chance: Tensor) -> Tensor:
    """Sample one action from each policy softmax(logits) ``[B, A]``.

    ``chance`` ``[B]`` is a uniform random number in [0, 1) per policy. The result is the first
    action whose cumulative probability exceeds ``chance``. The last cumulative probability may be
    slightly below 1 by rounding, so actions of probability 0 at the end are ruled out.
    """
    assert chance.shape == logits.shape[:1], f"chance {chance.shape} for logits {logits.shape}"
    probability = torch.softmax(logits, dim=1)
    reached = probability.cumsum(1)[:, :-1]
    last = probability.shape[1] - 1 - (probability.flip(1) > 0).int().argmax(1)
    return torch.minimum((reached <= chance.unsqueeze(1)).sum(1), last)


def action_probability(
    action: AnyArray, greedy: AnyArray, rate: Any, choices: AnyArray | int
) -> AnyArray:
    """Return the probability of each action of an ε-greedy policy: ε/choices, + 1 − ε if greedy.

    ``rate`` is ε, ``choices`` the number of legal actions.
    """
    probability: AnyArray = (action == greedy) * (1.0 - rate) + rate / choices
    return probability


def sample_legal(legal: AnyArray, chance: AnyArray) -> AnyArray:
    """Return a uniformly random legal action for each row of ``legal``, bool ``[B, A]``.

    ``chance`` ``[B]`` is uniform in [0, 1), of float64: in float32 a product may round up to the
    number of legal actions. Every row must have a legal action.
    """
    wanted = chance * legal.sum(1)
    actions: AnyArray = (legal.cumsum(1) <= wanted[:, None]).sum(1)
    return actions
