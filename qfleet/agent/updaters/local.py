"""The updater of a single learner: clip the gradient, skip it if not finite, take a step."""

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
        self._apply_capturable = Compilable(self._step_capturable)

    def apply(
        self, learning_rate: float | Tensor, loss: Callable[[], Tensor] | None = None
    ) -> Mapping[str, Tensor | float]:
        del loss
        grad, norm_of_all = self._weights.grad, self._weights.norm_of_all
        if norm_of_all is None and (not grad.is_cpu or isinstance(learning_rate, Tensor)):
            norm, found_bad = self._apply_capturable(learning_rate)
            return {"grad_norm": norm, "skipped": found_bad}
        value = float((norm_of_all or torch.linalg.vector_norm)(grad))
        if not math.isfinite(value):
            return {"grad_norm": value, "skipped": 1.0}
        if value > self._max_norm:
            grad.mul_(self._max_norm / (value + 1e-6))
        self._optimiser.step(self._weights.data, grad, learning_rate, None)
        return {"grad_norm": value, "skipped": 0.0}

    def _step_capturable(self, learning_rate: float | Tensor) -> tuple[Tensor, Tensor]:
        """Do the same on an accelerator, where reading the norm would stall the queue.

        Return the norm of the gradient and whether it was skipped (1 or 0).
        """
        grad = self._weights.grad
        # Each agent of a population, a row, is clipped or skipped on its own.
        norm = torch.linalg.vector_norm(grad, dim=-1, keepdim=grad.dim() > 1)
        found_bad = 1.0 - torch.isfinite(norm).to(norm.dtype)
        if math.isfinite(self._max_norm):
            scale = (self._max_norm / (norm + 1e-6)).clamp(max=1.0)
            # In compiled code the product is never written to memory.
            grad = grad * scale if torch.compiler.is_compiling() else grad.mul_(scale)
        self._optimiser.step(self._weights.data, grad, learning_rate, found_bad)
        return norm, found_bad

    def compilables(self) -> list[Compilable]:
        return [self._apply_capturable]

    def state_dict(self) -> StateDict:
        return self._optimiser.state_dict()

    def load_state_dict(self, state: StateDict) -> None:
        self._optimiser.load_state_dict(state)
