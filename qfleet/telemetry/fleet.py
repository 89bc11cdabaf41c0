"""Accounts of the processes of a run: one per worker, server and shard, and one of all together.

``FleetAccount.as_dict`` becomes ``fleet`` in ``result.json``, ``fleet_table`` prints it and
``fleet_plots`` draws it. A worker's time is divided into computing (stepping environments, choosing
actions, copying, learning), communicating (its messages are in flight), waiting (for other
processes) and other (not covered by any span). Actors are workers too: their transitions go to
shards of a replay memory, and a separate learner holds the weights.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Protocol, TypeAlias

import numpy as np

from qfleet.telemetry.formatting import finite
from qfleet.telemetry.timers import KIND_OF, KINDS, STAGES
from qfleet.telemetry.trace import SpanRecord

OTHER = "other"
STRAGGLES = 1.5
"""A worker is reported as straggler if its time per step exceeds the median by this factor."""
TRAFFIC = ("bytes_sent", "bytes_received", "messages")
"""Figures of a worker that make up ``communication`` of a run."""
LEARNER = "learner"
"""Name of the learner's row."""
MOST_LOGGED = 32
"""Processes whose shares are logged; of hundreds, every row of the log would be long."""
LEAST_CALLS = 3
"""A line fits any two points exactly, so that two calls say nothing about the fit."""
LEAST_SPREAD = 2.0
"""Least ratio of the largest message to the smallest: messages of about one size do not determine
the cost per byte."""


ShareRow: TypeAlias = tuple[str, float | None, Mapping[str, float]]
"""Name of a process, its env steps per second, and its shares by kind and ``OTHER``."""


@dataclass
class WorkerAccount:
    """What one worker did, including its predecessors if it was restarted; an engine adds to it."""

    number: int
    host: str = ""
    """Empty until the worker has reported."""
    env_steps: int = 0
    updates: int | None = None
    """None for an actor, which makes no updates."""
    wall_s: float = 0.0
    """Since the worker's first step; starting the process is not included."""
    processor_s: float = 0.0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    """By ``timers.STAGES``: communicate is messages in flight, idle is waiting for others."""
    bytes_sent: int = 0
    bytes_received: int = 0
    messages: int = 0
    outcomes: Mapping[str, int] = field(default_factory=dict)
    """What servers did with its messages, counted once per server: applied, kept, dropped (by
    reason) …"""
    packing_s: float = 0.0
    """Time spent compressing messages before they were sent; part of computing."""
    calls: Sequence[tuple[int, float]] = ()
    """Bytes and seconds of some of its messages."""
    restarts: int = 0
    staleness: dict[int, int] = field(default_factory=Counter)
    """Age of the weights in updates → number of an actor's blocks; servers count gradients."""

    @property
    def env_steps_per_s(self) -> float | None:
        return _ratio(self.env_steps, self.wall_s)

    @property
    def own_pace(self) -> float | None:
        """Env steps per second, without the time spent waiting for other processes.

        At a barrier the plain rates of all workers are equal, so they do not show a straggler.
        """
        return _ratio(self.env_steps, self.wall_s - self.seconds.get("idle", 0.0))

    @property
    def shares(self) -> dict[str, float]:
        """Shares of the worker's wall time, by kind and ``OTHER``."""
        return shares_of(self.seconds, self.wall_s)

    def row(self, member: str) -> ShareRow:
        return (f"{member} {self.number}", self.env_steps_per_s, self.shares)

    def as_dict(self) -> dict[str, Any]:
        # Not the calls: thousands of pairs, which ``FleetAccount.message_cost`` summarises.
        return {name: value for name, value in vars(self).items() if name != "calls"} | {
            "staleness": _named(self.staleness) or None,
            "env_steps_per_s": self.env_steps_per_s,
            "own_pace": self.own_pace,
            "shares": self.shares,
        }


@dataclass(frozen=True)
class ServerAccount:
    """What one server did: the counters of its share of the weights, and its restores."""

    number: int
    version: int
    processor_s: float
    received: int
    applied: int
    repeated: int
    dropped: Mapping[str, int]
    """By reason."""
    bytes_in: int
    bytes_out: int
    staleness: Mapping[int, int]
    """Age of the weights in updates → number of gradients."""
    restores: int = 0
    lost: int = 0
    """Gradients that workers sent but that are in no weights: sent after the snapshot that was
    restored, or in flight when the server died."""
    unknown: int = 0
    """Number of times that a worker died while this server could not report what the worker had
    sent. Each time, ``lost`` may miss what that worker sent since its last report."""

    def as_dict(self) -> dict[str, Any]:
        # Not asdict, which does not copy Counters correctly.
        named = _named(self.staleness)
        return {**vars(self), "dropped": dict(self.dropped), "staleness": named}


