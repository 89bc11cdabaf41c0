"""A dense layer with learnt noise, ``[B, in]`` → ``[B, out]`` (noisy nets, 1706.10295)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

NOISE = ("noise_in", "noise_out")
"""Buffers of a noisy layer."""


class NoisyLinear(nn.Module):
    """A linear layer with factorised Gaussian noise.

    w = μ + σ ∘ (f(ε_in) ⊗ f(ε_out)), f(x) = sgn(x)·√|x|. In training mode the noise of the last
    ``store_noise`` is used, in eval mode only the means. The noise is stored in ordinary
    buffers, so that a checkpoint contains it and a run resumes exactly.
    """

    noise_in: Tensor
    noise_out: Tensor

    def __init__(self, fan_in: int, fan_out: int, sigma0: float) -> None:
        super().__init__()
        bound = 1 / math.sqrt(fan_in)
        self.weight_mu = nn.Parameter(torch.empty(fan_in, fan_out).uniform_(-bound, bound))
        self.bias_mu = nn.Parameter(torch.empty(fan_out).uniform_(-bound, bound))
        self.weight_sigma = nn.Parameter(torch.full((fan_in, fan_out), sigma0 * bound))
        self.bias_sigma = nn.Parameter(torch.full((fan_out,), sigma0 * bound))
        self.register_buffer("noise_in", shape_noise(torch.randn(fan_in)))
        self.register_buffer("noise_out", shape_noise(torch.randn(fan_out)))

    def weight(self) -> Tensor:
        """Return the current weights, including the noise."""
        if not self.training:
            return self.weight_mu
        noise = self.noise_in.unsqueeze(1) * self.noise_out
        return torch.addcmul(self.weight_mu, self.weight_sigma, noise)

    def bias(self) -> Tensor:
        if not self.training:
            return self.bias_mu
        return torch.addcmul(self.bias_mu, self.bias_sigma, self.noise_out)

    def forward(self, x: Tensor) -> Tensor:
        if not x.is_cpu:
            # One product instead of two: on a GPU a product costs more than building the weights.
            return torch.addmm(self.bias(), x, self.weight())
        mean = torch.addmm(self.bias_mu, x, self.weight_mu)
        if not self.training:
            return mean
        # The noise factors are applied to input and output, so that no noisy weight is built.
        noisy = torch.addmm(self.bias_sigma, x * self.noise_in, self.weight_sigma)
        return torch.addcmul(mean, noisy, self.noise_out)


def draw_noise(layers: Sequence[NoisyLinear], generator: torch.Generator) -> Tensor:
    """Return the normal random numbers of all layers, drawn at once to launch few kernels."""
    size = sum(len(layer.noise_in) + len(layer.noise_out) for layer in layers)
    return torch.randn(size, generator=generator, device=generator.device)


@torch.no_grad()
def store_noise(layers: Sequence[NoisyLinear], draw: Tensor) -> None:
    buffers = [noise for layer in layers for noise in (layer.noise_in, layer.noise_out)]
    sizes = [len(noise) for noise in buffers]
    torch._foreach_copy_(buffers, torch.split(shape_noise(draw), sizes))


def shape_noise(draw: Tensor) -> Tensor:
    return draw.sign() * draw.abs().sqrt()
