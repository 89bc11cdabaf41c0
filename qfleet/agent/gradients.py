"""How a batch becomes a gradient in the flat vector: by autograd, or by hand for plain MLPs.

In: a batch and its targets. Out: ``weights.grad`` and the loss's numbers. Both ways form the same
products in the same order and give the same bits (tests/agent/test_gradients.py); the second
exists because autograd's bookkeeping costs more than a small MLP's arithmetic (256×256, batch 64,
two slow cores: 0.85 ms by hand, 1.4 ms through autograd).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from qfleet.accelerator.compiling import Compilable
from qfleet.agent.weights import FlatWeights, join
from qfleet.algorithms import losses
from qfleet.algorithms.objective import Objective, Prediction
from qfleet.core.types import Batch
from qfleet.networks.fused import dense_backward, dense_forward
from qfleet.networks.fused_cnn import FusedCNN
from qfleet.networks.qnetwork import QNetwork


class LossInfo(NamedTuple):
    """What is worth knowing about a batch once its gradient is there; all detached."""

    loss: Callable[[], Tensor]
    """Mean over the batch; worked out only for the few updates whose loss is shown."""
    priority: Tensor
    """How surprising each sample was, of either sign, ``[B]``."""
    prediction: Tensor
    """Expected value of the action taken, ``[B]``."""
    numbers: Callable[[], dict[str, Tensor]] = dict
    """What else the objective shows of it, when asked."""


class Gradient(Protocol):
    """In two parts, so that targets can be found while the network predicts."""

    def predict(self, batch: Batch) -> Any:
        """The forward pass; only ``__call__`` reads what comes out."""
        ...

    def __call__(self, predicted: Any, batch: Batch, target: Tensor) -> LossInfo: ...

    def compilables(self) -> list[Compilable]:
        """What torch.compile may be switched on for."""
        ...


class AutogradGradient:
    """Any network, any objective."""

    def __init__(
        self, network: QNetwork, objective: Objective, weights: FlatWeights, weighted: bool
    ) -> None:
        self._network, self._objective, self._weights = network, objective, weights
        self._weighted, self._agents = weighted, weights.agents or 1
        self._predict, self._judge = Compilable(self._output), Compilable(self._loss)
        self._join = Compilable(join)

    def predict(self, batch: Batch) -> Prediction:
        prediction: Prediction = self._predict(batch.obs)
        return prediction

    def __call__(self, predicted: Prediction, batch: Batch, target: Tensor) -> LossInfo:
        mean, priority, prediction = self._judge(*predicted, batch.action, batch.weight, target)
        gradients = torch.autograd.grad(mean, self._weights.parameters)
        if self._weights.grad.is_cpu or self._weights.agents is not None:
            self._weights.set_grad(gradients)
        else:
            self._weights.grad = self._join(*gradients)  # a copy less than into the old one
        detached = mean.detach()  # the graph behind the loss must not outlive this call
        loss_info = LossInfo(lambda: detached / self._agents, priority, prediction)
        if self._objective.head != "actor-critic":
            return loss_info  # and nothing keeps the network's output
        numbers = functools.partial(self._objective.numbers, predicted.output.detach())
        return loss_info._replace(numbers=numbers)

    def _output(self, obs: Tensor) -> Prediction:
        return self._objective.predict(obs, self._network)

    def _loss(
        self,
        output: Tensor,
        fractions: Tensor | None,
        action: Tensor,
        weight: Tensor,
        target: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        prediction = Prediction(output, fractions)
        loss = self._objective.loss(prediction, action, self._network, target)
        per_sample = loss.per_sample * weight if self._weighted else loss.per_sample
        # Every agent of a population has its own mean; their gradients do not meet.
        mean = per_sample.mean() if self._agents == 1 else per_sample.mean() * self._agents
        return mean, loss.priority, loss.prediction

    def compilables(self) -> list[Compilable]:
        # IQN draws quantile fractions, from a generator that compilers do not take.
        predict = [] if self._objective.head == "iqn" else [self._predict]
        return [*predict, self._judge, self._join]


class DenseGradient:
    """A plain MLP (one fused stack from observation to Q-values) with the Huber or squared loss."""

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
    def __call__(self, predicted: list[Tensor], batch: Batch, target: Tensor) -> LossInfo:
        outputs = predicted
        action = batch.action.unsqueeze(1)
        prediction = outputs[-1].gather(1, action)
        error = prediction - target.unsqueeze(1)
        slope = error.clamp(-1.0, 1.0) if self._huber else error
        # In autograd's order of multiplication, which matters to the last bit.
        share: Tensor | float = 1.0 / len(batch)
        if self._weighted:
            share = batch.weight.unsqueeze(1) * share
        grad = torch.zeros_like(outputs[-1]).scatter_(1, action, slope * share)
        dense_backward(outputs, self._layers, grad, self._layer_grads, self._bias_grads)

        def loss() -> Tensor:
            td = error.squeeze(1)
            per_sample = losses.huber(td) if self._huber else losses.squared(td)
            return (per_sample * batch.weight).mean()

        return LossInfo(loss, error.squeeze(1), prediction.squeeze(1))

    def compilables(self) -> list[Compilable]:
        return []


class FusedGradient:
    """MinAtar's small network by kernels of our own (``qfleet/networks/fused_cnn.py``)."""

    def __init__(self, fused: FusedCNN, objective: Objective, weights: FlatWeights) -> None:
        self._fused, self._weights = fused, weights
        self._huber = objective.loss_kind == "huber"

    def predict(self, batch: Batch) -> None:
        """Nothing: forward and backward pass share what never leaves the chip."""

    def __call__(self, predicted: None, batch: Batch, target: Tensor) -> LossInfo:
        del predicted
        weights = self._weights
        prediction, error = self._fused.gradient(
            weights.data, weights.grad, batch.obs, batch.action, target, batch.weight, self._huber
        )

        def loss() -> Tensor:
            per_sample = losses.huber(error) if self._huber else losses.squared(error)
            return (per_sample * batch.weight).mean()

        return LossInfo(loss, error, prediction)

    def compilables(self) -> list[Compilable]:
        return []


def make_gradient(
    network: QNetwork,
    objective: Objective,
    weights: FlatWeights,
    weighted: bool,
    fused: FusedCNN | None = None,
) -> Gradient:
    if fused is not None:
        return FusedGradient(fused, objective, weights)
    if weights.data.device.type == "cpu" and network.is_plain_mlp and objective.head == "q":
        return DenseGradient(objective, weights, weighted)
    return AutogradGradient(network, objective, weights, weighted)
