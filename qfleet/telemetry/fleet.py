"""What many processes did and cost. In: an account per worker, server and shard; out: one of all.

``FleetAccount.as_dict`` is ``fleet`` in ``result.json``, ``lines`` are for the terminal, and
``fleet_plots`` draws. A worker's time is computing (it steps, acts, copies, learns), communicating
(its messages are under way), waiting (for others), or other: what none of its spans covers. Actors
are workers too: what they collect goes to shards of a replay memory, and a learner has the weights.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Protocol

from qfleet.telemetry.formatting import finite
from qfleet.telemetry.messages import MessageCost, fit_cost
from qfleet.telemetry.timers import KIND_OF, KINDS
from qfleet.telemetry.trace import SpanRecord

OTHER = "other"
STRAGGLES = 1.5
"""A worker that takes more than so many times as long as the median for a step is named."""


@dataclass(frozen=True)
class WorkerAccount:
    """What one worker did, over all its lives."""

    number: int
    host: str
    """Empty as long as it has not reported."""
    env_steps: int
    updates: int | None
    """None: it is an actor, which makes none."""
    wall_s: float
    """Since its first step; starting the process is not in it."""
    processor_s: float
    seconds: Mapping[str, float]
    """By ``timers.STAGES``: communicate is messages under way, idle is waiting for others."""
    bytes_sent: int
    bytes_received: int
    messages: int
    outcomes: Mapping[str, int] = field(default_factory=dict)
    """What became of what it sent, once for each server: applied, kept, dropped by reason …"""
    packing_s: float = 0.0
    """What compressing took, before messages left; part of computing."""
    calls: Sequence[tuple[int, float]] = ()
    """Bytes and seconds of some of its messages."""
    restarts: int = 0
    staleness: Mapping[int, int] = field(default_factory=dict)
    """How many of its blocks were of weights so many updates old; of gradients, servers know."""

    @property
    def env_steps_per_s(self) -> float | None:
        return _ratio(self.env_steps, self.wall_s)

    @property
    def own_pace(self) -> float | None:
        """Env steps per second that it did not wait for others; at a barrier all rates are one."""
        return _ratio(self.env_steps, self.wall_s - self.seconds.get("idle", 0.0))

    @property
    def shares(self) -> dict[str, float]:
        """Of its wall time, by kind and ``OTHER``."""
        return shares_of(self.seconds, self.wall_s)

    def as_dict(self) -> dict[str, Any]:
        figures = dict(vars(self))
        # Thousands of pairs, of which the fit is what one wants to know.
        del figures["calls"]
        return {
            **figures,
            "seconds": dict(self.seconds),
            "outcomes": dict(self.outcomes),
            "staleness": _named(self.staleness) or None,
            "env_steps_per_s": self.env_steps_per_s,
            "own_pace": self.own_pace,
            "shares": self.shares,
        }


@dataclass(frozen=True)
class ServerAccount:
    """What one server did: its shard's counters, and its restores."""

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
    """How many gradients were of weights so many updates old."""
    restores: int = 0
    lost: int = 0
    """What workers had sent that is in no weights: sent after the snapshots that were gone back to,
    or under way when the server died."""
    unknown: int = 0
    """Times that a worker died when this server could not be asked what it had sent: so often
    ``lost`` may be too small by what that worker sent since its last report."""

    def as_dict(self) -> dict[str, Any]:
        # Not asdict, which gets Counters wrong.
        return {
            **vars(self),
            "dropped": dict(self.dropped),
            "staleness": _named(self.staleness),
        }


@dataclass(frozen=True)
class ShardAccount:
    """What one shard of a replay memory did, over all its lives, as far as it was heard of."""

    number: int
    processor_s: float
    env_steps: int
    """That it received."""
    samples: int
    """That it gave."""
    bytes_in: int
    """Letters and priorities."""
    bytes_out: int
    restarts: int
    lost: int
    """Transitions that could be sampled when it was lost."""


