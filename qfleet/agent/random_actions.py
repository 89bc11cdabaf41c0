"""Random actions: of all actions, or, if observations hold masks, of the legal ones.

They are drawn before the observations are known, many at once, because a draw costs more than its
numbers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from qfleet.algorithms.exploration import sample_legal
from qfleet.core.types import AnyArray, EnvSpec


def draw_actions(
    spec: EnvSpec, random: np.random.Generator, shape: int | tuple[int, ...]
) -> NDArray[Any]:
    """Return actions; with masks, numbers in [0, 1) from which ``legal_actions`` makes them."""
    if spec.is_masked:
        return random.random(shape)
    return random.integers(spec.num_actions, size=shape)


def legal_actions(spec: EnvSpec, obs: AnyArray, drawn: AnyArray) -> AnyArray:
    """Return the drawn actions ``[B]`` for these observations, all of them legal."""
    return sample_legal(spec.legal(obs), drawn) if spec.is_masked else drawn
