"""Sampling from many rings as from one. In: the mass of each; out: samples of each, and weights.

A ring's mass is the sum of its priorities or, if sampling is uniform, the number of its
transitions. A ring is chosen in proportion to its mass, and a transition within it in proportion to
its priority. That gives each transition the probability that it would have in one memory:

    P(i) = (mass of its ring / all mass) · (priority of i / mass of its ring)

The mass that a share was computed from may be slightly older than the draw within the ring. The
probability with which a sample was really drawn is the product of the two factors, and its
importance weight is computed from that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from qfleet.config.config import Config


def ring_capacity(config: Config) -> int:
    """Return the number of transitions kept of each actor."""
    return min(config.buffer_size // config.workers, config.replay_capacity)


def ring_slots(config: Config) -> int:
    """Return the flat indices per ring: those of the whole memory are ring · slots + index."""
    return ring_capacity(config) // config.envs * config.envs


class Holding(NamedTuple):
    """What there is to sample in a ring."""

    mass: float
    least: float
    """The smallest priority, raised to α, of any transition; 1 where sampling is uniform."""
    starts: int
    """Transitions that can be sampled."""


def shares_of(holdings: Mapping[int, Holding]) -> dict[int, float]:
    """Return ring → probability that a sample comes from it, of rings that are not empty."""
    total = sum(holding.mass for holding in holdings.values())
    return {ring: held.mass / total for ring, held in holdings.items() if held.mass > 0}


def allot(count: int, shares: Mapping[int, float], random: np.random.Generator) -> dict[int, int]:
    """Return how many of ``count`` samples come from each ring: on average exactly its share.

    One point is drawn in each of ``count`` equal slices of the whole, as within a ring.
    """
    rings = list(shares)
    ends = np.cumsum([shares[ring] for ring in rings])
    points = (np.arange(count) + random.random(count)) / count * ends[-1]
    # The last end may be a rounding error below the largest point.
    chosen = np.minimum(np.searchsorted(ends, points, side="right"), len(rings) - 1)
    counts = np.bincount(chosen, minlength=len(rings)).tolist()
    return {ring: number for ring, number in zip(rings, counts, strict=True) if number}


def relative_rarity(
    probability: NDArray[np.float64],
    ring: NDArray[np.int64],
    shares: Mapping[int, float],
    holdings: Mapping[int, Holding],
) -> NDArray[np.float64]:
    """Return P(rarest) / P(i) of every sample, at most 1; its power β is the importance weight.

    ``probability`` is that of each sample within its ``ring``.
    """
    largest = max(shares, default=0)
    share = np.zeros(largest + 1)
    share[list(shares)] = list(shares.values())
    rarest = min(
        shares[number] * held.least / held.mass
        for number, held in holdings.items()
        if number in shares and held.mass > 0
    )
    rarity: NDArray[np.float64] = np.minimum(rarest / (probability * share[ring]), 1.0)
    return rarity
