"""Loss scaling for float16, in which small gradients would round to zero (1710.03740, section 3.2).

In: another gradient. Out: the same gradient, computed from a loss that was multiplied by a scale
and divided by it afterwards. A gradient that overflowed stays non-finite, so that the updater skips
it, and halves the scale. All of it happens on the device, so that it can be recorded.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from qfleet.accelerator.compiling import Compilable
from qfleet.agent.gradients import Gradient, LossInfo
from qfleet.agent.weights import FlatWeights
from qfleet.core.types import Batch, StateDict

FIRST_SCALE, LARGEST_SCALE = 2.0**16, 2.0**24
GROW_AFTER = 2000
"""Finite gradients in a row after which the scale is doubled."""


class ScaledGradient(Gradient):
    """The gradient ``inner`` of a scaled loss, divided by the scale, for one agent.

    The scale enters by the weights of the samples, which ``inner`` must not ignore.
    """

    def __init__(self, inner: Gradient, weights: FlatWeights) -> None:
        self._inner, self._weights = inner, weights
        self._scale = torch.tensor(FIRST_SCALE, device=weights.data.device)
        self._finite = torch.zeros_like(self._scale)
        """The number of finite gradients since the scale changed."""
        self._cannot_halve = torch.zeros_like(self._scale)
        self.is_fault = self._cannot_halve

    def predict(self, batch: Batch) -> Any:
        return self._inner.predict(batch)

    def backward(self, predicted: Any, batch: Batch, target: Tensor) -> LossInfo:
        scale = self._scale.clone()
        scaled = dataclasses.replace(batch, weight=batch.weight * scale)
        info = self._inner.backward(predicted, scaled, target)
        self._weights.grad.div_(scale)
        self._adapt()
        numbers = {"loss_scale": scale}
        return info._replace(
            loss=lambda: info.loss() / scale, numbers=lambda: {**info.numbers(), **numbers}
        )

    def _adapt(self) -> None:
        """Change the scale for the next gradient."""
        is_finite = torch.isfinite(self._weights.grad).all()
        self._cannot_halve.copy_(self._scale <= 1.0)
        grows = is_finite & (self._finite + 1 >= GROW_AFTER)
        factor = torch.where(is_finite, 1.0 + grows.float(), 0.5)
        self._scale.mul_(factor).clamp_(1.0, LARGEST_SCALE)
        self._finite.add_(1.0).mul_(is_finite & ~grows)

    def compilables(self) -> list[Compilable]:
        return self._inner.compilables()

    def state_dict(self) -> StateDict:
        return {"loss_scale": torch.stack([self._scale, self._finite])}

    def load_state_dict(self, state: StateDict) -> None:
        self._scale.copy_(state["loss_scale"][0])
        self._finite.copy_(state["loss_scale"][1])
