"""Admission: which gradients form an update, which are dropped, and which workers have to wait.

In: a gradient that arrives, and the workers that are present. Out: a ``Decision``. A policy never
touches weights and never waits; the shard carries the decision out. The gradients of one update are
ordered by worker number, so that nothing depends on the order of arrival.

sync               ``Sync``              all present form an update; with b backups the first m − b
async              ``Async``             each gradient is an update on arrival
bounded staleness  ``BoundedStaleness``  no worker leads the slowest by more than s clocks
hybrid             ``Hybrid``            the first k, or those in a time window, form an update
guards (Gorila)    ``AgeLimit``, ``Outliers``: around any policy

A worker whose gradient cannot be used (not finite, dropped by a guard) has arrived all the same:
the others do not wait for it, and it waits for them.

**Turns.** Several shards that make the same workers wait have to agree on which workers they wait
for. A gradient may reach some shards only, because one died or the worker was about to join. One
shard would then wait for a gradient that another has had already: workers would compute one after
another from then on, or wait for each other for ever. So every gradient has the number of the turn
it is for: the round of a barrier, or the worker's clock of bounded staleness. A shard reports the
turn of a worker's next gradient, and the worker sends the largest turn that any shard has reported
(Lamport 1978), each time a larger one. No shard waits in a turn for a worker that pushes or joins
for a later one, or whose gradient for that turn was dropped.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from typing import NamedTuple

import torch

from qfleet.core.types import StateDict
from qfleet.engines.parameter_server.compression import unpack
from qfleet.engines.parameter_server.wire import Push

LATE = "late"
TOO_OLD = "too-old"
OUTLIER = "outlier"
SAVED = ("worker", "sequence", "gradient", "staleness", "learning_rate", "weight", "loss", "turn")
"""The fields of a kept gradient in a snapshot."""


class Moment(NamedTuple):
    """The workers that are present, and the time."""

    present: frozenset[int]
    now_s: float


class Decision(NamedTuple):
    update: tuple[Push, ...] = ()
    """Gradients whose mean is one update to make now; empty: no update."""
    dropped: str = ""
    """Why the gradient that just arrived will never be used; empty: it was used or is kept."""


NOTHING = Decision()


# ruff: noqa: ARG002 (the arguments are for subclasses)
class Admission:
    """Base of the policies: every gradient is an update on arrival, and no worker waits."""

    def join(self, worker: int, moment: Moment) -> None:
        """Add a worker, which is in ``moment.present`` from now on."""

    def expect(self, worker: int, turn: int) -> None:
        """Expect the next gradient of a present worker for this turn or a later one."""

    def arrive(self, push: Push, moment: Moment) -> Decision:
        """Decide about a gradient of a present worker that does not have to wait."""
        return NOTHING if push.gradient is None else Decision((push,))

    def settle(self, moment: Moment) -> Decision:
        """Decide whether an update is due, after a worker left or time has passed."""
        return NOTHING

    def waits(self, worker: int) -> bool:
        """Return whether the worker may not compute its next gradient yet."""
        return False

    def turn(self, worker: int) -> int:
        """Return the turn of the worker's next gradient; 0 in policies without turns."""
        return 0

    def state_dict(self) -> StateDict:
        return {}

    def load_state_dict(self, state: StateDict) -> None:
        """Restore what ``state_dict`` returned."""


class Async(Admission):
    """Each gradient is an update on arrival. No worker waits."""


class _Barrier(Admission):
    """A worker may wait from its arrival until the update that includes its gradient."""

    def __init__(self) -> None:
        self._waiting: dict[int, int] = {}
        """By worker: the turn that its gradient is for."""
        self._kept: list[Push] = []

    def _keep(self, push: Push, turn: int = 0) -> None:
        self._waiting[push.worker] = turn
        if push.gradient is not None:
            # A copy, because the sender may reuse its buffer. Guards have seen the loss by now.
            gradient = unpack(push.gradient).clone()
            self._kept.append(push._replace(gradient=gradient, loss=None, turn=turn))

    def _close(self, last: float = math.inf) -> Decision:
        """Return the update of the gradients for turns up to ``last``."""
        update = [kept for kept in self._kept if (kept.turn or 0) <= last]
        self._kept = [kept for kept in self._kept if (kept.turn or 0) > last]
        self._waiting = {worker: turn for worker, turn in self._waiting.items() if turn > last}
        return Decision(tuple(sorted(update, key=lambda kept: (kept.worker, kept.sequence))))

    def waits(self, worker: int) -> bool:
        return worker in self._waiting

    def state_dict(self) -> StateDict:
        kept = {}
        for place, push in enumerate(self._kept):
            kept[str(place)] = saved = {name: getattr(push, name) for name in SAVED}
            saved["gradient"] = saved["gradient"].clone()
        return {"waiting": _by_name(self._waiting), "kept": kept}

    def load_state_dict(self, state: StateDict) -> None:
        self._waiting = _by_number(state["waiting"])
        self._kept = [
            Push(epoch=0, version=0, **{**saved, "gradient": saved["gradient"].clone()})
            for saved in state["kept"].values()
        ]


