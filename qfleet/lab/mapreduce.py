"""Least squares by parallel gradient descent: the arithmetic, without any cluster.

In: samples, cut into one share per worker. Out: gradients, what a reduce makes of them, the weights
that descent should end at, and how many bytes a round should move. A round broadcasts the weights,
maps them to gradients on every share, reduces these to one, and updates:

    L(w) = 1/2n Σ (xⱼ·w − yⱼ)²      zⱼ = (xⱼ·w − yⱼ) xⱼ      w ← w − η/n Σ zⱼ
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from qfleet.core.errors import ConfigError

Floats = NDArray[np.float64]
FLOAT_BYTES = np.dtype(np.float64).itemsize
COPIES = 3
"""Of the data: here, where workers read it, and for a while in the closed form's solver."""


@dataclass(frozen=True)
class Problem:
    """Data to fit, and where the fit should end."""

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
        """The minimum in closed form."""
        return np.asarray(np.linalg.lstsq(self.features, self.targets, rcond=None)[0])

    @cached_property
    def curvature(self) -> Floats:
        """Second derivative of the loss, ``[d, d]``."""
        return np.asarray(self.features.T @ self.features / self.samples)

    @cached_property
    def largest_rate(self) -> float:
        """Plain gradient descent diverges from this learning rate on."""
        return float(2.0 / np.linalg.eigvalsh(self.curvature)[-1])

    @cached_property
    def least_loss(self) -> float:
        return loss(self.features, self.targets, self.solution)

    def excess_loss(self, weights: Floats) -> float:
        """Loss above the least one; of a quadratic it is known without a difference of the two."""
        away = weights - self.solution
        return float(0.5 * away @ self.curvature @ away)

    def distance(self, weights: Floats) -> float:
        """From the closed form, as a share of its length."""
        length = float(np.linalg.norm(self.solution))
        return float(np.linalg.norm(weights - self.solution)) / (length or 1.0)


def check_size(samples: int, dimensions: int, available_bytes: int) -> None:
    """Refuse a problem whose numbers no memory of this size holds."""
    _check_counts(samples, dimensions)
    most = available_bytes // (COPIES * (dimensions + 1) * FLOAT_BYTES)
    mend = f"use --samples {most} or fewer" if most >= dimensions else "use fewer --features"
    needed_gib = COPIES * samples * (dimensions + 1) * FLOAT_BYTES / 2**30
    _require(
        samples <= most,
        "samples",
        samples,
        f"of {dimensions} features need {needed_gib:.1f} GiB but {available_bytes / 2**30:.1f} GiB "
        f"of memory is available; {mend}",
    )


def check_descent(steps: int, rate: float) -> None:
    """Refuse what is no descent."""
    _require(steps >= 1, "steps", steps, "must be at least 1")
    _require(rate > 0 and math.isfinite(rate), "learning_rate", rate, "must be positive")


def make_problem(samples: int, dimensions: int, noise: float, seed: int) -> Problem:
    """Normal features, targets from normal weights, and normal noise on the targets."""
    _check_counts(samples, dimensions)
    _require(noise >= 0 and math.isfinite(noise), "noise", noise, "must be a number from 0 on")
    _require(seed >= 0, "seed", seed, "must not be negative")
    rng = np.random.default_rng(seed)
    features = rng.standard_normal((samples, dimensions))
    truth = rng.standard_normal(dimensions)
    return Problem(features, features @ truth + noise * rng.standard_normal(samples))


def check_shares(samples: int, workers: int) -> None:
    """Refuse workers that would have nothing to do."""
    _require(workers >= 1, "workers", workers, "must be at least 1")
    _require(workers <= samples, "workers", workers, f"must not exceed samples {samples}")


