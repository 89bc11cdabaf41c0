"""Gradients for ``RecordedLearner``: compiled if switched on, or by qfleet's own kernels."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from qfleet.accelerator.compiling import Compilable
from qfleet.agent.dense_gradient import mean_td_loss
from qfleet.agent.gradients import AutogradGradient, Gradient, LossInfo
from qfleet.agent.weights import FlatWeights, join
from qfleet.algorithms.objective import Objective, Prediction
from qfleet.core.types import Batch
from qfleet.networks.fused_cnn import FusedCNN
from qfleet.networks.qnetwork import QNetwork


class CompilableGradient(AutogradGradient):
    """``AutogradGradient`` in functions for which torch.compile can be switched on."""

    def __init__(
        self, network: QNetwork, objective: Objective, weights: FlatWeights, weighted: bool
    ) -> None:
        super().__init__(network, objective, weights, weighted)
        self._predict = Compilable(self._output)
        self._loss, self._join = Compilable(self._mean_loss), Compilable(join)

    def predict(self, batch: Batch) -> Prediction:
        prediction: Prediction = self._predict(batch.obs)
        return prediction

    def _output(self, obs: Tensor) -> Prediction:
        return self._objective.predict(obs, self._network)

    def backward(self, predicted: Prediction, batch: Batch, target: Tensor) -> LossInfo:
        mean, priority, prediction = self._loss(*predicted, batch.action, batch.weight, target)
        gradients = torch.autograd.grad(mean, self._weights.parameters)
        if self._weights.grad.is_cpu or self._weights.agents is not None:
            self._weights.set_grad(gradients)
        else:
            self._weights.grad = self._join(*gradients)  # one copy less than into the old vector
        return self._info(mean, priority, prediction, predicted)

    def compilables(self) -> list[Compilable]:
        # IQN draws quantile fractions from a generator, which compilers do not support.
        predict = [] if self._objective.head == "iqn" else [self._predict]
        return [*predict, self._loss, self._join]


class FusedGradient(Gradient):
    """The gradient of MinAtar's small network by kernels of ``qfleet/networks/fused_cnn.py``."""

    def __init__(self, fused: FusedCNN, objective: Objective, weights: FlatWeights) -> None:
        self._fused, self._weights = fused, weights
        self._huber = objective.loss_kind == "huber"

    def predict(self, batch: Batch) -> None:
        """Do nothing: forward and backward pass are one kernel."""

    def backward(self, predicted: None, batch: Batch, target: Tensor) -> LossInfo:
        del predicted
        weights = self._weights
        prediction, error = self._fused.gradient(
            weights.data, weights.grad, batch.obs, batch.action, target, batch.weight, self._huber
        )
        loss = functools.partial(mean_td_loss, error, batch.weight, self._huber)
        return LossInfo(loss, error, prediction)