def _by_name(counts: dict[int, int]) -> dict[str, int]:
    return {str(worker): count for worker, count in counts.items()}


def _by_number(counts: dict[str, int]) -> dict[int, int]:
    return {int(worker): count for worker, count in counts.items()}


class Sync(_Barrier):
    """A round ends when all m present have arrived, and its mean is one update.

    With ``backup`` b the first m − b end it. Later gradients of the round are dropped, and their
    workers go on at once with new weights: no gradient of old weights is ever applied.
    """

    def __init__(self, backup: int = 0) -> None:
        super().__init__()
        self._backup = backup
        self._round = 0
        self._expected: dict[int, int] = {}
        """By worker: the earliest round that its next gradient is for."""

    def join(self, worker: int, moment: Moment) -> None:
        """Forget what was expected of an earlier worker with this number."""
        self._expected.pop(worker, None)

    def expect(self, worker: int, turn: int) -> None:
        self._expected[worker] = max(turn, self._expected.get(worker, 0))

    def turn(self, worker: int) -> int:
        return self._round

    def arrive(self, push: Push, moment: Moment) -> Decision:
        turn = self._round if push.turn is None else push.turn
        # Weights change by rounds only, so a stale gradient belongs to an earlier round.
        if push.staleness > 0 or turn < self._round:
            if push.turn is not None:
                self.expect(push.worker, push.turn + 1)
            return self.settle(moment)._replace(dropped=LATE)
        self._keep(push, turn)
        return self.settle(moment)

    def settle(self, moment: Moment) -> Decision:
        """Close the round if all have arrived; the gradient of one that then left counts too."""
        waiting, present = self._waiting, moment.present
        if not waiting:
            return NOTHING
        # Rounds without gradients are skipped; when all workers have left, nothing is kept.
        last = min(waiting.values()) if present else max(waiting.values())
        come = [w for w in present if w in waiting or self._expected.get(w, 0) > last]
        if len(come) < max(min(len(present), 1), len(present) - self._backup):
            return NOTHING
        self._round = last + 1
        return self._close(last)

    def state_dict(self) -> StateDict:
        expected = _by_name(self._expected)
        return {**super().state_dict(), "round": self._round, "expected": expected}

    def load_state_dict(self, state: StateDict) -> None:
        super().load_state_dict(state)
        self._round, self._expected = state["round"], _by_number(state["expected"])


class Hybrid(_Barrier):
    """The first k gradients form an update; late ones are in the next, however stale.

    k = 1 is async; k = None (all m), or fewer than k present, is sync. An update is also made when
    its first gradient is ``window_s`` old. The clock is read by ``Shard.tick`` and by the next
    arrival, which is then in the update too.

    Workers that push to several shards need a window: each shard has its own first k, so the shards
    together may keep all workers waiting.
    """

    def __init__(self, k: int | None = None, window_s: float = math.inf) -> None:
        super().__init__()
        self._k, self._window_s = k, window_s
        # Not in the state: the clock of the process that restores it has another origin.
        self._ends_s: float | None = None

    def arrive(self, push: Push, moment: Moment) -> Decision:
        self._keep(push)
        return self.settle(moment)

    def settle(self, moment: Moment) -> Decision:
        if not self._waiting:
            return NOTHING
        if self._ends_s is None:
            self._ends_s = moment.now_s + self._window_s
        m = len(moment.present)
        needed = m if self._k is None else min(self._k, m)
        come = len(self._waiting.keys() & moment.present)
        if come < needed and moment.now_s < self._ends_s:
            return NOTHING
        self._ends_s = None
        return self._close()

    def load_state_dict(self, state: StateDict) -> None:
        super().load_state_dict(state)
        self._ends_s = None


