"""What passes between the processes: orders and reports of actors, questions and answers of shards.

All of it is plain data: numbers, arrays, names. Rows themselves travel as letters.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from qfleet.apex.shares import Holding
from qfleet.core import Episode, StateDict


class Order(NamedTuple):
    """One slice of work."""

    rows: int
    version: int
    """Of the weights that come along, or of those that the actor has."""
    progress: int
    """Env steps of the whole run so far, which ε follows where it is no ladder."""


@dataclass(frozen=True)
class Report:
    """What an actor did; its letter travels beside it, straight to the replay memory."""

    rows: int
    version: int
    letter_bytes: int
    episodes: list[Episode] = field(default_factory=list)
    faults: list[tuple[str, str]] = field(default_factory=list)
    """Kind and message of every fault of the environments that was survived."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Where the time of this slice went, by stage."""


COLUMNS = ("obs", "action", "reward", "discount", "next_obs")
"""Of a batch, those that a shard sends."""


def as_arrays(state: StateDict) -> StateDict:
    """Tensors as arrays: a view of a tensor would travel with all that it is a view of."""
    return {
        name: as_arrays(value)
        if isinstance(value, dict)
        else value.numpy()
        if isinstance(value, torch.Tensor)
        else value
        for name, value in state.items()
    }


def as_tensors(state: StateDict) -> StateDict:
    """And back, in memory of their own."""
    return {
        name: as_tensors(value)
        if isinstance(value, dict)
        else torch.from_numpy(np.array(value))
        if isinstance(value, np.ndarray)
        else value
        for name, value in state.items()
    }


@dataclass(frozen=True)
class News:
    """Errors that samples turned out to have, for the ring of ``actor``."""

    actor: int
    index: NDArray[np.int64]
    priority: NDArray[np.float32]


@dataclass(frozen=True)
class Answer:
    """What every call comes back with."""

    holdings: dict[int, Holding]
    """Of each ring, by actor."""


@dataclass(frozen=True)
class Drawn(Answer):
    """Samples of several rings, one ring after another."""

    columns: tuple[NDArray[Any], ...]
    """``COLUMNS``, ``[B, …]`` each; none where nothing was asked for."""
    index: NDArray[np.int64]
    """Within its ring."""
    actor: NDArray[np.int64]
    probability: NDArray[np.float64]
    """Within its ring."""

    @property
    def nbytes(self) -> int:
        return sum(column.nbytes for column in self.columns) + 24 * len(self.index)
