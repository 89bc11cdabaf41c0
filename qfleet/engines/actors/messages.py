"""Messages between the processes: orders and reports of actors, requests and replies of shards.

They are plain data: numbers, arrays, names. Rows travel as block messages (``block_messages.py``).
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
    """Version of the weights sent with the order, or of those that the actor has."""
    progress: int
    """Env steps of the whole run so far; ε depends on them unless there is a ladder."""


@dataclass(frozen=True)
class Report:
    """What an actor did; its block message goes directly to the replay memory."""

    rows: int
    version: int
    block_bytes: int
    """Size of the block message."""
    plain_bytes: int
    """Its size without compression."""
    weight_bytes: int
    """Size of the weights sent with the order; 0 if the actor had the newest."""
    messages: int
    """Order (which the report answers), block message, and weights if they were sent."""
    host: str
    began_s: float
    """When the order arrived, by the actor's ``perf_counter``."""
    wall_s: float
    """Time since its last report; before the first report, since its first order."""
    processor_s: float
    """Processor time over the same period."""
    episodes: list[Episode] = field(default_factory=list)
    faults: list[tuple[str, str]] = field(default_factory=list)
    """Kind and message of every fault of the environments that was survived."""
    seconds: dict[str, float] = field(default_factory=dict)
    """The wall time by stage; idle is the time before the order arrived."""
    spans: list[SpanRecord] = field(default_factory=list)
    """The spans of that time, if a trace is recorded."""


COLUMNS = ("obs", "action", "reward", "discount", "next_obs")
"""Columns of a batch that a shard sends."""


@dataclass(frozen=True)
class PriorityUpdate:
    """New priorities of samples from the ring of ``actor``."""

    actor: int
    index: NDArray[np.int64]
    priority: NDArray[np.float32]

    @property
    def nbytes(self) -> int:
        return self.index.nbytes + self.priority.nbytes


class Tally(NamedTuple):
    """What a shard has done since it was started."""

    env_steps: int = 0
    """Env steps received."""
    samples: int = 0
    """Samples sent."""
    bytes_in: int = 0
    bytes_out: int = 0
    processor_s: float = 0.0


@dataclass(frozen=True)
class ShardReply:
    """The reply to every call of a shard."""

    holdings: dict[int, Holding]
    """What each ring holds, by actor."""
    tally: Tally


@dataclass(frozen=True)
class SampleReply(ShardReply):
    """Samples of several rings, one ring after another."""

    columns: tuple[NDArray[Any], ...]
    """``COLUMNS``, ``[B, …]`` each; empty if there is no sample."""
    index: NDArray[np.int64]
    """Index of each sample within its ring."""
    actor: NDArray[np.int64]
    probability: NDArray[np.float64]
    """Probability of each sample within its ring."""

    @property
    def nbytes(self) -> int:
        each = (*self.columns, self.index, self.actor, self.probability)
        return sum(column.nbytes for column in each)
