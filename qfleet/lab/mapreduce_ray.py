"""Parallel gradient descent on a Ray cluster: ``descend_on`` returns a ``Descent``.

The server is this process. In ``sync`` it waits for every worker's gradient before it updates; in
``async`` it applies each gradient on arrival, as the gradient of that worker's share alone, and
sends the new weights back at once. Both compute the same number of gradients: ``steps`` per worker
on average.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

from qfleet.core.errors import DivergedError
from qfleet.engines.cluster.ray_cluster import Cluster
from qfleet.lab.mapreduce import (
    Floats,
    Problem,
    Slowness,
    check_descent,
    gradient,
    map_and_reduce,
    map_samples,
    shares,
)
from qfleet.telemetry.timers import COMMUNICATING, COMPUTING, KINDS, WAITING

Mode = Literal["sync", "async"]
_PINGS = 8
"""Pings to compare clocks; the one with the shortest round trip is used."""


class Answer(NamedTuple):
    """A worker's reply; times are on the worker's own clock."""

    vectors: Floats
    started_s: float
    ended_s: float
    processor_s: float


class Worker:
    """A process on the cluster that computes gradients on its share of the data."""

    def __init__(
        self, features: Floats, targets: Floats, local_reduction: bool, slowness: Slowness
    ) -> None:
        self._features, self._targets = features, targets
        self._map = map_and_reduce if local_reduction else map_samples
        self._slowness = slowness

    def clock_s(self) -> float:
        return time.monotonic()

    def answer(self, weights: Floats) -> Answer:
        started_s, processor_s = time.monotonic(), time.process_time()
        vectors = self._map(self._features, self._targets, weights)
        processor_s = time.process_time() - processor_s
        time.sleep(self._slowness.pause_s(time.monotonic() - started_s))
        return Answer(vectors, started_s, time.monotonic(), processor_s)


class Span(NamedTuple):
    """A period of one kind of activity of a worker, in seconds since the first broadcast."""

    kind: str
    start_s: float
    end_s: float


@dataclass
class Traffic:
    """Arrays sent and received by the server; serialisation overhead is not counted."""

    bytes_sent: int = 0
    bytes_received: int = 0
    messages_sent: int = 0
    messages_received: int = 0
    vectors_received: int = 0


@dataclass
class Descent:
    """The record of one descent: weights, times, traffic and staleness."""

    workers: int
    mode: Mode
    local_reduction: bool
    weights: list[Floats] = field(default_factory=list)
    """Weights at the start and after every round; with ``async``, after every m-th update."""
    times_s: list[float] = field(default_factory=list)
    """Time of each entry of ``weights``."""
    spans: list[list[Span]] = field(default_factory=list)
    """Spans of each worker."""
    traffic: Traffic = field(default_factory=Traffic)
    staleness: Counter[int] = field(default_factory=Counter)
    """Age in updates → number of gradients computed with weights of that age."""
    processor_s: float = 0.0
    """CPU time of gradients and updates in all processes, without that of Ray itself."""

    @property
    def wall_s(self) -> float:
        return self.times_s[-1]

    def spent_s(self, worker: int, kind: str) -> float:
        return sum(span.end_s - span.start_s for span in self.spans[worker] if span.kind == kind)

    def time_share(self, worker: int) -> dict[str, float]:
        return {kind: self.spent_s(worker, kind) / self.wall_s for kind in KINDS}

    @property
    def straggler_ratio(self) -> float:
        """Computing time of the slowest worker over that of the median one."""
        busy_s = [self.spent_s(worker, COMPUTING) for worker in range(self.workers)]
        return max(busy_s) / float(np.median(busy_s))


def descend_on(
    cluster: Cluster,
    problem: Problem,
    workers: int,
    steps: int,
    rate: float,
    mode: Mode,
    *,
    local_reduction: bool = True,
    straggler: Slowness | None = None,
) -> Descent:
    """Descend from zero weights. The last worker is the straggler.

    Time starts at the first broadcast.
    """
    check_descent(steps, rate)
    server = _Server(cluster, problem, rate, Descent(workers, mode, local_reduction), straggler)
    try:
        server.begin()
        if mode == "sync":
            server.run_sync(steps)
        else:
            server.run_async(steps)
        return server.end()
    finally:
        for worker in server.workers:
            cluster.stop(worker)


class _Server:
    """The server: holds the weights and records times and traffic."""

    def __init__(
        self,
        cluster: Cluster,
        problem: Problem,
        rate: float,
        descent: Descent,
        straggler: Slowness | None,
    ) -> None:
        self._cluster, self._problem, self._rate, self._descent = cluster, problem, rate, descent
        self._shares = shares(problem.samples, descent.workers)
        self._weights: Floats = np.zeros(problem.dimensions)
        self.workers = []
        for k, share in enumerate(self._shares):
            slowness = straggler if straggler and k == descent.workers - 1 else Slowness()
            data = problem.features[share], problem.targets[share]
            self.workers.append(cluster.spawn(Worker, *data, descent.local_reduction, slowness))

    def begin(self) -> None:
        """Wait until all workers have started, compare clocks, and start the time measurement."""
        replies = [worker.clock_s.remote() for worker in self.workers]
        for k, reply in enumerate(replies):
            self._cluster.get(reply, self._name(k))
        self._ahead_s = [self._clock_difference(k) for k in range(len(self.workers))]
        self._processor_s = time.process_time()
        self._begun_s = time.monotonic()
        # When each worker became idle.
        self._free_s = [0.0] * len(self.workers)
        self._descent.spans = [[] for _ in self.workers]
        self._note_weights()

    def run_sync(self, steps: int) -> None:
        for _ in range(steps):
            sent_s = self._now()
            broadcast = self._cluster.put(self._weights)
            pending = {self._send(k, broadcast, sent_s): k for k in range(len(self.workers))}
            parts: list[Floats] = [self._weights] * len(self.workers)
            while pending:
                reference = self._first(pending)
                k = pending.pop(reference)
                parts[k] = self._receive(reference, k, sent_s)
                self._descent.staleness[0] += 1
            self._update(parts, self._problem.samples)
            self._note_weights()

    def run_async(self, steps: int) -> None:
        count = len(self.workers)
        pending: dict[Any, tuple[int, float, int]] = {}

        def send(k: int, version: int) -> None:
            sent_s = self._now()
            pending[self._send(k, self._weights, sent_s)] = (k, sent_s, version)

        for k in range(count):
            send(k, 0)
        for version in range(steps * count):
            reference = self._first(pending)
            k, sent_s, seen = pending.pop(reference)
            part = self._receive(reference, k, sent_s)
            self._descent.staleness[version - seen] += 1
            share = self._shares[k]
            self._update([part], share.stop - share.start)
            if (version + 1) % count == 0:
                self._note_weights()
            # Send no more once the gradients in flight suffice.
            if version + 1 + len(pending) < steps * count:
                send(k, version + 1)

    def end(self) -> Descent:
        self._descent.processor_s += time.process_time() - self._processor_s
        for k, free_s in enumerate(self._free_s):
            self._add(k, WAITING, free_s, self._descent.wall_s)
        return self._descent

    def _send(self, k: int, weights: Any, sent_s: float) -> Any:
        """Send ``weights``, an array or a reference to one in the object store, to worker ``k``."""
        self._add(k, WAITING, self._free_s[k], sent_s)
        self._descent.traffic.messages_sent += 1
        self._descent.traffic.bytes_sent += self._weights.nbytes
        return self.workers[k].answer.remote(weights)

    def _first(self, pending: dict[Any, Any]) -> Any:
        return self._cluster.first(list(pending), f"{len(pending)} of {len(self.workers)} workers")

    def _receive(self, reference: Any, k: int, sent_s: float) -> Floats:
        answer: Answer = self._cluster.get(reference, self._name(k))
        received_s = self._now()
        offset_s = self._ahead_s[k] + self._begun_s
        # Clocks agree only to a fraction of a millisecond, so times are clipped to the known order.
        started_s = min(max(answer.started_s - offset_s, sent_s), received_s)
        ended_s = min(max(answer.ended_s - offset_s, started_s), received_s)
        self._add(k, COMMUNICATING, sent_s, started_s)
        self._add(k, COMPUTING, started_s, ended_s)
        self._add(k, COMMUNICATING, ended_s, received_s)
        self._free_s[k] = received_s
        self._descent.processor_s += answer.processor_s
        traffic = self._descent.traffic
        traffic.messages_received += 1
        traffic.bytes_received += answer.vectors.nbytes
        traffic.vectors_received += len(answer.vectors)
        return answer.vectors

    def _update(self, parts: list[Floats], samples: int) -> None:
        # Overflow is reported below, as one error.
        with np.errstate(over="ignore", invalid="ignore"):
            self._weights = self._weights - self._rate * gradient(parts, samples)
        if not np.isfinite(self._weights).all():
            raise DivergedError(
                f"the weights are no longer finite: learning_rate {self._rate:g} is too large; "
                f"use less than {self._problem.largest_rate:.3g} if the workers wait for each "
                "other, and less if they do not"
            )

    def _note_weights(self) -> None:
        self._descent.weights.append(self._weights)
        self._descent.times_s.append(self._now() if self._descent.times_s else 0.0)

    def _add(self, k: int, kind: str, start_s: float, end_s: float) -> None:
        if end_s > start_s:
            self._descent.spans[k].append(Span(kind, start_s, end_s))

    def _now(self) -> float:
        return time.monotonic() - self._begun_s

    def _clock_difference(self, k: int) -> float:
        """Return by how many seconds a worker's clock, possibly on another machine, is ahead."""
        trips = []
        for _ in range(_PINGS):
            asked_s = time.monotonic()
            theirs_s = self._cluster.get(self.workers[k].clock_s.remote(), self._name(k))
            answered_s = time.monotonic()
            trips.append((answered_s - asked_s, theirs_s - (asked_s + answered_s) / 2))
        return float(min(trips)[1])

    def _name(self, k: int) -> str:
        return f"worker {k} of {len(self.workers)}"
