"""How often to act at random, and acting so: clock and values in, ε and actions out."""

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


def epsilon_greedy(q: Tensor, epsilon: Tensor | float, generator: torch.Generator) -> Tensor:
    """An action per row of ``q`` ``[N, A]``: uniform with probability ε, else the best one.

    The first of equal values wins. The same number of draws is made for every ε, so that what
    follows in the generator's stream does not depend on how greedy a step was. The generator
    lives on the device of ``q``.
    """
    assert q.dim() == 2, f"q must be [N, A], not {q.shape}"
    num_envs, num_actions = q.shape
    assert not isinstance(epsilon, Tensor) or epsilon.shape == (num_envs,), (
        f"epsilon {epsilon.shape} for {num_envs} envs"
    )
    draw = torch.rand(num_envs, generator=generator, device=q.device)
    uniform = torch.randint(num_actions, (num_envs,), generator=generator, device=q.device)
    return torch.where(draw < epsilon, uniform, q.argmax(1))
