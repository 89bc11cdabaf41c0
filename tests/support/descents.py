"""Gradient descent on shares of the data in one process."""

from __future__ import annotations

import numpy as np

from qfleet.lab.mapreduce import Floats, Problem, gradient, map_and_reduce, map_samples, shares


def descend(
    problem: Problem, workers: int, steps: int, rate: float, *, local_reduction: bool
) -> Floats:
    """Run synchronous descent from 0 in this process; return the weights after every round."""
    map_share = map_and_reduce if local_reduction else map_samples
    cuts = shares(problem.samples, workers)
    weights = [np.zeros(problem.dimensions)]
    for _ in range(steps):
        parts = [
            map_share(problem.features[cut], problem.targets[cut], weights[-1]) for cut in cuts
        ]
        slope = gradient(parts, problem.samples)
        weights.append(weights[-1] - rate * slope)
    return np.stack(weights)
