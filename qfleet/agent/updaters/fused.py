"""Clipping and RAdam by kernels of our own, where an accelerator has them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from qfleet.accelerator.compiling import Compilable
from qfleet.accelerator.fused_radam import FusedRAdam, why_no_kernels
from qfleet.agent.updaters.optimisers import RAdam
from qfleet.agent.weights import FlatWeights
from qfleet.core.types import StateDict, Updater


def has_kernels(optimizer: str, device: torch.device) -> bool:
    """Whether there are kernels for this optimiser on this device."""
    return optimizer == "radam" and why_no_kernels(device) is None


class FusedUpdater(Updater):
    """``LocalUpdater`` with ``RAdam``, in three kernels instead of some fifteen."""

    def __init__(self, weights: FlatWeights, eps: float, max_grad_norm: float) -> None:
        self._weights, self._optimiser = weights, RAdam(weights.data, eps)
        ours = self._optimiser
        first, second = (moment.view(-1, moment.shape[-1]) for moment in (ours.first, ours.second))
        max_norm = max_grad_norm if max_grad_norm > 0 else math.inf
        self._fused = FusedRAdam(first, second, ours.steps.view(-1), eps, max_norm)

    def apply(
        self, learning_rate: float | Tensor, loss: Callable[[], Tensor] | None = None
    ) -> Mapping[str, Tensor | float]:
        del loss
        assert isinstance(learning_rate, Tensor), "recorded kernels read the rate from a tensor"
        data, grad = (w.view(-1, w.shape[-1]) for w in (self._weights.data, self._weights.grad))
        self._fused.step(data, grad, learning_rate)
        shape = learning_rate.shape
        norms, skipped = self._fused.norms.view(shape), self._fused.skipped.view(shape)
        return {"grad_norm": norms, "skipped": skipped}

    def compilables(self) -> list[Compilable]:
        return []

    def state_dict(self) -> StateDict:
        return self._optimiser.state_dict()

    def load_state_dict(self, state: StateDict) -> None:
        self._optimiser.load_state_dict(state)
