"""The learning rule of an algorithm: its head, its target and its loss.

In: a batch and two networks. Out: a target (no gradient) and a per-sample loss. γ and n are already
in the batch's rewards and discounts. Every combination of head, double, Munchausen and loss uses
the same two methods, so Rainbow is a configuration, not a subclass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from qfleet.algorithms import losses, targets


class Samples(Protocol):
    """The part of a batch that a learning rule reads."""

    @property
    def obs(self) -> Tensor: ...
    @property
    def action(self) -> Tensor: ...
    @property
    def reward(self) -> Tensor: ...
    @property
    def discount(self) -> Tensor: ...
    @property
    def next_obs(self) -> Tensor: ...


class Columns(NamedTuple):
    """Samples as bare columns; compiled functions take tensors, not batches."""

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

    def expected(self, output: Tensor, obs: Tensor) -> Tensor: ...
    def only_legal(self, output: Tensor, obs: Tensor) -> Tensor: ...


def split_policy(output: Tensor) -> tuple[Tensor, Tensor]:
    """Split an actor-critic output ``[B, A + 1]`` into logits ``[B, A]`` and values ``[B]``."""
    return output[:, :-1], output[:, -1]


class TargetTerms(NamedTuple):
    """The outputs of the target network for a batch."""

    ahead: Tensor
    """With Munchausen: the target network's output for the next observations. Else with double: the
    targets for every next action, of which the online network selects one. Else: the targets."""
    here: Tensor | None
    """The target network's output for the observations; only with Munchausen."""

    def split(self, size: int) -> list[TargetTerms]:
        """Split the terms of a burst into those of batches of ``size``."""
        aheads = torch.split(self.ahead, size)
        heres = [None] * len(aheads) if self.here is None else torch.split(self.here, size)
        return [TargetTerms(ahead, here) for ahead, here in zip(aheads, heres, strict=True)]


class Prediction(NamedTuple):
    """The online network's output for a batch, differentiable."""

    output: Tensor
    fractions: Tensor | None
    """IQN's quantile fractions ``[B, K]``; None for other heads."""


class Loss(NamedTuple):
    per_sample: Tensor
    """Differentiable, ``[B]``."""
    priority: Tensor
    """The error that becomes the sample's replay priority, detached, ``[B]``."""
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
    value_weight: float
    entropy_weight: float
    generator: torch.Generator
    """Source of IQN's quantile fractions."""

    @torch.no_grad()
    def target_terms(self, batch: Samples, target: ValueNetwork) -> TargetTerms:
        """Return the part of the target that does not depend on the online network."""
        if self.loss_kind == "cross-entropy":
            return TargetTerms(batch.reward, None)  # not used: the target is the action
        output = target(batch.next_obs, self._fractions(batch.next_obs))
        if self.munchausen:
            return TargetTerms(output, target(batch.obs, self._fractions(batch.obs)))
        every = self._under_every_action(batch, output, target.support)
        if self.double:
            return TargetTerms(every, None)
        best = target.expected(output, batch.next_obs).argmax(dim=1)
        return TargetTerms(targets.take(every, best), None)

    def _under_every_action(self, batch: Samples, output: Tensor, support: Tensor) -> Tensor:
        if self.head != "c51":
            return targets.td_target(batch.reward, batch.discount, output)
        atoms = targets.td_target(
            batch.reward, batch.discount, support.expand(len(output), len(support))
        )
        return targets.project_categorical(output.softmax(dim=2), atoms, support)

    @torch.no_grad()
    def target(
        self, batch: Samples, target_terms: TargetTerms, online: ValueNetwork, target: ValueNetwork
    ) -> Tensor:
        """Return the target: ``[B]`` values (q), ``[B, K]`` probabilities (c51) or quantiles.

        Quantiles are for qr and iqn. ``target`` is not called: ``target_terms`` has its outputs.
        """
        if not self.double:
            if not self.munchausen:
                return target_terms.ahead
            selector = target.expected(target_terms.ahead, batch.next_obs)
            return self._soft_target(batch, target, target_terms, selector)
        ahead = online(batch.next_obs, self._fractions(batch.next_obs))
        selector = online.expected(ahead, batch.next_obs)
        if self.munchausen:
            return self._soft_target(batch, target, target_terms, selector)
        return targets.take(target_terms.ahead, selector.argmax(dim=1))

    def _soft_target(
        self, batch: Samples, target: ValueNetwork, target_terms: TargetTerms, selector: Tensor
    ) -> Tensor:
        tau, next_output = self.munchausen_tau, target_terms.ahead
        assert target_terms.here is not None
        q = target.expected(target_terms.here, batch.obs)
        bonus = targets.munchausen_bonus(
            q, batch.action, self.munchausen_alpha, tau, self.munchausen_clip
        )
        reward = batch.reward + bonus
        policy, log_policy = targets.soft_policy(selector, tau)
        if self.head != "c51":
            value = targets.soft_value(next_output, policy, log_policy, tau)
            return targets.td_target(reward, batch.discount, value)
        # A mixture over next actions; each action's atoms are shifted by its own entropy bonus.
        samples, actions, atoms = next_output.shape
        moved = target.support - tau * log_policy.unsqueeze(-1)
        moved = reward[:, None, None] + batch.discount[:, None, None] * moved
        projected = targets.project_categorical(
            next_output.softmax(dim=-1).reshape(-1, atoms), moved.reshape(-1, atoms), target.support
        ).view(samples, actions, atoms)
        return (policy.unsqueeze(-1) * projected).sum(dim=1)

    def predict(self, obs: Tensor, online: ValueNetwork) -> Prediction:
        fractions = self._fractions(obs)
        return Prediction(online(obs, fractions), fractions)

    def loss(
        self, prediction: Prediction, action: Tensor, online: ValueNetwork, target: Tensor
    ) -> Loss:
        """Return the loss of a prediction. ``online`` is not called: its output is given."""
        if self.head == "actor-critic":
            logits, value = split_policy(prediction.output)
            per_sample = losses.actor_critic(
                logits, value, action, target, self.value_weight, self.entropy_weight
            )
            value = value.detach()
            return Loss(per_sample, (target - value).abs(), value)
        output = targets.take(prediction.output, action)
        if self.loss_kind == "cross-entropy":
            per_sample = losses.action_cross_entropy(prediction.output, action)
            return Loss(per_sample, per_sample.detach(), output.detach())
        if self.head == "q":
            td = target - output
            per_sample = losses.huber(td) if self.loss_kind == "huber" else losses.squared(td)
            return Loss(per_sample, td.detach().abs(), output.detach())
        if self.head == "c51":
            per_sample = losses.categorical_cross_entropy(output, target)
            expected = (output.detach().softmax(dim=1) * online.support).sum(dim=1)
            return Loss(per_sample, per_sample.detach(), expected)
        levels = online.fractions if prediction.fractions is None else prediction.fractions
        per_sample = losses.quantile_huber(output, levels, target)
        expected = output.detach().mean(dim=1)
        return Loss(per_sample, (target.mean(dim=1) - expected).abs(), expected)

    def numbers(self, output: Tensor) -> dict[str, Tensor]:
        """Return further metrics of an actor-critic's output, by name."""
        return {"entropy": losses.entropy(split_policy(output)[0]).mean()}

    def _fractions(self, obs: Tensor) -> Tensor | None:
        if self.head != "iqn":
            return None
        shape = (obs.shape[0], self.iqn_samples)
        return torch.rand(shape, generator=self.generator, device=obs.device)
