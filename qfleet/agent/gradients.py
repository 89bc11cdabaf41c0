"""Gradients of a batch in the flat vector: by autograd, or by explicit formulas for plain MLPs.

In: a batch and its targets. Out: ``weights.grad`` and the loss. Both ways form the same products in
the same order and give the same bits (tests/agent/test_gradients.py). The second exists because
autograd's bookkeeping costs more than a small MLP's arithmetic (256×256, batch 64, two slow cores:
0.85 ms without autograd, 1.4 ms with it).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from qfleet.agent.weights import FlatWeights
from qfleet.algorithms import losses
from qfleet.algorithms.objective import Objective, Prediction
from qfleet.core.types import Batch
from qfleet.networks.fused import dense_backward, dense_forward
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

    def predict(self, batch: Batch) -> Any:
        """Run the forward pass; only ``backward`` reads the result."""
        ...

    def backward(self, predicted: Any, batch: Batch, target: Tensor) -> LossInfo:
        """Write the gradient to ``FlatWeights.grad``."""
        ...


class AutogradGradient:
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


class DenseGradient:
    """The gradient of a plain MLP with the Huber or squared loss, without autograd."""

    def __init__(self, objective: Objective, weights: FlatWeights, weighted: bool) -> None:
        self._huber = objective.loss_kind == "huber"
        self._weighted = weighted
        # Parameters alternate weight, bias, weight, … in the order of the layers.
        parameters = [parameter.detach() for parameter in weights.parameters]
        self._layers, self._biases = parameters[::2], parameters[1::2]
        grads = weights.grad_views()
        self._layer_grads, self._bias_grads = grads[::2], grads[1::2]

    def predict(self, batch: Batch) -> list[Tensor]:
        with torch.no_grad():
            return dense_forward(batch.obs, self._layers, self._biases, False)

    @torch.no_grad()
    def backward(self, predicted: list[Tensor], batch: Batch, target: Tensor) -> LossInfo:
        outputs = predicted
        action = batch.action.unsqueeze(1)
        prediction = outputs[-1].gather(1, action)
        error = prediction - target.unsqueeze(1)
        slope = error.clamp(-1.0, 1.0) if self._huber else error
        # In autograd's order of multiplication, so that all bits are equal.
        share: Tensor | float = 1.0 / len(batch)
        if self._weighted:
            share = batch.weight.unsqueeze(1) * share
        grad = torch.zeros_like(outputs[-1]).scatter_(1, action, slope * share)
        dense_backward(outputs, self._layers, grad, self._layer_grads, self._bias_grads)
        td = error.squeeze(1)
        loss = functools.partial(mean_td_loss, td, batch.weight, self._huber)
        return LossInfo(loss, td, prediction.squeeze(1))


def mean_td_loss(error: Tensor, weight: Tensor, huber: bool) -> Tensor:
    per_sample = losses.huber(error) if huber else losses.squared(error)
    return (per_sample * weight).mean()


def make_gradient(
    network: QNetwork, objective: Objective, weights: FlatWeights, weighted: bool
) -> Gradient:
    """Return the fastest gradient. ``weighted``: whether samples can have weights other than 1."""
    if weights.data.device.type == "cpu" and network.is_plain_mlp and objective.head == "q":
        return DenseGradient(objective, weights, weighted)
    return AutogradGradient(network, objective, weights, weighted)
