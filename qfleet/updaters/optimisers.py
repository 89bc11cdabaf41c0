"""Optimisers on one flat vector: gradient in, weights changed in place.

The formulas are torch.optim's (and tested against it); the point of writing them again is that one
flat vector needs five elementwise kernels where the stock optimisers walk a list of tensors
(2 slow ARM cores, 67k weights: 0.16 ms against 0.75 ms, and 0.27 ms for the fused one).

``accept`` is None on the host, where a bad gradient never gets here, and a 0-d tensor of 1 or 0 on
an accelerator, where a rejected gradient must leave weights and moments bit-identical without the
host being asked.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from qfleet.core import StateDict


class FlatOptimiser(Protocol):
    def step(
        self, weights: Tensor, grad: Tensor, learning_rate: float, accept: Tensor | None
    ) -> None: ...

    def state_dict(self) -> StateDict: ...

    def load_state_dict(self, state: StateDict) -> None: ...


class Adam:
    """Adam (1412.6980)."""

    def __init__(
        self, weights: Tensor, eps: float, beta1: float = 0.9, beta2: float = 0.999
    ) -> None:
        self.beta1, self.beta2, self.eps = beta1, beta2, eps
        self.first = torch.zeros_like(weights)
        self.second = torch.zeros_like(weights)
        self.steps = torch.zeros((), dtype=torch.float64)
        self._scratch = torch.empty_like(weights)

    def step(
        self, weights: Tensor, grad: Tensor, learning_rate: float, accept: Tensor | None
    ) -> None:
        if accept is None:
            self.steps += 1
            count = float(self.steps)
            correction = math.sqrt(1 - self.beta2**count)
            rate = learning_rate * correction / (1 - self.beta1**count)
            self.first.lerp_(grad, 1 - self.beta1)
            self.second.mul_(self.beta2).addcmul_(grad, grad, value=1 - self.beta2)
            torch.sqrt(self.second, out=self._scratch).add_(self.eps * correction)
            weights.addcdiv_(self.first, self._scratch, value=-rate)
            return
        self.steps = self.steps.to(weights.device) + accept
        steps_or_1 = self.steps.clamp(min=1)
        correction_t = (1 - self.beta2**steps_or_1).sqrt()
        rate_t = accept * learning_rate * correction_t / (1 - self.beta1**steps_or_1)
        self.first.lerp_(grad, (accept * (1 - self.beta1)).to(grad.dtype))
        kept = 1 - accept * (1 - self.beta2)
        self.second.mul_(kept.to(grad.dtype)).addcmul_(grad, grad, value=1 - self.beta2)
        torch.sqrt(self.second, out=self._scratch).add_((self.eps * correction_t).to(grad.dtype))
        weights.sub_(self.first.div(self._scratch).mul_(rate_t.to(grad.dtype)))

    def state_dict(self) -> StateDict:
        return {"first": self.first, "second": self.second, "steps": self.steps}

    def load_state_dict(self, state: StateDict) -> None:
        self.first.copy_(state["first"])
        self.second.copy_(state["second"])
        self.steps = state["steps"].to(torch.float64)


class RMSProp:
    """Uncentred RMSProp with the decay of the Nature DQN (0.95)."""

    def __init__(self, weights: Tensor, eps: float, decay: float = 0.95) -> None:
        self.decay, self.eps = decay, eps
        self.second = torch.zeros_like(weights)
        self._scratch = torch.empty_like(weights)

    def step(
        self, weights: Tensor, grad: Tensor, learning_rate: float, accept: Tensor | None
    ) -> None:
        kept = self.decay if accept is None else (1 - accept * (1 - self.decay)).to(grad.dtype)
        self.second.mul_(kept).addcmul_(grad, grad, value=1 - self.decay)
        torch.sqrt(self.second, out=self._scratch).add_(self.eps)
        weights.addcdiv_(grad, self._scratch, value=-learning_rate)

    def state_dict(self) -> StateDict:
        return {"second": self.second}

    def load_state_dict(self, state: StateDict) -> None:
        self.second.copy_(state["second"])


class SGD:
    """Plain gradient descent."""

    def step(
        self,
        weights: Tensor,
        grad: Tensor,
        learning_rate: float,
        accept: Tensor | None,  # noqa: ARG002 (a rejected gradient arrives as zeros)
    ) -> None:
        weights.sub_(grad, alpha=learning_rate)

    def state_dict(self) -> StateDict:
        return {}

    def load_state_dict(self, state: StateDict) -> None:
        if state:
            raise ValueError(f"SGD has no state, got {sorted(state)}")


def make_optimiser(name: str, weights: Tensor, eps: float) -> FlatOptimiser:
    if name == "adam":
        return Adam(weights, eps)
    if name == "rmsprop":
        return RMSProp(weights, eps)
    return SGD()
