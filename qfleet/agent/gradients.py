"""The gradient of a batch in the flat vector, by autograd.

In: a batch and its targets. Out: ``weights.grad`` and the loss. ``dense_gradient.py`` has explicit
formulas for plain MLPs, ``recorded_gradients.py`` those of accelerators.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from qfleet.accelerator.compiling import Compilable
from qfleet.agent.weights import FlatWeights
from qfleet.algorithms.objective import Objective, Prediction
from qfleet.core.types import Batch, StateDict
from qfleet.networks.qnetwork import QNetwork


class LossInfo(NamedTuple):
    """The loss of a batch once its gradient is computed; all tensors are detached."""

    loss: Callable[[], Tensor]
    """Mean over the batch; computed only for the few updates whose loss is shown."""
    priority: Tensor
    """TD error of each sample, of either sign, ``[B]``."""
    prediction: Tensor
    """Expected value of the action taken, ``[B]``."""
    numbers: Callable[[], dict[str, Tensor]] = dict
    """Further metrics of the objective."""


class UpdateInfo(NamedTuple):
    """Loss, targets and gradient norm of an update."""

    loss_info: LossInfo
    target: Tensor
    grad_norm: Tensor | float

    def metrics(self, head: str) -> dict[str, float]:
        return {
            "loss": float(self.loss_info.loss()),
            "grad_norm": float(torch.as_tensor(self.grad_norm).max()),
            "q_mean": float(self.loss_info.prediction.mean()),
            "abs_q_max": float(self.largest_value(head).max()),
            **{name: float(value) for name, value in self.loss_info.numbers().items()},
        }

    def largest_value(self, head: str, agents: int = 1) -> Tensor:
        """Return the largest |Q| or |target| of each agent, ``[agents]``; NaN if one is NaN."""
        largest = self.loss_info.prediction.abs().view(agents, -1).amax(1)
        if head == "c51":  # its targets are probabilities
            return largest
        return torch.maximum(largest, self.target.abs().view(agents, -1).amax(1))


class Gradient(Protocol):
    """The gradient of a batch, in two calls: targets can be computed during the first one."""

    is_fault: Tensor | float = 1.0
    """Whether a non-finite gradient would be a fault, 1 or 0; not while a loss scale adapts."""

    def predict(self, batch: Batch) -> Any:
        """Run the forward pass; only ``backward`` reads the result."""
        ...

    def backward(self, predicted: Any, batch: Batch, target: Tensor) -> LossInfo:
        """Write the gradient to ``FlatWeights.grad``."""
        ...

    def compilables(self) -> list[Compilable]:
        return []

    def state_dict(self) -> StateDict:
        return {}

    def load_state_dict(self, state: StateDict) -> None:
        del state


class AutogradGradient(Gradient):
    """The gradient of any network and any objective, by autograd."""

    def __init__(
        self, network: QNetwork, objective: Objective, weights: FlatWeights, weighted: bool
    ) -> None:
        self._network, self._objective, self._weights = network, objective, weights
        self._weighted, self._agents = weighted, weights.agents or 1

    def predict(self, batch: Batch) -> Prediction:
        return self._objective.predict(batch.obs, self._network)

    def backward(self, predicted: Prediction, batch: Batch, target: Tensor) -> LossInfo:
        mean, priority, prediction = self._mean_loss(*predicted, batch.action, batch.weight, target)
        self._weights.set_grad(torch.autograd.grad(mean, self._weights.parameters))
        return self._info(mean, priority, prediction, predicted)

    def _info(
        self, mean: Tensor, priority: Tensor, prediction: Tensor, predicted: Prediction
    ) -> LossInfo:
        detached = mean.detach()  # the graph behind the loss must not outlive this call
        loss_info = LossInfo(lambda: detached / self._agents, priority, prediction)
        if self._objective.head != "actor-critic":
            return loss_info  # without a reference to the network's output
        numbers = functools.partial(self._objective.numbers, predicted.output.detach())
        return loss_info._replace(numbers=numbers)

    def _mean_loss(
        self,
        output: Tensor,
        fractions: Tensor | None,
        action: Tensor,
        weight: Tensor,
        target: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the loss to differentiate, and each sample's priority and prediction."""
        prediction = Prediction(output, fractions)
        loss = self._objective.loss(prediction, action, self._network, target)
        per_sample = loss.per_sample * weight if self._weighted else loss.per_sample
        # Every agent of a population has its own mean; no weight is shared.
        mean = per_sample.mean() if self._agents == 1 else per_sample.mean() * self._agents
        return mean, loss.priority, loss.prediction
