"""The updater of a single learner: clip, refuse what is not finite, let the optimiser step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from qfleet.accelerator.compiling import Compilable
from qfleet.agent.updaters.optimisers import FlatOptimiser
from qfleet.agent.weights import FlatWeights
from qfleet.core.types import StateDict, Updater


class LocalUpdater(Updater):
    """In: the gradient in ``weights.grad``. Out: ``weights.data``, changed or bit-identical."""

    def __init__(self, weights: FlatWeights, optimiser: FlatOptimiser, max_grad_norm: float):
        self._weights = weights
        self._optimiser = optimiser
        self._max_norm = max_grad_norm if max_grad_norm > 0 else math.inf
        self._apply_unasked = Compilable(self._without_asking)

    def apply(
        self, learning_rate: float | Tensor, loss: Callable[[], Tensor] | None = None
    ) -> Mapping[str, Tensor | float]:
        del loss
        grad = self._weights.grad
        if grad.device.type != "cpu" or isinstance(learning_rate, Tensor):
            norm, found_bad = self._apply_unasked(learning_rate)
            return {"grad_norm": norm, "skipped": found_bad}
        value = float(torch.linalg.vector_norm(grad))
        if not math.isfinite(value):
            return {"grad_norm": value, "skipped": 1.0}
        if value > self._max_norm:
            grad.mul_(self._max_norm / (value + 1e-6))
        self._optimiser.step(self._weights.data, grad, learning_rate, None)
        return {"grad_norm": value, "skipped": 0.0}

    def _without_asking(self, learning_rate: float | Tensor) -> tuple[Tensor, Tensor]:
        """The same on an accelerator, where reading the norm would stall the queue."""
        grad = self._weights.grad
        # A population's agents, one a row, are clipped and refused each for itself.
        norm = torch.linalg.vector_norm(grad, dim=-1, keepdim=grad.dim() > 1)
        found_bad = 1.0 - torch.isfinite(norm).to(norm.dtype)
        if math.isfinite(self._max_norm):
            scale = (self._max_norm / (norm + 1e-6)).clamp(max=1.0)
            # Compiled, the product never leaves the kernel that uses it.
            grad = grad * scale if torch.compiler.is_compiling() else grad.mul_(scale)
        self._optimiser.step(self._weights.data, grad, learning_rate, found_bad)
        return norm, found_bad

    def compilables(self) -> list[Compilable]:
        return [self._apply_unasked]

    def state_dict(self) -> StateDict:
        return self._optimiser.state_dict()

    def load_state_dict(self, state: StateDict) -> None:
        self._optimiser.load_state_dict(state)
