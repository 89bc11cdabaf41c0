"""The gradient of a network whose layers are on several ranks, computed in micro-batches.

In: a batch and its targets, which all ranks have. Out: ``weights.grad`` of this rank's layers, and
on every rank the loss of the batch, which the last stage computes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qfleet.agent.gradients import AutogradGradient, LossInfo
from qfleet.agent.weights import FlatWeights
from qfleet.algorithms.objective import Objective
from qfleet.core.types import Batch
from qfleet.networks.parallel.stages import Stage
from qfleet.networks.qnetwork import QNetwork


class StagedGradient(AutogradGradient):
    """Runs forward and backward passes in one go: both are part of the pipeline's schedule."""

    def __init__(
        self,
        network: QNetwork,
        objective: Objective,
        weights: FlatWeights,
        weighted: bool,
        stage: Stage,
    ) -> None:
        super().__init__(network, objective, weights, weighted)
        self._stage = stage
        for parameter, view in zip(weights.parameters, weights.grad_views(), strict=True):
            parameter.grad = view  # autograd adds to it

    def predict(self, batch: Batch) -> None:  # type: ignore[override]
        del batch

    def backward(self, predicted: None, batch: Batch, target: Tensor) -> LossInfo:  # type: ignore[override]
        del predicted
        self._weights.grad.zero_()
        size, losses, columns = len(batch), list[Tensor](), list[Tensor]()

        def loss(output: Tensor, first: int) -> Tensor:
            rows = slice(first, first + len(output))
            given = batch.action[rows], batch.weight[rows], target[rows]
            mean, priority, prediction = self._mean_loss(output, None, *given)
            losses.append(mean * (len(output) / size))
            columns.append(torch.stack((priority, prediction)))
            return losses[-1]

        self._stage.learn(batch.obs, loss)
        numbers = None
        if losses:  # on the last stage
            total = torch.stack(losses).detach().sum().view(1)
            numbers = torch.cat((total, torch.cat(columns, 1).detach().flatten().to(total.dtype)))
        shared = self._stage.share(numbers, 1 + 2 * size)
        total, priority, prediction = torch.split(shared, [1, size, size])
        return LossInfo(lambda: total.squeeze(), priority, prediction)
