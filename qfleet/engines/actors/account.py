"""What actors and replay shards did and cost. In: reports and answers; out: one account of all.

An actor computes while it collects a block and finds the errors of its transitions. It
communicates while it takes over weights and packs its letter. From then to its next order it
waits: its block lies there until the learner has made the updates that it owes. The way of report
and order, and Ray's part in carrying the letter, are in that wait.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from qfleet.engines.actors.messages import Report, Tally
from qfleet.telemetry.fleet import FleetAccount, ShardAccount, WorkerAccount, shares_of
from qfleet.telemetry.timers import Timers
from qfleet.telemetry.trace import Lane, SpanRecord


@dataclass
class _Life:
    """What an actor did when, by its own clock."""

    spans: list[SpanRecord] = field(default_factory=list)
    offset_s: float = float("-inf")
    """Makes times of this process of its own."""


@dataclass
class _Actor:
    """All that had one number."""

    host: str = ""
    env_steps: int = 0
    sums: Counter[str] = field(default_factory=Counter)
    """Of its reports' figures, by name."""
    seconds: Counter[str] = field(default_factory=Counter)
    staleness: Counter[int] = field(default_factory=Counter)
    restarts: int = 0
    lives: dict[int, _Life] = field(default_factory=dict)

    def account(self, number: int) -> WorkerAccount:
        return WorkerAccount(
            number=number,
            host=self.host,
            env_steps=self.env_steps,
            updates=None,
            wall_s=self.sums["wall_s"],
            processor_s=self.sums["processor_s"],
            seconds=dict(self.seconds),
            bytes_sent=self.sums["letter_bytes"],
            bytes_received=self.sums["weight_bytes"],
            messages=self.sums["messages"],
            restarts=self.restarts,
            staleness=dict(self.staleness),
        )


SUMMED = ("wall_s", "processor_s", "letter_bytes", "plain_bytes", "weight_bytes", "messages")
"""Figures of a report that are added up."""


@dataclass
class _Shard:
    earlier: list[Tally] = field(default_factory=list)
    """The last ones of those that had this number before."""
    tally: Tally = field(default_factory=Tally)
    restarts: int = 0
    lost: int = 0

    def account(self, number: int) -> ShardAccount:
        tallies = [*self.earlier, self.tally]
        totals = {name: sum(getattr(t, name) for t in tallies) for name in Tally._fields}
        return ShardAccount(number, **totals, restarts=self.restarts, lost=self.lost)