def shares(samples: int, workers: int) -> list[slice]:
    """One run of samples per worker, as even as they come."""
    check_shares(samples, workers)
    cuts = [samples * k // workers for k in range(workers + 1)]
    return [slice(start, stop) for start, stop in pairwise(cuts)]


def loss(features: Floats, targets: Floats, weights: Floats) -> float:
    residuals = _residuals(features, targets, weights)
    return float(residuals @ residuals) / (2 * len(targets))


def map_samples(features: Floats, targets: Floats, weights: Floats) -> Floats:
    """The gradient zⱼ of every sample, ``[n, d]``."""
    return _residuals(features, targets, weights)[:, None] * features


def map_and_reduce(features: Floats, targets: Floats, weights: Floats) -> Floats:
    """Σ zⱼ over a share, ``[1, d]``: the map and a local reduction in one."""
    return np.asarray((_residuals(features, targets, weights) @ features)[None])


def _residuals(features: Floats, targets: Floats, weights: Floats) -> Floats:
    # Row by row: what a sample comes to must not depend on how many others share its worker,
    # as it does where a library multiplies block by block.
    return np.asarray(np.einsum("nd,d->n", features, weights) - targets)


def reduce_vectors(vectors: Floats, how: Literal["sum", "mean", "count"]) -> Floats:
    """Vectors ``[k, d]`` to one: their sum or mean, ``[d]``, or their number, ``[]``."""
    if how == "count":
        return np.asarray(float(len(vectors)))
    total = np.asarray(vectors.sum(axis=0))
    return total / len(vectors) if how == "mean" else total


def gradient(parts: list[Floats], samples: int, *, local_reduction: bool) -> Floats:
    """The gradient over ``samples`` from what their workers sent: sums, or every sample's own."""
    vectors = np.concatenate(parts)
    if local_reduction:
        return reduce_vectors(vectors, "sum") / samples
    return reduce_vectors(vectors, "mean")


def descend(
    problem: Problem, workers: int, steps: int, rate: float, *, local_reduction: bool
) -> Floats:
    """Synchronous descent from 0, all workers in this process: the weights after every round."""
    map_share = map_and_reduce if local_reduction else map_samples
    cuts = shares(problem.samples, workers)
    weights = [np.zeros(problem.dimensions)]
    for _ in range(steps):
        parts = [
            map_share(problem.features[cut], problem.targets[cut], weights[-1]) for cut in cuts
        ]
        slope = gradient(parts, problem.samples, local_reduction=local_reduction)
        weights.append(weights[-1] - rate * slope)
    return np.stack(weights)


def broadcast_bytes(workers: int, dimensions: int) -> int:
    """What the server sends in a round: the weights, to everyone."""
    return workers * dimensions * FLOAT_BYTES


def gradient_bytes(workers: int, samples: int, dimensions: int, *, local_reduction: bool) -> int:
    """What the workers send in a round: m·d numbers, or without local reduction n·d."""
    return (workers if local_reduction else samples) * dimensions * FLOAT_BYTES


@dataclass(frozen=True)
class Slowness:
    """How much longer a worker takes for a gradient than it need."""

    factor: float = 1.0
    latency_s: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Slowness:
        """``4x``: so many times as long. ``50ms``: so much longer."""
        match = re.fullmatch(r"(\d+(?:\.\d+)?)(x|ms)", text.strip())
        if match is None or (match[2] == "x" and float(match[1]) < 1):
            raise ConfigError(f"straggler '{text}' must be a factor from 1x on or a time as 50ms")
        number = float(match[1])
        return cls(factor=number) if match[2] == "x" else cls(latency_s=number / 1000)

    def pause_s(self, busy_s: float) -> float:
        return (self.factor - 1.0) * busy_s + self.latency_s


def _check_counts(samples: int, dimensions: int) -> None:
    _require(dimensions >= 1, "features", dimensions, "must be at least 1")
    _require(samples >= dimensions, "samples", samples, f"must be at least features {dimensions}")


def _require(ok: bool, name: str, value: float, why: str) -> None:
    if not ok:
        raise ConfigError(f"{name} {value} {why}")
