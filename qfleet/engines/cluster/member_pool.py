"""Members of a cluster that work in slices. In: calls under way; out: reports, and who was lost.

Whoever supervises a run calls a member's ``work``, which returns within about a second, and calls
again when it has reported. So a member never runs on its own: it cannot outlive the run, it stops
by not being called, and its death is the failure of exactly one call. A member that takes long may
be waiting for others: it is asked whether it is there, and is as good as dead if it does not say
so.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from qfleet.core.errors import MemberLost
from qfleet.engines.cluster.ray_cluster import Cluster


class CallResult(NamedTuple):
    """What became of a call."""

    number: int
    report: Any
    """None where the member was lost."""
    loss: str = ""
    """One line about it."""


PING_S = 5.0
"""How long a member that is there may take to say so."""


@dataclass
class _Call:
    reference: Any
    ask: Callable[[], Any]
    """Starts the question whether the member is there; gives the reference of its answer."""
    heard_s: float
    ping: Any = None
    """That reference, while the answer is awaited."""
    pinged_s: float = 0.0


class MemberPool:
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

    def called(
        self, number: int, reference: Any, ask: Callable[[], Any], grace_s: float = 0.0
    ) -> None:
        """This member's ``work`` is under way; ``reference`` stands for its report.

        ``ask`` starts a call that it answers at once, whatever else it does. ``grace_s`` is for one
        that has yet to start: so much later it is looked after.
        """
        assert number not in self._calls, f"{self._kind} {number} works already"
        self._calls[number] = _Call(reference, ask, self._clock() + grace_s)

    def drop(self, number: int) -> None:
        """Expect nothing more from this member."""
        self._calls.pop(number, None)

    def come(self, wait_s: float) -> list[CallResult]:
        """Who has reported or was lost; waits so long for the first of them."""
        by_reference = {call.reference: number for number, call in self._calls.items()}
        came = []
        for reference in self._cluster.ready(list(by_reference), wait_s):
            number = by_reference[reference]
            del self._calls[number]
            try:
                report = self._cluster.get(reference, f"{self._kind} {number}")
            except MemberLost as error:
                came.append(CallResult(number, None, str(error)))
            else:
                came.append(CallResult(number, report))
        for number in [n for n, call in self._calls.items() if self._is_silent(call)]:
            del self._calls[number]
            silence = f"{self._kind} {number} was not heard of for {self._timeout_s:g} s"
            came.append(CallResult(number, None, silence))
        return came

    def _is_silent(self, call: _Call) -> bool:
        now_s = self._clock()
        if call.ping is not None and self._cluster.ready([call.ping], 0.0):
            # An answer, or the news of its death, which its call will bring as well.
            call.ping, call.heard_s = None, now_s
        if call.ping is None and now_s - call.heard_s > self._timeout_s:
            call.ping, call.pinged_s = call.ask(), now_s
        return call.ping is not None and now_s - call.pinged_s > PING_S
