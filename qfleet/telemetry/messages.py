"""The cost of a message: fit latency and bandwidth to measured message sizes and times.

seconds ≈ latency + bytes / bandwidth
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

LEAST_CALLS = 3
"""A line fits any two points exactly, so that two calls say nothing about the fit."""
LEAST_SPREAD = 2.0
"""Least ratio of the largest message to the smallest: messages of about one size do not determine
the cost per byte."""


@dataclass(frozen=True)
class MessageCost:
    """A least-squares line through measured (bytes, seconds)."""

    latency_s: float
    bandwidth_bytes_per_s: float | None
    """None if larger messages took no longer."""
    explained: float | None
    """Share of the times' variance that the line explains (R²); None if all times are equal."""
    messages: int
    """Number of measured messages."""


def fit_cost(calls: Sequence[tuple[int, float]]) -> MessageCost | None:
    """Fit a line to (bytes, seconds); return None if the calls do not determine one.

    The fit is constrained: neither latency nor bandwidth is negative.
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
