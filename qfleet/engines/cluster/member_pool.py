"""The member pool: numbered processes of one kind on a Ray cluster, spawned, watched and replaced.

Workers and servers of the parameter server, actors and replay shards are members. In: a function
that spawns a member, and calls under way; out: results, and the members that were lost.

A member works in slices: its owner calls ``work``, which returns within about a second, and calls
again after each report. So a member never runs on its own: it cannot outlive the run, it stops when
it is not called again, and its death is the failure of exactly one call. A member whose call takes
long may be waiting for others: it is pinged, and counts as lost if it does not answer.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from qfleet.core.errors import ClusterError, MemberLost
from qfleet.engines.cluster.liveness import RUN_AGAIN
from qfleet.engines.cluster.ray_cluster import IF_SLOW, TIMEOUT_S, Cluster

PING_S = 5.0
"""Time within which a live member answers a ping."""
MAX_FAILURES = 10
"""Losses in a row of a worker or server that a run survives."""


@dataclass
class Member:
    """A number in a pool, and the process that has it now."""

    number: int
    handle: Any = None
    """Ray's handle of the process; None while no process has the number."""
    life: int = 0
    """Processes that had the number before."""
    is_ready: bool = False
    """The process has answered: a node had room for it, and it has started."""
    failures: int = 0
    """Losses in a row; the owner sets it to 0 when the process has done something."""
    call: Any = None
    """Reference of the call under way; None if the process has nothing to do."""
    heard_s: float = 0.0
    """Time of the last sign of life, or of the latest start."""
    ping: Any = None
    """Reference of the answer to a ping, while it is awaited."""
    pinged_s: float = 0.0

    @property
    def grace_s(self) -> float:
        """Return the seconds added to a process's deadline until it has started."""
        return 0.0 if self.is_ready else TIMEOUT_S


M = TypeVar("M", bound=Member)


class MemberPool(Generic[M]):
    """Members by number; each has at most one call under way that the pool watches."""

    def __init__(
        self,
        cluster: Cluster,
        kind: str,
        spawn: Callable[[M], Any],
        members: Iterable[M] = (),
        *,
        timeout_s: float = TIMEOUT_S,
        max_failures: int = MAX_FAILURES,
        processors_needed: int = 0,
        advice: str = "fix the cause and resume the run",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Messages call a member ``kind`` and end with ``advice`` after too many failures.

        ``spawn`` starts a process and returns its handle: for each of ``members`` now, and for a
        replacement after a loss, which starts a new life. A member that is silent for
        ``timeout_s`` is pinged. ``processors_needed``: what all processes take of the cluster.
        """
        self._cluster, self._kind, self._spawn, self._clock = cluster, kind, spawn, clock
        self._timeout_s, self._max_failures, self._advice = timeout_s, max_failures, advice
        self.processors_needed = processors_needed
        self._called: dict[Any, M] = {}
        """Members by the reference of their call, in the order of the calls."""
        self.members = {member.number: member for member in members}
        for member in self.members.values():
            self.spawn(member)

    # --- processes ----------------------------------------------------------------------------

    def spawn(self, member: M) -> None:
        """Start a process for this number."""
        member.handle = self._spawn(member)

    def replace(self, member: M) -> None:
        """Start a new life. Other threads may use the handle: it is never None in between."""
        self._end_life(member)
        self.spawn(member)

    def end(self, member: M) -> None:
        """Leave the number without a process."""
        self._end_life(member)
        member.handle = None

    def _end_life(self, member: M) -> None:
        self.stop(member)
        self.drop_call(member)
        member.is_ready = False
        member.life += 1

    def stop(self, *members: M) -> None:
        """Stop the processes of these members, or of all; some may be dead already."""
        for member in members or self.members.values():
            with contextlib.suppress(Exception):
                self._cluster.stop(member.handle)

    def finish_recordings(
        self,
        wait_s: float,
        on_fault: Callable[[str, str], None],
        members: Iterable[M] | None = None,
    ) -> None:
        """Let these members, or all, write the rest of what they recorded; report failures."""
        asked = [
            (member, member.handle.finish_recording.remote())
            for member in (self.members.values() if members is None else members)
            if member.handle is not None
        ]
        for member, reference in asked:
            try:
                failures = self.get(member, reference, wait_s)
            except ClusterError as error:
                failures = [f"a recording is not complete: {error}"]
            for failure in failures:
                on_fault("record", failure)

    def count_failure(self, member: M, loss: str) -> None:
        """Count a loss; raise ClusterError if there were too many in a row."""
        member.failures += 1
        if member.failures > self._max_failures:
            raise ClusterError(
                f"{self._kind} {member.number} was lost {member.failures} times in a row: {loss}; "
                f"{self._advice}"
            )

    def has_room(self) -> bool:
        """Return whether the cluster has processors for all; nodes of a joined one may be gone."""
        is_own = self._cluster.folder is not None
        return is_own or self._cluster.processors() >= self.processors_needed

    def waits_for_room(self, member: M) -> bool:
        """Return whether a lost member had only waited for a node: that is not a failure.

        If no member is ready either, the run cannot go on, and ClusterError is raised.
        """
        if member.is_ready or self.has_room():
            return False
        if not any(other.is_ready for other in self.members.values()):
            raise ClusterError(
                f"no {self._kind} is left, and cluster {self._cluster.address} has "
                f"{self._cluster.processors()} processors; add nodes and resume the run"
            )
        return True

    # --- calls --------------------------------------------------------------------------------

    def call(self, member: M, reference: Any) -> None:
        """Watch a call under way; ``reference`` is Ray's, of its report."""
        assert member.call is None, f"{self._kind} {member.number} works already"
        member.call, member.ping = reference, None
        member.heard_s = self._clock() + member.grace_s
        self._called[reference] = member

    def drop_call(self, member: M) -> None:
        """Expect no result of the call under way, if there is one."""
        self._called.pop(member.call, None)
        member.call = None

    def results(self, wait_s: float) -> list[tuple[M, Any, str]]:
        """Return member, report and loss of each call that ended; wait ``wait_s`` for the first.

        The report is None if the member was lost; the loss is one line about that, or empty.
        """
        results: list[tuple[M, Any, str]] = []
        for reference in self._cluster.ready(list(self._called), wait_s):
            member = self._called[reference]
            self.drop_call(member)
            try:
                results.append((member, self.get(member, reference), ""))
                member.is_ready = True
            except MemberLost as error:
                results.append((member, None, str(error)))
        for member in [m for m in self._called.values() if self._is_silent(m)]:
            self.drop_call(member)
            silence = f"{self._kind} {member.number} was not heard of for {self._timeout_s:g} s"
            results.append((member, None, silence))
        return results

    def get(self, member: M, reference: Any, wait_s: float | None = None) -> Any:
        """Return the value of a call's reference; a loss is said without advice to the user."""
        try:
            return self._cluster.get(reference, f"{self._kind} {member.number}", wait_s)
        except MemberLost as error:
            loss = str(error).removesuffix(RUN_AGAIN).removesuffix(IF_SLOW)
            raise type(error)(loss) from None

    def _is_silent(self, member: M) -> bool:
        now_s = self._clock()
        if member.ping is not None and self._cluster.ready([member.ping], 0.0):
            # An answer, or the news of its death, which its call will bring as well.
            member.ping, member.heard_s = None, now_s
        if member.ping is None and now_s - member.heard_s > self._timeout_s:
            member.ping, member.pinged_s = member.handle.ping.remote(), now_s
        return member.ping is not None and now_s - member.pinged_s > PING_S
