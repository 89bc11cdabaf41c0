"""What a message costs. In: sizes and times of some; out: latency and bandwidth that explain them.

seconds ≈ latency + bytes / bandwidth
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

LEAST_CALLS = 3
"""Two are explained by any line through them."""
LEAST_SPREAD = 2.0
"""How many times as large as the smallest message the largest must be: where all are of about one
size, nobody can tell what a byte costs."""


@dataclass(frozen=True)
class MessageCost:
    """A line through what was measured, by least squares."""

    latency_s: float
    bandwidth_bytes_per_s: float | None
    """None where larger messages took no longer."""
    explained: float | None
    """Share of the times' variance that the line accounts for; None where all took as long."""
    messages: int
    """How many were measured."""


def fit_cost(calls: Sequence[tuple[int, float]]) -> MessageCost | None:
    """The line through (bytes, seconds); None where they do not tell.

    Neither latency nor bandwidth is ever negative: the best line with that in mind is taken.
    """
    if len(calls) < LEAST_CALLS:
        return None
    sizes, times_s = np.array(calls, dtype=np.float64).T
    if sizes.max() < LEAST_SPREAD * sizes.min() or sizes.max() == sizes.min():
        return None
    deviations = sizes - sizes.mean()
    slope = float(deviations @ times_s / (deviations @ deviations))
    latency_s = float(times_s.mean() - slope * sizes.mean())
    if slope <= 0:
        slope, latency_s = 0.0, float(times_s.mean())
    elif latency_s < 0:
        slope, latency_s = float(sizes @ times_s / (sizes @ sizes)), 0.0
    variation = float(((times_s - times_s.mean()) ** 2).sum())
    missed = float(((times_s - latency_s - slope * sizes) ** 2).sum())
    return MessageCost(
        latency_s=latency_s,
        bandwidth_bytes_per_s=1.0 / slope if slope > 0 else None,
        explained=1.0 - missed / variation if variation > 0 else None,
        messages=len(calls),
    )
