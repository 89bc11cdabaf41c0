"""Workers of different speed around one shard, in simulated time.

In: seconds a gradient takes each worker. Out: who pushed how often, and waited how long. A worker
pulls, computes for its time, pushes, and goes on when the shard lets it.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from qfleet.engines.parameter_server.shard import Shard
from support.server_cases import Client, noise

TICK = -1
"""The event, among workers' numbers, that looks at the clock."""


@dataclass(frozen=True)
class Bursts:
    """Workers collect, and then push so often."""

    length: int
    collect_s: float
    begun: list[int]
    """How many pushes of its first burst each worker leaves out."""


class Cluster:
    def __init__(
        self,
        shard: Shard,
        durations_s: list[float],
        rate: float = 0.01,
        tick_s: float = 0.0,
        bursts: Bursts | None = None,
    ) -> None:
        """``tick_s``: how often somebody looks at the clock; 0: nobody does."""
        self._shard, self._durations_s, self._rate = shard, durations_s, rate
        self._tick_s, self._bursts = tick_s, bursts
        self._clients = [Client(shard, worker) for worker in range(len(durations_s))]
        self.pushes = [0 for _ in durations_s]
        self.waited_s = [0.0 for _ in durations_s]
        self.largest_lead = 0
        """By how many pushes a worker that went on was ahead of the slowest."""

    def run(self, until_s: float) -> None:
        events = [(self._takes_s(worker), worker) for worker in range(len(self._durations_s))]
        if self._tick_s:
            events.append((self._tick_s, TICK))
        heapq.heapify(events)
        parked: dict[int, float] = {}
        while events[0][0] <= until_s:
            now_s, worker = heapq.heappop(events)
            if worker == TICK:
                self._shard.tick(now_s)
                heapq.heappush(events, (now_s + self._tick_s, TICK))
            else:
                self._push(worker, now_s)
                parked[worker] = now_s
            for free in [w for w in sorted(parked) if not self._shard.waits(w)]:
                self.waited_s[free] += now_s - parked.pop(free)
                self._clients[free].pull()
                self.largest_lead = max(self.largest_lead, self.pushes[free] - min(self.pushes))
                heapq.heappush(events, (now_s + self._takes_s(free), free))

    def _takes_s(self, worker: int) -> float:
        """Until its next push."""
        takes_s, bursts = self._durations_s[worker], self._bursts
        if bursts and (self.pushes[worker] + bursts.begun[worker]) % bursts.length == 0:
            takes_s += bursts.collect_s
        return takes_s

    def _push(self, worker: int, now_s: float) -> None:
        client = self._clients[worker]
        gradient = client.weights + noise(client.weights.numel(), worker, self.pushes[worker])
        client.push(gradient, self._rate, now_s=now_s)
        self.pushes[worker] += 1
