"""Which head, which target, which loss: the three choices that make an algorithm.

In: a batch and two networks. Out: a target (no gradient) and a per-sample loss. γ and n are inside
the batch. Every combination of head, double, Munchausen and loss passes through the same two
methods, so Rainbow is a choice, not a subclass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from qfleet.algorithms import losses, targets


class Samples(Protocol):
    """The part of a batch that a learning rule reads."""

    obs: Tensor
    action: Tensor
    reward: Tensor
    discount: Tensor
    next_obs: Tensor


class ValueNetwork(Protocol):
    """The part of a network that a learning rule reads."""

    support: Tensor
    fractions: Tensor

    def __call__(self, obs: Tensor, fractions: Tensor | None = None) -> Tensor: ...

    def expected(self, output: Tensor) -> Tensor: ...


class Loss(NamedTuple):
    per_sample: Tensor
    """Differentiable, ``[B]``."""
    priority: Tensor
    """How surprising each sample was, detached, ``[B]``."""
    prediction: Tensor
    """Expected value of the action taken, detached, ``[B]``."""


@dataclass(frozen=True)
class Objective:
    head: str
    double: bool
    munchausen: bool
    loss_kind: str
    iqn_samples: int
    munchausen_alpha: float
    munchausen_tau: float
    munchausen_clip: float
    generator: torch.Generator
    """Source of IQN's quantile fractions."""

    @torch.no_grad()
    def target(self, batch: Samples, online: ValueNetwork, target: ValueNetwork) -> Tensor:
        """``[B]`` values (q), ``[B, K]`` probabilities (c51) or ``[B, K]`` quantiles (qr, iqn)."""
        next_output = target(batch.next_obs, self._fractions(batch.next_obs))
        if self.double:
            selector = online.expected(online(batch.next_obs, self._fractions(batch.next_obs)))
        else:
            selector = target.expected(next_output)
        if self.munchausen:
            return self._soft_target(batch, target, next_output, selector)
        chosen = targets.take(next_output, selector.argmax(dim=1))
        if self.head == "c51":
            atoms = targets.td_target(
                batch.reward, batch.discount, target.support.expand_as(chosen)
            )
            return targets.project_categorical(chosen.softmax(dim=1), atoms, target.support)
        return targets.td_target(batch.reward, batch.discount, chosen)

    def _soft_target(
        self, batch: Samples, target: ValueNetwork, next_output: Tensor, selector: Tensor
    ) -> Tensor:
        tau = self.munchausen_tau
        q = target.expected(target(batch.obs, self._fractions(batch.obs)))
        bonus = targets.munchausen_bonus(
            q, batch.action, self.munchausen_alpha, tau, self.munchausen_clip
        )
        reward = batch.reward + bonus
        policy, log_policy = targets.soft_policy(selector, tau)
        if self.head != "c51":
            value = targets.soft_value(next_output, policy, log_policy, tau)
            return targets.td_target(reward, batch.discount, value)
        # A mixture over next actions, each with its atoms moved by its own entropy bonus.
        samples, actions, atoms = next_output.shape
        moved = target.support - tau * log_policy.unsqueeze(-1)
        moved = reward[:, None, None] + batch.discount[:, None, None] * moved
        projected = targets.project_categorical(
            next_output.softmax(dim=-1).reshape(-1, atoms), moved.reshape(-1, atoms), target.support
        ).view(samples, actions, atoms)
        return (policy.unsqueeze(-1) * projected).sum(dim=1)

    def loss(self, obs: Tensor, action: Tensor, online: ValueNetwork, target: Tensor) -> Loss:
        fractions = self._fractions(obs)
        output = targets.take(online(obs, fractions), action)
        if self.head == "q":
            td = target - output
            per_sample = losses.huber(td) if self.loss_kind == "huber" else losses.squared(td)
            return Loss(per_sample, td.detach().abs(), output.detach())
        if self.head == "c51":
            per_sample = losses.categorical_cross_entropy(output, target)
            prediction = (output.detach().softmax(dim=1) * online.support).sum(dim=1)
            return Loss(per_sample, per_sample.detach(), prediction)
        levels = online.fractions if fractions is None else fractions
        per_sample = losses.quantile_huber(output, levels, target)
        prediction = output.detach().mean(dim=1)
        return Loss(per_sample, (target.mean(dim=1) - prediction).abs(), prediction)

    def _fractions(self, obs: Tensor) -> Tensor | None:
        if self.head != "iqn":
            return None
        shape = (obs.shape[0], self.iqn_samples)
        return torch.rand(shape, generator=self.generator, device=obs.device)
