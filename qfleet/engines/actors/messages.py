"""What passes between the processes: orders and reports of actors, questions and answers of shards.

All of it is plain data: numbers, arrays, names. Rows themselves travel as letters.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from qfleet.core.types import Episode
from qfleet.engines.actors.shares import Holding
from qfleet.telemetry.trace import SpanRecord


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
    plain_bytes: int
    """The same without compression."""
    weight_bytes: int
    """That came with the order; 0 where it had the newest."""
    messages: int
    """The order, which the report answers, the letter, and weights if they came."""
    host: str
    began_s: float
    """When it was told to begin, by its ``perf_counter``."""
    wall_s: float
    """From its last report to this one; from its first order to the first."""
    processor_s: float
    """Over the same time."""
    episodes: list[Episode] = field(default_factory=list)
    faults: list[tuple[str, str]] = field(default_factory=list)
    """Kind and message of every fault of the environments that was survived."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Where that wall time went, by stage; idle is before the order came."""
    spans: list[SpanRecord] = field(default_factory=list)
    """The same one by one, where a trace is wanted."""


COLUMNS = ("obs", "action", "reward", "discount", "next_obs")
"""Of a batch, those that a shard sends."""


@dataclass(frozen=True)
class News:
    """Errors that samples turned out to have, for the ring of ``actor``."""

    actor: int
    index: NDArray[np.int64]
    priority: NDArray[np.float32]

    @property
    def nbytes(self) -> int:
        return self.index.nbytes + self.priority.nbytes


class Tally(NamedTuple):
    """What a shard has done since it was started."""

    env_steps: int = 0
    """That it received."""
    samples: int = 0
    """That it gave."""
    bytes_in: int = 0
    bytes_out: int = 0
    processor_s: float = 0.0


@dataclass(frozen=True)
class Answer:
    """What every call comes back with."""

    holdings: dict[int, Holding]
    """Of each ring, by actor."""
    tally: Tally


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
        each = (*self.columns, self.index, self.actor, self.probability)
        return sum(column.nbytes for column in each)
