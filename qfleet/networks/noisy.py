"""A dense layer with learnt noise: a batch ``[B, in]`` in, ``[B, out]`` out (1706.10295)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn


class NoisyLinear(nn.Module):
    """Factorised Gaussian noise: w = μ + σ ∘ (f(ε_in) ⊗ f(ε_out)), f(x) = sgn(x)·√|x|.

    In training mode the noise of the last ``resample_noise`` is used, in eval mode the means alone.
    The noise lies in ordinary buffers, so that a checkpoint holds it and a run resumes exactly.
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
        self.register_buffer("noise_in", _shape_noise(torch.randn(fan_in)))
        self.register_buffer("noise_out", _shape_noise(torch.randn(fan_out)))

    def forward(self, x: Tensor) -> Tensor:
        mean = torch.addmm(self.bias_mu, x, self.weight_mu)
        if not self.training:
            return mean
        # The noise's factors are applied to the layer's ends: no noisy weight is ever built.
        noisy = torch.addmm(self.bias_sigma, x * self.noise_in, self.weight_sigma)
        return torch.addcmul(mean, noisy, self.noise_out)


@torch.no_grad()
def resample_noise(layers: Sequence[NoisyLinear], generator: torch.Generator) -> None:
    """New noise for all layers, in one draw on the generator's device: few kernels in all."""
    buffers = [noise for layer in layers for noise in (layer.noise_in, layer.noise_out)]
    sizes = [noise.shape[0] for noise in buffers]
    draw = torch.randn(sum(sizes), generator=generator, device=generator.device)
    torch._foreach_copy_(buffers, torch.split(_shape_noise(draw), sizes))


def _shape_noise(draw: Tensor) -> Tensor:
    return draw.sign() * draw.abs().sqrt()
