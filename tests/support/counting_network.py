"""A network that counts gradients: the weights say how many of them they are made of."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

COUNTERS = 64
"""More than all other weights together, so that two servers both hold some."""


class _Ones(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, features: Tensor, counters: Tensor) -> Tensor:
        context.like = counters
        return features.clone()

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return gradients[0], torch.ones_like(context.like)


class Counting(nn.Module):
    """The observation itself; with plain gradient descent every gradient moves each counter by the
    learning rate, exactly, where that is a power of two."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.features = shape[0]
        self.counters = nn.Parameter(torch.zeros(COUNTERS))

    def forward(self, observations: Tensor) -> Tensor:
        found: Tensor = _Ones.apply(observations.float(), self.counters)  # type: ignore[no-untyped-call]
        return found
