"""Least squares by parallel gradient descent: the arithmetic, without a cluster.

The samples are split into one share per worker. This module computes gradients, their reduction,
the weights at the minimum, and how many bytes a round should transfer. A round broadcasts the
weights, maps them to gradients on every share, reduces these to one gradient, and updates:

    L(w) = 1/2n Σ (xⱼ·w − yⱼ)²      zⱼ = (xⱼ·w − yⱼ) xⱼ      w ← w − η/n Σ zⱼ
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from qfleet.core.errors import ConfigError, require

Floats = NDArray[np.float64]
FLOAT_BYTES = np.dtype(np.float64).itemsize
COPIES = 3
"""Copies of the data in memory: here, in the workers, and temporarily in the solver of the closed
form."""


@dataclass(frozen=True)
class Problem:
    """A least-squares problem: its data and its solution."""

    features: Floats
    """``[n, d]``"""
    targets: Floats
    """``[n]``"""

    @property
    def samples(self) -> int:
        return int(self.features.shape[0])

    @property
    def dimensions(self) -> int:
        return int(self.features.shape[1])

    @cached_property
    def solution(self) -> Floats:
        """The weights at the minimum, in closed form."""
        return np.asarray(np.linalg.lstsq(self.features, self.targets, rcond=None)[0])

    @cached_property
    def curvature(self) -> Floats:
        """Second derivative of the loss, ``[d, d]``."""
        return np.asarray(self.features.T @ self.features / self.samples)

    @cached_property
    def largest_rate(self) -> float:
        """The learning rate from which on plain gradient descent diverges."""
        return float(2.0 / np.linalg.eigvalsh(self.curvature)[-1])

    @cached_property
    def least_loss(self) -> float:
        return loss(self.features, self.targets, self.solution)

    def excess_loss(self, weights: Floats) -> float:
        """Return the loss above the minimum, computed from the curvature to avoid cancellation."""
        away = weights - self.solution
        return float(0.5 * away @ self.curvature @ away)

    def distance(self, weights: Floats) -> float:
        """Return the distance from the closed form, relative to its norm."""
        length = float(np.linalg.norm(self.solution))
        return float(np.linalg.norm(weights - self.solution)) / (length or 1.0)


def check_size(samples: int, dimensions: int, available_bytes: int) -> None:
    """Raise ConfigError if the problem does not fit into ``available_bytes``."""
    _check_counts(samples, dimensions)
    most = available_bytes // (COPIES * (dimensions + 1) * FLOAT_BYTES)
    if samples > most:
        fix = f"use --samples {most} or fewer" if most >= dimensions else "use fewer --features"
        needed_gib = COPIES * samples * (dimensions + 1) * FLOAT_BYTES / 2**30
        raise ConfigError(
            f"samples {samples} of {dimensions} features need {needed_gib:.1f} GiB but "
            f"{available_bytes / 2**30:.1f} GiB of memory is available; {fix}"
        )


def check_descent(steps: int, rate: float) -> None:
    """Raise ConfigError unless ``steps`` is at least 1 and ``rate`` is positive and finite."""
    require(steps >= 1, "steps", steps, "at least 1")
    require(rate > 0 and math.isfinite(rate), "learning_rate", rate, "positive and finite")


def make_problem(samples: int, dimensions: int, noise: float, seed: int) -> Problem:
    """Return a problem with normal features, true weights and noise on the targets."""
    _check_counts(samples, dimensions)
    require(noise >= 0 and math.isfinite(noise), "noise", noise, "finite and at least 0")
    require(seed >= 0, "seed", seed, "at least 0")
    rng = np.random.default_rng(seed)
    features = rng.standard_normal((samples, dimensions))
    true_weights = rng.standard_normal(dimensions)
    return Problem(features, features @ true_weights + noise * rng.standard_normal(samples))


def check_shares(samples: int, workers: int) -> None:
    """Raise ConfigError unless there is at least one sample per worker."""
    require(workers >= 1, "workers", workers, "at least 1")
    require(workers <= samples, "workers", workers, f"at most samples ({samples})")


def shares(samples: int, workers: int) -> list[slice]:
    """Return one range of samples per worker; their sizes differ by at most 1."""
    check_shares(samples, workers)
    cuts = [samples * k // workers for k in range(workers + 1)]
    return [slice(start, stop) for start, stop in pairwise(cuts)]


def loss(features: Floats, targets: Floats, weights: Floats) -> float:
    residuals = _residuals(features, targets, weights)
    return float(residuals @ residuals) / (2 * len(targets))


def map_samples(features: Floats, targets: Floats, weights: Floats) -> Floats:
    """Return the gradient zⱼ of every sample, ``[n, d]``."""
    return _residuals(features, targets, weights)[:, None] * features


def map_and_reduce(features: Floats, targets: Floats, weights: Floats) -> Floats:
    """Return Σ zⱼ over a share, ``[1, d]``: the map and a local reduction in one."""
    return np.asarray((_residuals(features, targets, weights) @ features)[None])


def _residuals(features: Floats, targets: Floats, weights: Floats) -> Floats:
    # Row by row: the result of a sample must not depend on how many samples its worker has, as it
    # does where a library multiplies block by block.
    return np.asarray(np.einsum("nd,d->n", features, weights) - targets)


def gradient(parts: list[Floats], samples: int) -> Floats:
    """Return the mean gradient over ``samples`` samples.

    ``parts`` are what the workers sent: sums ``[1, d]``, or one vector per sample, ``[k, d]``.
    """
    return np.asarray(np.concatenate(parts).sum(axis=0)) / samples


def broadcast_bytes(workers: int, dimensions: int) -> int:
    """Return the bytes that the server sends in a round: the weights, to every worker."""
    return workers * dimensions * FLOAT_BYTES


def gradient_bytes(workers: int, samples: int, dimensions: int, *, local_reduction: bool) -> int:
    """Return the bytes that workers send in a round: m·d numbers, without local reduction n·d."""
    return (workers if local_reduction else samples) * dimensions * FLOAT_BYTES


@dataclass(frozen=True)
class Slowness:
    """An artificial delay of a worker's gradients: a factor, or a latency."""

    factor: float = 1.0
    latency_s: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Slowness:
        """Parse ``4x`` (four times as long) or ``50ms`` (50 ms longer)."""
        match = re.fullmatch(r"(\d+(?:\.\d+)?)(x|ms)", text.strip())
        if match is None or (match[2] == "x" and float(match[1]) < 1):
            raise ConfigError(
                f"straggler '{text}' must be a factor from 1x on or a time, e.g. 50ms"
            )
        number = float(match[1])
        return cls(factor=number) if match[2] == "x" else cls(latency_s=number / 1000)

    def pause_s(self, busy_s: float) -> float:
        return (self.factor - 1.0) * busy_s + self.latency_s


def _check_counts(samples: int, dimensions: int) -> None:
    require(dimensions >= 1, "features", dimensions, "at least 1")
    require(samples >= dimensions, "samples", samples, f"at least features ({dimensions})")