@dataclass(frozen=True)
class Staleness:
    """A histogram of ages, in updates, and what it comes to."""

    counts: Mapping[int, int]

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    @property
    def mean(self) -> float | None:
        return _ratio(sum(age * count for age, count in self.counts.items()), self.total)

    @property
    def p95(self) -> int | None:
        return self.percentile(95)

    def percentile(self, percent: int) -> int | None:
        """The smallest age that so many of a hundred do not exceed."""
        so_far = 0
        for age, count in sorted(self.counts.items()):
            so_far += count
            if count and 100 * so_far >= percent * self.total:
                return age
        return None

    @property
    def largest(self) -> int | None:
        return max((age for age, count in self.counts.items() if count), default=None)

    def as_dict(self) -> dict[str, Any]:
        return {
            "counts": _named(self.counts),
            "mean": self.mean,
            "p95": self.p95,
            "max": self.largest,
        }


@dataclass(frozen=True)
class FleetAccount:
    """All processes of a run."""

    update: str | None
    """How gradients became weights: sync, async …; None where one learner has them."""
    wall_s: float
    driver_processor_s: float
    workers: Sequence[WorkerAccount]
    servers: Sequence[ServerAccount] = field(default=())
    uncompressed_bytes_sent: int | None = None
    """What the workers would have sent without compression; None where there was none."""
    uncompressed_bytes_received: int | None = None
    shards: Sequence[ShardAccount] = field(default=())
    learner: Mapping[str, float] | None = None
    """Shares of its time, as those of a worker; None where every worker learns."""
    member: str = "worker"
    """What a worker is called here."""
    aged: str = "gradient"
    """What is made with weights that may be old."""

    @property
    def name(self) -> str:
        return self.update or f"{self.member}s"

    @property
    def rows(self) -> list[tuple[str, float | None, Mapping[str, float]]]:
        """Everybody whose time is known: name, env steps per second, shares."""
        rows: list[tuple[str, float | None, Mapping[str, float]]] = [
            (f"{self.member} {worker.number}", worker.env_steps_per_s, worker.shares)
            for worker in self.workers
        ]
        return rows if self.learner is None else [*rows, ("learner", None, self.learner)]

    @property
    def env_steps(self) -> int:
        return sum(worker.env_steps for worker in self.workers)

    @property
    def env_steps_per_s(self) -> float | None:
        """Of all workers, while they worked: neither starting processes nor evaluating counts."""
        return _ratio(self.env_steps, max((w.wall_s for w in self.workers), default=0.0))

    @property
    def processor_s(self) -> float:
        """Of all processes."""
        total_s = self.driver_processor_s + sum(worker.processor_s for worker in self.workers)
        total_s += sum(server.processor_s for server in self.servers)
        return total_s + sum(shard.processor_s for shard in self.shards)

    @property
    def processors_busy(self) -> float | None:
        """How many at a time, in the mean."""
        return _ratio(self.processor_s, self.wall_s)

    @property
    def shares(self) -> dict[str, float | None]:
        """Of the workers' time, each worker counting alike."""
        present = [worker.shares for worker in self.workers if worker.wall_s > 0]
        return {
            kind: statistics.fmean(shares[kind] for shares in present) if present else None
            for kind in (*KINDS, OTHER)
        }

    @property
    def straggler_ratio(self) -> float | None:
        """How many times as long as the median the slowest worker takes for a step of its own."""
        return _slowness(worker.own_pace for worker in self.workers)

    @property
    def rate_ratio(self) -> float | None:
        """The same by env steps per second, waits included: what is left of it at a barrier."""
        return _slowness(worker.env_steps_per_s for worker in self.workers)

    @property
    def straggler(self) -> int | None:
        """The slowest worker, if it is ``STRAGGLES`` times as slow as the median."""
        paces = {w.number: w.own_pace for w in self.workers if w.own_pace is not None}
        if len(paces) < 2:
            return None
        slowest = min(paces, key=lambda number: paces[number])
        return slowest if statistics.median(paces.values()) > STRAGGLES * paces[slowest] else None

    @cached_property
    def staleness(self) -> Staleness:
        """Of all servers together, a gradient counting once for each; or of all actors' blocks."""
        counts: Counter[int] = Counter()
        for found in [each.staleness for each in self.servers] + [
            w.staleness for w in self.workers
        ]:
            counts.update(found)
        return Staleness(counts)

    @property
    def bytes_sent(self) -> int:
        """By workers, to servers or shards."""
        return sum(worker.bytes_sent for worker in self.workers)

    @property
    def bytes_received(self) -> int:
        return sum(worker.bytes_received for worker in self.workers)

    @property
    def messages(self) -> int:
        return sum(worker.messages for worker in self.workers)

    @property
    def dropped(self) -> dict[str, int]:
        """Gradients that no server applied, by reason."""
        total: Counter[str] = Counter()
        for server in self.servers:
            total.update(server.dropped)
        return dict(total)

    @property
    def saved_sent(self) -> float | None:
        """Share of what would have been sent that compression saved."""
        return _saved(self.bytes_sent, self.uncompressed_bytes_sent)

    @property
    def saved_received(self) -> float | None:
        return _saved(self.bytes_received, self.uncompressed_bytes_received)

    @cached_property
    def message_cost(self) -> MessageCost | None:
        return fit_cost([call for worker in self.workers for call in worker.calls])

    def speed_up(self, baseline_env_steps_per_s: float | None) -> float | None:
        """Over one worker that makes so many env steps per second."""
        rate = self.env_steps_per_s
        if baseline_env_steps_per_s is None or rate is None:
            return None
        return _ratio(rate, baseline_env_steps_per_s)

    def efficiency(self, baseline_env_steps_per_s: float | None) -> float | None:
        """Speed-up as a share of the ideal, which is the number of workers."""
        speed_up = self.speed_up(baseline_env_steps_per_s)
        return None if speed_up is None else speed_up / len(self.workers)

    def as_dict(self, baseline_env_steps_per_s: float | None = None) -> dict[str, Any]:
        """Everything, as JSON takes it; null where it does not apply."""
        return {
            "update": self.update,
            "wall_s": self.wall_s,
            "env_steps": self.env_steps,
            "env_steps_per_s": self.env_steps_per_s,
            "processor_s": self.processor_s,
            "driver_processor_s": self.driver_processor_s,
            "shares": self.shares,
            "straggler": {
                "worker": self.straggler,
                "ratio": self.straggler_ratio,
                "rate_ratio": self.rate_ratio,
            },
            "staleness": self.staleness.as_dict(),
            "traffic": {
                "bytes_sent": self.bytes_sent,
                "bytes_received": self.bytes_received,
                "messages": self.messages,
                "uncompressed_bytes_sent": self.uncompressed_bytes_sent,
                "uncompressed_bytes_received": self.uncompressed_bytes_received,
                "saved_sent": self.saved_sent,
                "saved_received": self.saved_received,
            },
            "message_cost": None if self.message_cost is None else asdict(self.message_cost),
            "speed_up": self.speed_up(baseline_env_steps_per_s),
            "efficiency": self.efficiency(baseline_env_steps_per_s),
            "learner": None if self.learner is None else {"shares": dict(self.learner)},
            "workers": [worker.as_dict() for worker in self.workers],
            "servers": [server.as_dict() for server in self.servers],
            "shards": [asdict(shard) for shard in self.shards],
        }


