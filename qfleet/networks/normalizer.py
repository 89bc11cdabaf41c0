"""Normalised observations: a torso behind running statistics of the observations of training."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from qfleet.core.errors import ConfigError
from qfleet.core.types import EnvSpec

MOST_DEVIATIONS = 10.0
"""Normalised observations are clipped to ± this; pixels, which are only centred, are not."""
VARIANCE_EPS = 1e-8


class RunningStatistics(nn.Module):
    """Mean and variance of all observations so far (Chan et al. 1979), as buffers."""

    mean: Tensor
    variance: Tensor
    count: Tensor

    def __init__(self, shape: tuple[int, ...], of_pixels: bool = False) -> None:
        super().__init__()
        self._of_pixels = of_pixels
        self.register_buffer("mean", torch.zeros(shape))
        self.register_buffer("variance", torch.ones(shape))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, obs: Tensor) -> Tensor:
        """Return normalised observations; the frames of a stack share their statistics.

        Pixels are not divided by their deviations: those of a background are almost 0.
        """
        if self._of_pixels:
            return (obs - self.mean) / 255
        scaled = (obs - self.mean) * torch.rsqrt(self.variance + VARIANCE_EPS)
        return scaled.clamp(-MOST_DEVIATIONS, MOST_DEVIATIONS)

    @torch.no_grad()
    def observe(self, obs: Tensor) -> None:
        """Add observations ``[T, N, …]``."""
        rows = obs.to(self.mean).flatten(0, 1)
        self.count += len(rows)
        share = len(rows) / self.count
        variance, mean = torch.var_mean(rows, dim=0, correction=0)
        distance = mean - self.mean
        self.mean += distance * share
        between = distance.square() * share * (1 - share)
        self.variance.copy_(self.variance * (1 - share) + variance * share + between)


class NormalizedTorso(nn.Module):
    """A torso of normalised observations. Replay keeps the observations as they are.

    The statistics are buffers, in checkpoints and saved policies; only a run's actor changes them.
    """

    def __init__(self, torso: nn.Module, spec: EnvSpec) -> None:
        super().__init__()
        if spec.num_obs_values:
            raise ConfigError(
                f"normalize_observations is for floats and pixels, and '{spec.env_id}' has "
                "discrete observations, which networks encode themselves; leave it out"
            )
        of_pixels = spec.obs_dtype == "uint8"
        self.torso, self.statistics = torso, RunningStatistics(spec.frame_shape, of_pixels)

    def forward(self, obs: Tensor) -> Tensor:
        features: Tensor = self.torso(self.statistics(obs))
        return features
