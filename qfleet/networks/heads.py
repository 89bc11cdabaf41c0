"""Heads: they map features ``[B, F]`` to values ``[B, A]`` or distributions ``[B, A, K]``.

Every head has one or two *streams*: hidden layers, if any, and a linear layer. A dueling head has a
stream for the state's value and one for the advantages; with noisy nets every layer of the streams
is noisy. A stream without noise is one fused autograd node.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qfleet.networks.fused import Dense
from qfleet.networks.noisy import NoisyLinear


@dataclass(frozen=True)
class Style:
    """The options that all heads have."""

    dueling: bool = False
    noisy: bool = False
    hidden: tuple[int, ...] = ()
    """Widths of hidden layers in every stream."""
    sigma0: float = 0.5
    """Initial noise scale σ₀ of noisy layers."""


def combine_streams(value: Tensor, advantage: Tensor) -> Tensor:
    """Return V + A − mean A over actions (1511.06581).

    ``[B, 1]`` and ``[B, A]`` → ``[B, A]``; ``[B, 1, K]`` and ``[B, A, K]`` → ``[B, A, K]``.
    """
    return value + (advantage - advantage.mean(1, keepdim=True))


def _stream(features: int, outputs: int, style: Style) -> nn.Module:
    sizes = (features, *style.hidden, outputs)
    if not style.noisy:
        return Dense(sizes, relu_last=False)
    layers: list[nn.Module] = []
    for fan_in, fan_out in itertools.pairwise(sizes):
        layers += [NoisyLinear(fan_in, fan_out, style.sigma0), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _noisy_layers(stream: nn.Module) -> list[NoisyLinear]:
    return [layer for layer in stream.children() if isinstance(layer, NoisyLinear)]


def _two_noisy(features: Tensor, one: nn.Module, other: nn.Module) -> tuple[Tensor, Tensor]:
    """Apply two noisy streams to the same features with one product per layer, faster on GPUs."""
    first, *rest = zip(_noisy_layers(one), _noisy_layers(other), strict=True)
    widths = [len(layer.bias_mu) for layer in first]
    bias = torch.cat([layer.bias() for layer in first])
    x = torch.addmm(bias, features, torch.cat([layer.weight() for layer in first], dim=1))
    if not rest:
        value, advantage = torch.split(x, widths, dim=1)
        return value, advantage
    x = x.view(len(features), 2, widths[0]).transpose(0, 1)
    for pair in rest:
        widths = [len(layer.bias_mu) for layer in pair]
        # Zeros pad the products to equal width, a multiple of four, which is faster on GPUs.
        wide = -(-max(widths) // 4) * 4
        missing = [(0, wide - width) for width in widths]
        weights = [F.pad(layer.weight(), pad) for layer, pad in zip(pair, missing, strict=True)]
        biases = [F.pad(layer.bias(), pad) for layer, pad in zip(pair, missing, strict=True)]
        x = torch.baddbmm(torch.stack(biases).unsqueeze(1), x.relu(), torch.stack(weights))
        x = x[:, :, : max(widths)]
    return x[0, :, : widths[0]], x[1, :, : widths[1]]


class ActionHead(nn.Module):
    """A head of one number per action, ``[B, A]``, or of K = ``width`` numbers, ``[B, A, K]``.

    The numbers are expected values, the logits of K atoms of fixed value (C51, 1707.06887), or the
    values of K fixed quantiles (QR-DQN, 1710.10044).
    """

    def __init__(
        self, features: int, num_actions: int, style: Style, width: int | None = None
    ) -> None:
        super().__init__()
        self.width, self._noisy = width, style.noisy
        self.advantage = _stream(features, num_actions * (width or 1), style)
        self.value = _stream(features, width or 1, style) if style.dueling else None

    def forward(self, features: Tensor) -> Tensor:
        if self.value is None:
            return self.by_action(self.advantage(features))
        if self._noisy and not features.is_cpu:
            value, advantage = _two_noisy(features, self.value, self.advantage)
        else:
            value, advantage = self.value(features), self.advantage(features)
        return combine_streams(self.by_action(value), self.by_action(advantage))

    def by_action(self, output: Tensor) -> Tensor:
        """Return a stream's output, ``[B, A × K]``, as ``[B, A, K]``, if the head has a width."""
        return output if self.width is None else output.view(output.shape[0], -1, self.width)


class ImplicitQuantileHead(nn.Module):
    """A head of the values ``[B, A, K]`` of the quantiles ``fractions`` ``[B, K]`` (IQN).

    A fraction τ is embedded as ReLU(W cos(π i τ) + b), i = 0 … n−1, with the width of the features,
    and multiplied with them element by element (1806.06923, eq. 4). The embedding is never noisy.
    """

    frequencies: Tensor

    def __init__(self, features: int, num_actions: int, num_cosines: int, style: Style) -> None:
        super().__init__()
        frequencies = math.pi * torch.arange(num_cosines, dtype=torch.float32)
        self.register_buffer("frequencies", frequencies, persistent=False)
        self.embedding = Dense((num_cosines, features), relu_last=True)
        self.values = ActionHead(features, num_actions, style)

    def forward(self, features: Tensor, fractions: Tensor) -> Tensor:
        batch, count = fractions.shape
        cosines = torch.cos(fractions.reshape(-1, 1) * self.frequencies)
        embedded = self.embedding(cosines).view(batch, count, -1)
        mixed = (features.unsqueeze(1) * embedded).flatten(0, 1)
        values: Tensor = self.values(mixed)
        return values.view(batch, count, -1).transpose(1, 2)