@dataclass(frozen=True)
class ShardAccount:
    """What one shard of a replay memory did, restarts included, as far as it was reported."""

    number: int
    processor_s: float
    env_steps: int
    """Env steps that the shard received."""
    samples: int
    """Samples that the shard sent to the learner."""
    bytes_in: int
    """Block messages and priorities."""
    bytes_out: int
    restarts: int
    lost: int
    """Transitions that were in the shard, and could be sampled, when it died."""


@dataclass(frozen=True)
class Staleness:
    """A histogram of ages of weights, in updates, with its mean and percentiles."""

    counts: Mapping[int, int]

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    @property
    def mean(self) -> float | None:
        return _ratio(sum(age * count for age, count in self.counts.items()), self.total)

    def percentile(self, percent: int) -> int | None:
        """Return the smallest age that ``percent`` % of all ages do not exceed; None if empty."""
        so_far = 0
        for age, count in sorted(self.counts.items()):
            so_far += count
            if count and 100 * so_far >= percent * self.total:
                return age
        return None

    def as_dict(self) -> dict[str, Any]:
        tail = {"p95": self.percentile(95), "max": self.percentile(100)}
        return {"counts": _named(self.counts), "mean": self.mean, **tail}


@dataclass(frozen=True)
class MessageCost:
    """A least-squares line through (bytes, seconds): seconds ≈ latency + bytes / bandwidth."""

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
    bandwidth = 1.0 / slope if slope > 0 else None
    explained = 1.0 - missed / variation if variation > 0 else None
    return MessageCost(latency_s, bandwidth, explained, len(calls))


@dataclass(frozen=True)
class FleetAccount:
    """What all processes of a run did together."""

    update: str | None
    """How gradients became weights: sync, async …; None for actors, which have one learner."""
    wall_s: float
    driver_processor_s: float
    workers: Sequence[WorkerAccount]
    servers: Sequence[ServerAccount] = ()
    uncompressed_bytes_sent: int | None = None
    """Bytes that workers would have sent without compression; None if nothing was compressed."""
    uncompressed_bytes_received: int | None = None
    shards: Sequence[ShardAccount] = ()
    learner: Mapping[str, float] | None = None
    """Shares of the learner's time, as ``WorkerAccount.shares``; None where every worker learns."""

    @property
    def member(self) -> str:
        """The word for a worker in tables and plots."""
        return "worker" if self.update else "actor"

    @property
    def rows(self) -> list[ShareRow]:
        """Name, env steps per second and shares of each worker, and of the learner if any."""
        rows = [worker.row(self.member) for worker in self.workers]
        return rows if self.learner is None else [*rows, (LEARNER, None, self.learner)]

    def total(self, name: str) -> int:
        """Return the sum over workers of one figure: env_steps, bytes_sent, messages …"""
        return sum(getattr(worker, name) for worker in self.workers)

    @property
    def mean_workers(self) -> float:
        """Mean number of workers at work: a run may be scaled, and some may never find room."""
        seconds = [worker.wall_s for worker in self.workers]
        return _ratio(sum(seconds), max(seconds, default=0.0)) or len(seconds)

    @property
    def env_steps_per_s(self) -> float | None:
        """Rate of all workers together, without starting processes and without evaluations."""
        return _ratio(self.total("env_steps"), max((w.wall_s for w in self.workers), default=0.0))

    @property
    def processor_s(self) -> float:
        """CPU time of all processes, in seconds."""
        total_s = self.driver_processor_s + sum(worker.processor_s for worker in self.workers)
        total_s += sum(server.processor_s for server in self.servers)
        return total_s + sum(shard.processor_s for shard in self.shards)

    @property
    def shares(self) -> dict[str, float | None]:
        """Mean over workers of their time shares, unweighted."""
        present = [worker.shares for worker in self.workers if worker.wall_s > 0]
        return {
            kind: statistics.fmean(shares[kind] for shares in present) if present else None
            for kind in (*KINDS, OTHER)
        }

    @property
    def straggler_ratio(self) -> float | None:
        """Time per step of the slowest worker over the median's, without waits for others."""
        return _slowness(worker.own_pace for worker in self.workers)

    @property
    def straggler(self) -> int | None:
        """The slowest worker, if it is over ``STRAGGLES`` times as slow as the median."""
        paces = {w.number: w.own_pace for w in self.workers if w.own_pace is not None}
        if len(paces) < 2:
            return None
        slowest = min(paces, key=lambda number: paces[number])
        return slowest if statistics.median(paces.values()) > STRAGGLES * paces[slowest] else None

    @cached_property
    def staleness(self) -> Staleness:
        """Staleness of gradients, counted once per server, or of all actors' blocks."""
        counts: Counter[int] = Counter()
        for server in self.servers:
            counts.update(server.staleness)
        for worker in self.workers:
            counts.update(worker.staleness)
        return Staleness(counts)

    def saved(self, way: str) -> float | None:
        """Return the share of the uncompressed bytes that compression saved: "sent", "received"."""
        uncompressed = getattr(self, f"uncompressed_bytes_{way}")
        return 1.0 - self.total(f"bytes_{way}") / uncompressed if uncompressed else None

    @cached_property
    def message_cost(self) -> MessageCost | None:
        return fit_cost([call for worker in self.workers for call in worker.calls])

    def as_dict(self) -> dict[str, Any]:
        """Return all figures as JSON values; None where a figure does not apply."""
        return {
            "update": self.update,
            "wall_s": self.wall_s,
            "env_steps": self.total("env_steps"),
            "env_steps_per_s": self.env_steps_per_s,
            "processor_s": self.processor_s,
            "driver_processor_s": self.driver_processor_s,
            "shares": self.shares,
            "straggler": {
                "worker": self.straggler,
                "ratio": self.straggler_ratio,
                # With waits included: at a barrier it is close to 1.
                "rate_ratio": _slowness(worker.env_steps_per_s for worker in self.workers),
            },
            "staleness": self.staleness.as_dict(),
            "traffic": {
                **{name: self.total(name) for name in TRAFFIC},
                "uncompressed_bytes_sent": self.uncompressed_bytes_sent,
                "uncompressed_bytes_received": self.uncompressed_bytes_received,
                "saved_sent": self.saved("sent"),
                "saved_received": self.saved("received"),
            },
            "message_cost": None if self.message_cost is None else asdict(self.message_cost),
            "learner": None if self.learner is None else {"shares": dict(self.learner)},
            "workers": [worker.as_dict() for worker in self.workers],
            "servers": [server.as_dict() for server in self.servers],
            "shards": [asdict(shard) for shard in self.shards],
        }