@dataclass
class Account:
    """Bytes are those of arrays as they passed; what wraps them is not counted."""

    workers: int
    servers: int
    timers: Timers = field(default_factory=Timers)
    """The learner's."""
    lane: Lane | None = None
    """The learner's, where a trace is wanted."""
    began_s: float = field(default_factory=time.monotonic)
    bytes_sent: int = 0
    """By the learner: weights, once for all actors, and priorities."""
    bytes_received: int = 0
    """By the learner: samples."""
    messages: int = 0
    """Calls of actors and shards, and weights that were stored."""
    broadcasts: int = 0
    _processor_s: float = field(default_factory=time.process_time)
    _learner_before: tuple[float, dict[str, float]] | None = None
    """Time and the learner's seconds by stage, when the first block came."""
    _learner_after: tuple[float, dict[str, float]] | None = None
    """The same of the newest block."""
    _steady: tuple[float, int] | None = None
    """When every actor had sent a block: time, and env steps by then."""
    _newest_s: float = 0.0

    def __post_init__(self) -> None:
        self._actors = {number: _Actor() for number in range(self.workers)}
        self._shards = {number: _Shard() for number in range(self.servers)}

    # --- what happens ---------------------------------------------------------------------------

    def took(self, number: int, report: Report, env_steps: int, age: int, now_s: float) -> None:
        """A block of so many env steps has come, of weights that are so many updates old."""
        actor = self._actors[number]
        actor.host = report.host
        actor.env_steps += env_steps
        actor.sums.update({name: getattr(report, name) for name in SUMMED})
        actor.seconds.update(report.seconds)
        actor.staleness[age] += 1
        self._newest_s = now_s
        self._learner_after = (now_s, dict(self.timers.seconds))
        self._learner_before = self._learner_before or self._learner_after
        if self._steady is None and all(a.env_steps for a in self._actors.values()):
            self._steady = (now_s, self._env_steps())

    def saw(self, number: int, life: int, report: Report, ordered_s: float) -> None:
        """What it did when; ``ordered_s``: when it was told to, by ``perf_counter`` here.

        It was waiting for that, so it began as soon as the order was there. The quickest order says
        best how its clock stands to ours.
        """
        if report.spans:
            seen = self._actors[number].lives.setdefault(life, _Life())
            seen.spans += report.spans
            seen.offset_s = max(seen.offset_s, ordered_s - report.began_s)

    def replaced(self, number: int) -> None:
        self._actors[number].restarts += 1

    def heard(self, shard: int, tally: Tally) -> None:
        """What this shard has done so far."""
        self._shards[shard].tally = tally

    def lost(self, number: int, transitions: int) -> None:
        """This shard was lost with so many; an empty one has its number now."""
        shard = self._shards[number]
        shard.earlier.append(shard.tally)
        shard.tally = Tally()
        shard.restarts += 1
        shard.lost += transitions

    def sent(self, size_bytes: int) -> None:
        self.bytes_sent += size_bytes

    def received(self, size_bytes: int) -> None:
        self.bytes_received += size_bytes

    # --- what it comes to -----------------------------------------------------------------------

    def env_steps_per_s(self) -> float | None:
        """From when every actor had sent a block to the newest one; starting them is not in it."""
        if self._steady is None or self._newest_s <= self._steady[0]:
            return None
        since_s, before = self._steady
        return (self._env_steps() - before) / (self._newest_s - since_s)

    def _env_steps(self) -> int:
        return sum(actor.env_steps for actor in self._actors.values())

    def account(self) -> FleetAccount | None:
        """Of everybody; None before a block has come."""
        reported = {number: actor for number, actor in self._actors.items() if actor.env_steps}
        if not reported:
            return None
        return FleetAccount(
            update=None,
            wall_s=self._newest_s - self.began_s,
            driver_processor_s=time.process_time() - self._processor_s,
            workers=tuple(actor.account(number) for number, actor in reported.items()),
            uncompressed_bytes_sent=sum(a.sums["plain_bytes"] for a in reported.values()),
            shards=tuple(shard.account(number) for number, shard in self._shards.items()),
            learner=self._learner_shares(),
            member="actor",
            aged="block",
        )

    def _learner_shares(self) -> Mapping[str, float] | None:
        """From the first block to the newest: before, it waits for actors that are starting."""
        if self._learner_before is None or self._learner_after is None:
            return None
        (since_s, before), (until_s, after) = self._learner_before, self._learner_after
        if until_s <= since_s:
            return None
        seconds = {stage: after[stage] - before[stage] for stage in after}
        return shares_of(seconds, until_s - since_s)

    def lanes(self) -> Iterator[tuple[str, list[SpanRecord]]]:
        """What the learner and every actor did when, where a trace is wanted."""
        if self.lane is None:
            return
        yield "learner", self.lane.spans()
        for number, actor in self._actors.items():
            yield (
                f"actor {number}",
                [
                    (stage, start_s + life.offset_s, end_s + life.offset_s)
                    for life in actor.lives.values()
                    for stage, start_s, end_s in life.spans
                ],
            )

    def communication(self) -> dict[str, int | None]:
        return {
            "bytes_sent": self.bytes_sent,
            "bytes_received": self.bytes_received,
            "messages": self.messages,
        }

    def counts(self) -> dict[str, Any]:
        """What is only known of actors, for ``fleet`` in ``result.json``."""
        actors, shards = self._actors.values(), self._shards.values()
        seconds = sum((actor.seconds for actor in actors), Counter[str]())
        return {
            "env_steps_each": [actor.env_steps for actor in actors],
            "actors_replaced": sum(actor.restarts for actor in actors),
            "shards_replaced": sum(shard.restarts for shard in shards),
            "transitions_lost": sum(shard.lost for shard in shards),
            "letter_bytes": sum(actor.sums["letter_bytes"] for actor in actors),
            "broadcasts": self.broadcasts,
            "actor_seconds": dict(seconds),
        }
