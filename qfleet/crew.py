"""Members of a cluster that work in slices. In: calls under way; out: reports, and who was lost.

Whoever supervises a run calls a member's ``work``, which returns within about a second, and calls
again when it has reported. So a member never runs on its own: it cannot outlive the run, it stops
by not being called, and its death is the failure of exactly one call. A member that does not
report in time is as good as dead.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from qfleet.cluster import Cluster
from qfleet.errors import MemberLost


class Came(NamedTuple):
    """What became of a call."""

    number: int
    report: Any
    """None where the member was lost."""
    loss: str = ""
    """One line about it."""


class _Call(NamedTuple):
    reference: Any
    since_s: float


class Crew:
    """Numbered members of one kind, each with one call under way at most."""

    def __init__(
        self,
        cluster: Cluster,
        kind: str,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``kind`` is what messages call a member: ``worker``, ``actor``."""
        self._cluster, self._kind, self._timeout_s = cluster, kind, timeout_s
        self._clock = clock
        self._calls: dict[int, _Call] = {}

    @property
    def busy(self) -> frozenset[int]:
        """Members that were called and have not reported yet."""
        return frozenset(self._calls)

    def called(self, number: int, reference: Any) -> None:
        """This member's ``work`` is under way; ``reference`` stands for its report."""
        assert number not in self._calls, f"{self._kind} {number} works already"
        self._calls[number] = _Call(reference, self._clock())

    def drop(self, number: int) -> None:
        """Expect nothing more from this member."""
        self._calls.pop(number, None)

    def come(self, wait_s: float) -> list[Came]:
        """Who has reported or was lost; waits so long for the first of them."""
        by_reference = {call.reference: number for number, call in self._calls.items()}
        came = []
        for reference in self._cluster.ready(list(by_reference), wait_s):
            number = by_reference[reference]
            del self._calls[number]
            try:
                report = self._cluster.get(reference, f"{self._kind} {number}")
            except MemberLost as error:
                came.append(Came(number, None, str(error)))
            else:
                came.append(Came(number, report))
        now_s = self._clock()
        for number, call in list(self._calls.items()):
            if now_s - call.since_s > self._timeout_s:
                del self._calls[number]
                silence = f"{self._kind} {number} was not heard of for {self._timeout_s:g} s"
                came.append(Came(number, None, silence))
        return came

    def end(self, wait_s: float) -> list[Came]:
        """Wait for all that are under way, so long at most; the rest is not expected any more."""
        until_s = self._clock() + wait_s
        came = []
        while self._calls and self._clock() < until_s:
            came += self.come(max(0.0, until_s - self._clock()))
        self._calls.clear()
        return came
