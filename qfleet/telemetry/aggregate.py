"""Statistics over seeds: the interquartile mean (IQM), its bootstrap interval, and a comparison.

The interquartile mean and the percentile bootstrap follow Agarwal et al. 2021 (arXiv 2108.13264).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

FloatArray = NDArray[np.float64]
MAX_GRID_POINTS = 400
RESAMPLES = 2000
TAILS = ((1 - 0.95) / 2, (1 + 0.95) / 2)
"""Quantiles that bound a 95 % interval."""
Verdict = Literal["better", "worse", "cannot tell"]
SIGNIFICANCE = 0.05
"""Largest p-value of a difference that is reported."""
MOST_SPLITS = 10_000
"""Splits into two groups that a test tries: all, or as many random ones."""


def iqm(values: ArrayLike) -> float:
    """Return the mean without the lowest and highest quarter (floor(n/4) values at each end)."""
    array = np.asarray(values, dtype=np.float64).ravel()
    if array.size == 0:
        raise ValueError("the IQM of no values is undefined")
    return float(_iqm_last_axis(array))


def bootstrap_ci(values: ArrayLike) -> tuple[float, float]:
    """Return the 95 % percentile bootstrap interval of the IQM of ``values`` ``[n]``."""
    array = np.asarray(values, dtype=np.float64).ravel()
    if array.size == 0:
        raise ValueError("the interval of no values is undefined")
    low, high = np.quantile(_iqm_last_axis(array[_resample(array.size)]), TAILS)
    return float(low), float(high)


def compare_scores(ours: ArrayLike, theirs: ArrayLike) -> Verdict:
    """Return whether scores are better than others, by an exact rank-sum test (Mann–Whitney).

    Not by whether bootstrap intervals overlap, because those of a few seeds are too narrow. Fewer
    than 4 against 4, or 3 against 5, can never be told apart.
    """
    first, second = (np.asarray(scores, dtype=np.float64).ravel() for scores in (ours, theirs))
    scores, count = np.concatenate([first, second]), first.size
    below, equal = (scores[:, None] > scores).sum(1), (scores[:, None] == scores).sum(1)
    ranks = below + equal / 2  # equal scores share the mean of their ranks
    if math.comb(scores.size, count) <= MOST_SPLITS:
        chosen = np.array(list(itertools.combinations(range(scores.size), count)), dtype=np.int64)
    else:
        chosen = np.random.default_rng(0).permuted(
            np.tile(np.arange(scores.size), (MOST_SPLITS, 1)), axis=1
        )[:, :count]
    expected = ranks.mean() * count if count else 0.0
    sums = ranks[chosen].sum(axis=1) - expected
    observed = ranks[:count].sum() - expected
    if np.mean(np.abs(sums) >= abs(observed)) > SIGNIFICANCE:
        return "cannot tell"
    return "better" if observed > 0 else "worse"


def iqm_curve(curves: Sequence[tuple[ArrayLike, ArrayLike]]) -> tuple[FloatArray, FloatArray]:
    """Return step grid and IQM, as ``aggregate_curves``, without the work of its bounds."""
    grid, columns = _on_one_grid(curves)
    return grid, _iqm_last_axis(columns)


def aggregate_curves(
    curves: Sequence[tuple[ArrayLike, ArrayLike]],
) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
    """Return step grid, IQM, and lower and upper bound of curves ``(steps, values)``.

    The grid covers the steps where all curves have data; it is empty when they share no range.
    """
    grid, columns = _on_one_grid(curves)
    if not grid.size:
        return grid, grid, grid, grid
    # One set of resampled seeds for the whole curve, so that the band resamples whole runs.
    chosen = _resample(len(curves))
    low, high = np.empty(grid.size), np.empty(grid.size)
    for point, column in enumerate(columns):
        low[point], high[point] = np.quantile(_iqm_last_axis(column[chosen]), TAILS)
    return grid, _iqm_last_axis(columns), low, high


def _on_one_grid(
    curves: Sequence[tuple[ArrayLike, ArrayLike]],
) -> tuple[FloatArray, FloatArray]:
    """Return the steps where all curves have data, and their values there ``[step, curve]``."""
    cleaned = [_increasing(steps, values) for steps, values in curves]
    if not cleaned or any(steps.size == 0 for steps, _ in cleaned):
        return np.empty(0), np.empty((0, 1))
    first = max(steps[0] for steps, _ in cleaned)
    last = min(steps[-1] for steps, _ in cleaned)
    grid = np.unique(np.concatenate([steps for steps, _ in cleaned]))
    grid = grid[(grid >= first) & (grid <= last)]
    if grid.size > MAX_GRID_POINTS:
        grid = np.linspace(first, last, MAX_GRID_POINTS)
    return grid, np.array([np.interp(grid, steps, values) for steps, values in cleaned]).T


def _iqm_last_axis(array: FloatArray) -> FloatArray:
    count = array.shape[-1]
    cut = count // 4
    middle: FloatArray = np.sort(array, axis=-1)[..., cut : count - cut]
    return np.asarray(middle.mean(axis=-1))


def _resample(count: int) -> NDArray[np.int64]:
    return np.random.default_rng(0).integers(0, count, size=(RESAMPLES, count))


def _increasing(steps: ArrayLike, values: ArrayLike) -> tuple[FloatArray, FloatArray]:
    """Return the curve sorted by step; of several values at one step the last one is kept."""
    newest = dict(zip(np.asarray(steps, np.float64), np.asarray(values, np.float64), strict=True))
    ordered = sorted(newest.items())
    return np.array([s for s, _ in ordered]), np.array([v for _, v in ordered])
