"""Gradient clipping and RAdam by qfleet's own kernels, on accelerators that support them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from qfleet.accelerator.compiling import Compilable
from qfleet.accelerator.fused_radam import FusedRAdam, why_no_kernels
from qfleet.agent.updaters.local import LocalUpdater
from qfleet.agent.updaters.optimisers import RAdam
from qfleet.agent.weights import FlatWeights


def has_kernels(optimizer: str, device: torch.device) -> bool:
    """Return whether there are kernels for this optimiser on this device."""
    return optimizer == "radam" and why_no_kernels(device) is None


class FusedUpdater(LocalUpdater):
    """``LocalUpdater`` with ``RAdam``, in three kernels instead of about fifteen."""

    def __init__(self, weights: FlatWeights, eps: float, max_grad_norm: float) -> None:
        radam = RAdam(weights.data, eps)
        super().__init__(weights, radam, max_grad_norm)
        first, second = (m.view(-1, m.shape[-1]) for m in (radam.first, radam.second))
        self._fused = FusedRAdam(first, second, radam.steps.view(-1), eps, self._max_norm)

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
