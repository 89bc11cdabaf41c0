"""The learning rules of offline algorithms: terms that keep the policy near the data.

In and out are those of ``Objective``. Discrete CQL adds a penalty to the loss; discrete BCQ adds
the loss of its model of the data's policy, by which the network itself excludes actions. Behaviour
cloning adds nothing. All of them compare actions, so they leave out those that are illegal.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from qfleet.algorithms import losses
from qfleet.algorithms.objective import Loss, Objective, Prediction, ValueNetwork


@dataclass(frozen=True)
class OfflineObjective(Objective):
    """An objective with the terms of discrete CQL, of discrete BCQ, both, or none."""

    cql_alpha: float
    """Weight of the penalty on values of actions that are not in the data."""
    imitates: bool
    """Whether outputs are ``[B, 2 A]``: values and the logits of a model of the data's policy."""

    def predict(self, obs: Tensor, online: ValueNetwork) -> Prediction:
        prediction = super().predict(obs, online)
        return prediction._replace(output=online.only_legal(prediction.output, obs))

    def loss(
        self, prediction: Prediction, action: Tensor, online: ValueNetwork, target: Tensor
    ) -> Loss:
        loss = super().loss(prediction, action, online, target)
        per_sample, values = loss.per_sample, prediction.output
        if self.imitates:
            values, logits = values.chunk(2, dim=1)
            per_sample = per_sample + losses.imitation(logits, action)
        if self.cql_alpha:
            # With quantiles, their means: as the policy compares actions.
            values = values if values.dim() == 2 else values.mean(2)
            penalty = losses.conservative_penalty(values, action)
            per_sample = per_sample + self.cql_alpha * penalty
        return loss._replace(per_sample=per_sample)