class Processes(Protocol):
    """An engine's processes that can be accounted for: a parameter server's fleet, or actors."""

    def account(self) -> FleetAccount | None:
        """Return the account; None until a process has reported."""
        ...

    def rows(self) -> Sequence[ShareRow]:
        """Return name, env steps per second and shares of each process, as reported so far.

        Unlike ``account`` it asks no process, so that it can be called often.
        """
        ...

    def env_steps_per_s(self) -> float | None:
        """Return the rate from when all workers had reported once until the newest report."""
        ...

    def lanes(self) -> Iterable[tuple[str, list[SpanRecord]]]:
        """Return each process's name and spans, on this process's clock, if a trace is recorded."""
        ...


def shares_of(seconds: Mapping[str, float], wall_s: float) -> dict[str, float]:
    """Return shares of ``wall_s`` by kind and ``OTHER``; ``seconds`` are by stage."""
    shares = dict.fromkeys((*KINDS, OTHER), 0.0)
    if wall_s > 0:
        for stage, spent_s in seconds.items():
            shares[KIND_OF[stage]] += spent_s / wall_s
        shares[OTHER] = max(0.0, 1.0 - sum(shares.values()))
    return shares


def share_scalars(rows: Iterable[ShareRow]) -> dict[str, float]:
    """Return the scalars ``worker_0/time/share_waiting`` … of the first ``MOST_LOGGED`` workers.

    Those of the learner are always among them.
    """
    known = list(rows)
    workers = [row for row in known if row[0] != LEARNER]
    learner = [row for row in known if row[0] == LEARNER]
    return {
        f"{name.replace(' ', '_')}/time/share_{kind}": shares[kind]
        for name, _, shares in (*workers[:MOST_LOGGED], *learner)
        for kind in KINDS
    }


def _ratio(part: float, whole: float) -> float | None:
    return finite(part / whole) if whole > 0 else None


def _slowness(rates: Iterable[float | None]) -> float | None:
    """Return median over slowest rate; None for fewer than two workers or a slowest rate of 0."""
    known = [rate for rate in rates if rate is not None]
    return _ratio(statistics.median(known), min(known)) if len(known) > 1 else None


def _named(counts: Mapping[int, int]) -> dict[str, int]:
    """Return the counts with keys as strings, as JSON requires."""
    return {str(age): count for age, count in sorted(counts.items())}