class BoundedStaleness(_Barrier):
    """SSP (Ho 2013): a worker's clock counts its gradients and may lead the slowest by s.

    A gradient is an update on arrival, unless its worker has to wait. Then the gradient waits too,
    and forms one update with those that waited beside it and the one that released them. So a bound
    of 0 is sync, and a bound that no worker reaches is async, bit for bit.
    """

    def __init__(self, bound: int) -> None:
        super().__init__()
        self._bound = bound
        self._clocks: dict[int, int] = {}

    def join(self, worker: int, moment: Moment) -> None:
        """Set a new worker's clock to the slowest: it neither leads nor holds others back."""
        if not self.waits(worker):
            self._clocks[worker] = self._slowest(moment.present - {worker}) or 0

    def expect(self, worker: int, turn: int) -> None:
        self._clocks[worker] = max(turn, self._clocks[worker])

    def arrive(self, push: Push, moment: Moment) -> Decision:
        before = self._slowest(moment.present)
        clock = max(self._clocks[push.worker], push.turn or 0) + 1
        self._clocks[push.worker] = clock
        slowest = self._slowest(moment.present)
        assert slowest is not None, "the sender is present"
        if clock - slowest > self._bound:
            self._keep(push, clock)
            return NOTHING
        if slowest == before:
            return super().arrive(push, moment)
        self._keep(push, clock)
        return self._close(slowest + self._bound)

    def settle(self, moment: Moment) -> Decision:
        slowest = self._slowest(moment.present)
        last = math.inf if slowest is None else slowest + self._bound
        return self._close(last) if any(c <= last for c in self._waiting.values()) else NOTHING

    def turn(self, worker: int) -> int:
        return self._clocks.get(worker, 0)

    def _slowest(self, present: frozenset[int]) -> int | None:
        return min((self._clocks[worker] for worker in present), default=None)

    def state_dict(self) -> StateDict:
        return {"clocks": _by_name(self._clocks), "group": super().state_dict()}

    def load_state_dict(self, state: StateDict) -> None:
        self._clocks = _by_number(state["clocks"])
        super().load_state_dict(state["group"])


class _Guard(Admission, ABC):
    """A wrapper of a policy: the policy sees every arrival, but not the gradients dropped here."""

    def __init__(self, inner: Admission) -> None:
        self._inner = inner
        self.dropped = 0
        """Gradients that this guard dropped."""

    def join(self, worker: int, moment: Moment) -> None:
        self._inner.join(worker, moment)

    def expect(self, worker: int, turn: int) -> None:
        self._inner.expect(worker, turn)

    def settle(self, moment: Moment) -> Decision:
        return self._inner.settle(moment)

    def waits(self, worker: int) -> bool:
        return self._inner.waits(worker)

    def turn(self, worker: int) -> int:
        return self._inner.turn(worker)

    @abstractmethod
    def _refusal(self, push: Push) -> str:
        """Return why the gradient is dropped, or an empty text."""

    def arrive(self, push: Push, moment: Moment) -> Decision:
        reason = "" if push.gradient is None else self._refusal(push)
        if not reason:
            return self._inner.arrive(push, moment)
        self.dropped += 1
        return self._inner.arrive(push._replace(gradient=None), moment)._replace(dropped=reason)

    def state_dict(self) -> StateDict:
        return {"dropped": self.dropped, "inner": self._inner.state_dict()}

    def load_state_dict(self, state: StateDict) -> None:
        self.dropped = state["dropped"]
        self._inner.load_state_dict(state["inner"])


class AgeLimit(_Guard):
    """Drops a gradient whose weights are more than ``limit`` updates old (1507.04296)."""

    def __init__(self, inner: Admission, limit: int) -> None:
        super().__init__(inner)
        self._limit = limit

    def _refusal(self, push: Push) -> str:
        return TOO_OLD if push.staleness > self._limit else ""


class Outliers(_Guard):
    """Drops a gradient whose loss or norm exceeds mean + ``sigmas`` · σ of the newest ones.

    Gorila (1507.04296) checks losses; the norm finds a worker with bad gradients only. Nothing is
    dropped before ``window`` values of a kind are known, nor while all of them are equal. A value
    that is too large enters the window as the limit: one outlier does not hide the next, and a
    level that stays is accepted after a while.
    """

    def __init__(self, inner: Admission, window: int, sigmas: float) -> None:
        super().__init__(inner)
        self._sigmas = sigmas
        self._newest: dict[str, deque[float]] = {
            kind: deque(maxlen=window) for kind in ("losses", "norms")
        }

    def _refusal(self, push: Push) -> str:
        assert push.gradient is not None
        norm = float(torch.linalg.vector_norm(unpack(push.gradient)))
        # Both are recorded, even if the first one is unusual.
        usual = [self._is_usual("norms", norm)]
        if push.loss is not None:
            usual.append(self._is_usual("losses", push.loss))
        return "" if all(usual) else OUTLIER

    def _is_usual(self, kind: str, value: float) -> bool:
        newest = self._newest[kind]
        limit = self._limit(newest)
        # A non-finite value says nothing about the others, so it stays outside the window.
        if math.isfinite(value):
            newest.append(min(value, limit))
        return value <= limit and not math.isinf(value)

    def _limit(self, newest: deque[float]) -> float:
        if len(newest) < (newest.maxlen or 0):
            return math.inf
        mean = math.fsum(newest) / len(newest)
        spread = math.sqrt(math.fsum((value - mean) ** 2 for value in newest) / len(newest))
        return mean + self._sigmas * spread if spread > 0 else math.inf

    def state_dict(self) -> StateDict:
        newest = {kind: list(values) for kind, values in self._newest.items()}
        return {**super().state_dict(), **newest}

    def load_state_dict(self, state: StateDict) -> None:
        super().load_state_dict(state)
        for kind, values in self._newest.items():
            values.clear()
            values.extend(state[kind])