class Processes(Protocol):
    """Who can say what many processes did: the fleet of a parameter server, or the actors'."""

    def account(self) -> FleetAccount | None:
        """None before anybody has reported."""
        ...

    def env_steps_per_s(self) -> float | None:
        """From when everybody had reported once until the newest report."""
        ...

    def lanes(self) -> Iterable[tuple[str, list[SpanRecord]]]:
        """What everybody did when, on this process's clock, where a trace is wanted."""
        ...


def shares_of(seconds: Mapping[str, float], wall_s: float) -> dict[str, float]:
    """Of this wall time, by kind and ``OTHER``; ``seconds`` are by stage."""
    shares = dict.fromkeys((*KINDS, OTHER), 0.0)
    if wall_s > 0:
        for stage, spent_s in seconds.items():
            shares[KIND_OF[stage]] += spent_s / wall_s
        shares[OTHER] = max(0.0, 1.0 - sum(shares.values()))
    return shares


def _ratio(part: float, whole: float) -> float | None:
    return finite(part / whole) if whole > 0 else None


def _slowness(rates: Iterable[float | None]) -> float | None:
    """Median over slowest; None for less than two workers, or one that never moved."""
    known = [rate for rate in rates if rate is not None]
    return _ratio(statistics.median(known), min(known)) if len(known) > 1 else None


def _saved(actual: int, uncompressed: int | None) -> float | None:
    return None if not uncompressed else 1.0 - actual / uncompressed


def _named(counts: Mapping[int, int]) -> dict[str, int]:
    """JSON's keys are text."""
    return {str(age): count for age, count in sorted(counts.items())}
