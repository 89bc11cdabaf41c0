"""Account of actors and replay shards: adds up their reports and returns one ``FleetAccount``.

An actor computes while it collects a block and computes the errors of its transitions. It
communicates while it copies weights and encodes its block message. From then until its next order
it waits, because its block is taken only when the learner has made the updates that are due. The
transfer of report and order, and of the block message by Ray, is part of that wait.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from qfleet.engines.actors.messages import Report, Tally
from qfleet.engines.cluster.processes_hook import SteadyRate
from qfleet.telemetry.fleet import (
    TRAFFIC,
    FleetAccount,
    ShardAccount,
    ShareRow,
    WorkerAccount,
    shares_of,
)
from qfleet.telemetry.timers import Timers
from qfleet.telemetry.trace import Lane, SpanRecord


@dataclass
class Account:
    """Sums over the run. Bytes are those of arrays as they were sent, without Ray's headers."""

    workers: int
    servers: int
    timers: Timers = field(default_factory=Timers)
    """The learner's timers."""
    lane: Lane | None = None
    """The learner's lane, if a trace is recorded."""
    began_s: float = field(default_factory=time.monotonic)
    bytes_sent: int = 0
    """Sent by the learner: weights, once for all actors, and priorities."""
    bytes_received: int = 0
    """Received by the learner: samples."""
    messages: int = 0
    """Calls of actors and shards, and weights that were stored."""
    broadcasts: int = 0
    _processor_s: float = field(default_factory=time.process_time)
    _uncompressed_bytes: int = 0
    _learner: tuple[tuple[float, dict[str, float]], ...] = ()
    """At the first and at the newest block: time, and the learner's seconds by stage."""
    _rate: SteadyRate = field(default_factory=SteadyRate)

    def __post_init__(self) -> None:
        self._actors = [WorkerAccount(number) for number in range(self.workers)]
        # One per life of the shard; the last is that of the shard at work.
        self._tallies = [[Tally()] for _ in range(self.servers)]
        self._lost = [0] * self.servers
        # By actor and life, on the actor's clock; plus its offset, it is this process's clock.
        self._spans: dict[tuple[int, int], list[SpanRecord]] = {}
        self._offsets_s: dict[tuple[int, int], float] = {}

    # --- events ---------------------------------------------------------------------------------

    def record(self, number: int, report: Report, env_steps: int, age: int, now_s: float) -> None:
        """Add a block of ``env_steps`` that was collected with weights ``age`` updates old."""
        actor = self._actors[number]
        actor.host = report.host
        actor.env_steps += env_steps
        actor.wall_s += report.wall_s
        actor.processor_s += report.processor_s
        actor.bytes_sent += report.block_bytes
        actor.bytes_received += report.weight_bytes
        actor.messages += report.messages
        actor.staleness[age] += 1
        for stage, spent_s in report.seconds.items():
            actor.seconds[stage] += spent_s
        self._uncompressed_bytes += report.plain_bytes
        self._learner = (*self._learner[:1], (now_s, dict(self.timers.seconds)))
        steps = [each.env_steps for each in self._actors]
        self._rate.record(now_s, sum(steps), all(steps))

    def add_spans(self, number: int, life: int, report: Report, ordered_s: float) -> None:
        """Add the spans of a block; ``ordered_s``: when it was ordered, by ``perf_counter`` here.

        The actor was waiting, so it began when the order arrived. The order that arrived fastest
        determines the offset between its clock and ours best.
        """
        if report.spans:
            self._spans.setdefault((number, life), []).extend(report.spans)
            known_s = self._offsets_s.get((number, life), float("-inf"))
            self._offsets_s[number, life] = max(known_s, ordered_s - report.began_s)

    def count_restart(self, number: int) -> None:
        self._actors[number].restarts += 1

    def set_tally(self, shard: int, tally: Tally) -> None:
        """Set what this shard has done since it was started."""
        self._tallies[shard][-1] = tally

    def add_loss(self, number: int, transitions: int) -> None:
        """Count a shard that died with ``transitions`` in it; an empty one has its number now."""
        self._tallies[number].append(Tally())
        self._lost[number] += transitions

    # --- results --------------------------------------------------------------------------------

    def env_steps_per_s(self) -> float | None:
        """Return the rate from when every actor had sent a block to the newest block."""
        return self._rate.env_steps_per_s()

    def rows(self) -> list[ShareRow]:
        account = self.account()  # without asking: actors report with every block
        return [] if account is None else account.rows

    def account(self) -> FleetAccount | None:
        """Return the account of all processes; None before the first block."""
        workers = tuple(actor for actor in self._actors if actor.env_steps)
        if not workers:
            return None
        return FleetAccount(
            update=None,
            wall_s=self._rate.newest[0] - self.began_s,
            driver_processor_s=time.process_time() - self._processor_s,
            workers=workers,
            uncompressed_bytes_sent=self._uncompressed_bytes,
            shards=tuple(self._shard(number) for number in range(self.servers)),
            learner=self._learner_shares(),
        )

    def _shard(self, number: int) -> ShardAccount:
        tallies = self._tallies[number]
        totals = {name: sum(getattr(t, name) for t in tallies) for name in Tally._fields}
        return ShardAccount(number, **totals, restarts=len(tallies) - 1, lost=self._lost[number])

    def _learner_shares(self) -> Mapping[str, float] | None:
        """Return shares from the first block to the newest: earlier, actors were starting."""
        (since_s, before), (until_s, after) = self._learner[0], self._learner[-1]
        if until_s <= since_s:
            return None
        seconds = {stage: after[stage] - before[stage] for stage in after}
        return shares_of(seconds, until_s - since_s)

    def lanes(self) -> Iterator[tuple[str, list[SpanRecord]]]:
        """Return the spans of the learner and of every actor, if a trace is recorded."""
        if self.lane is None:
            return
        yield "learner", self.lane.spans()
        spans: list[list[SpanRecord]] = [[] for _ in self._actors]
        for (number, life), found in self._spans.items():
            offset_s = self._offsets_s[number, life]
            spans[number] += [(stage, a + offset_s, b + offset_s) for stage, a, b in found]
        yield from ((f"actor {number}", found) for number, found in enumerate(spans))

    def communication(self) -> dict[str, int | None]:
        return {name: getattr(self, name) for name in TRAFFIC}

    def counts(self) -> dict[str, Any]:
        """Return what only actors have, for ``fleet`` in ``result.json``."""
        seconds = sum((Counter(actor.seconds) for actor in self._actors), Counter[str]())
        return {
            "env_steps_each": [actor.env_steps for actor in self._actors],
            "actors_replaced": sum(actor.restarts for actor in self._actors),
            "shards_replaced": sum(len(tallies) - 1 for tallies in self._tallies),
            "transitions_lost": sum(self._lost),
            "letter_bytes": sum(actor.bytes_sent for actor in self._actors),
            "broadcasts": self.broadcasts,
            "actor_seconds": dict(seconds),
        }
