"""Networks of a user: one that can be exported, and one that cannot."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class Plain(nn.Module):
    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.layer = nn.Linear(math.prod(shape), 8)

    def forward(self, obs: Tensor) -> Tensor:
        return torch.tanh(self.layer(obs.flatten(1)))


class Branching(Plain):
    """Chooses by the values of a batch what it computes, which a graph cannot."""

    def forward(self, obs: Tensor) -> Tensor:
        features = super().forward(obs)
        return features if bool(features.sum() > 0) else -features
