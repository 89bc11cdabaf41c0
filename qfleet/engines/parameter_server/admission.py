"""Admission: which gradients make an update together, which are dropped, and who has to wait.

In: a gradient that arrives, and who is present. Out: a ``Decision``. A policy never touches weights
and never waits; the shard does what was decided. Gradients of one update are handed out by worker
number, so that nothing depends on who came first.

sync               ``Sync``              all present make an update; with b backups the first m − b
async              ``Async``             each makes its own on arrival
bounded staleness  ``BoundedStaleness``  nobody is more than s clocks ahead of the slowest
hybrid             ``Hybrid``            the k first, or those within a time window, make an update
guards (Gorila)    ``AgeLimit``, ``Outliers``: around any of these

A worker whose gradient cannot be used (not finite, dropped by a guard) has arrived all the same:
the others do not wait for it, and it waits for them.

**Turns.** Several shards that make the same workers wait have to agree on whom they wait for. Where
a gradient reached some of them only, because one died or the worker was about to join, one shard
would wait for what another has had already: workers would compute one after another from then on,
or wait for each other for ever. So gradients are numbered by the turn that they are for: the round
of a barrier, the worker's clock of bounded staleness. A shard tells a worker the turn of its next
gradient, and the worker sends the largest that any shard has told it (Lamport 1978), each time a
larger one. Who comes, or joins, for a later turn has nothing to send for those before it; nor has
whose gradient was dropped.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from qfleet.core.errors import ConfigError
from qfleet.core.types import StateDict

LATE = "late"
TOO_OLD = "too-old"
OUTLIER = "outlier"


@dataclass(frozen=True)
class Arrival:
    """One worker's gradient, as a policy sees it."""

    worker: int
    sequence: int
    gradient: Tensor | None
    """None where it must not be used; the worker has arrived nevertheless."""
    staleness: int
    """Updates made since the weights that it was computed on."""
    learning_rate: float
    weight: float
    """Its share in a mean, relative to the others'."""
    loss: float | None
    turn: int | None = None
    """That it is for; None: the one that it is here."""


class Moment(NamedTuple):
    """What a policy may know beside the arrival itself."""

    present: frozenset[int]
    now_s: float


class Decision(NamedTuple):
    update: tuple[Arrival, ...] = ()
    """Gradients whose mean is one update to be made now; empty: no update."""
    dropped: str = ""
    """Why the gradient that just arrived will never be used; empty: it was, or is kept."""


NOTHING = Decision()


class Admission(Protocol):
    def join(self, worker: int, moment: Moment) -> None:
        """A worker is present from now on (and in ``moment.present``)."""
        ...

    def expect(self, worker: int, turn: int) -> None:
        """The next gradient of a present worker will be for this turn, or a later one."""
        ...

    def arrive(self, arrival: Arrival, moment: Moment) -> Decision:
        """A present worker, which does not have to wait, sent a gradient."""
        ...

    def settle(self, moment: Moment) -> Decision:
        """Somebody left, or time has passed: is an update due?"""
        ...

    def waits(self, worker: int) -> bool:
        """Whether the worker may not compute its next gradient yet."""
        ...

    def turn(self, worker: int) -> int:
        """Of the worker's next gradient; 0 where nobody waits for anybody in particular."""
        ...

    def state_dict(self) -> StateDict: ...

    def load_state_dict(self, state: StateDict) -> None: ...


class _Group:
    """Gradients that are kept for one mean, and the workers that wait with them."""

    def __init__(self) -> None:
        self.waiting: dict[int, int] = {}
        """By worker: the turn that it came for."""
        self._kept: list[Arrival] = []

    def add(self, arrival: Arrival, turn: int = 0) -> None:
        self.waiting[arrival.worker] = turn
        if arrival.gradient is not None:
            # A copy: the sender may use its buffer again. Losses have been judged by now.
            mine = replace(arrival, gradient=arrival.gradient.clone(), loss=None, turn=turn)
            self._kept.append(mine)

    def close(self, last: float = math.inf) -> Decision:
        """The update of those that came for this turn or an earlier one."""
        update = [kept for kept in self._kept if (kept.turn or 0) <= last]
        self._kept = [kept for kept in self._kept if (kept.turn or 0) > last]
        self.waiting = {worker: turn for worker, turn in self.waiting.items() if turn > last}
        return Decision(tuple(sorted(update, key=lambda kept: (kept.worker, kept.sequence))))

    def state_dict(self) -> StateDict:
        # asdict copies the gradients.
        kept = {str(place): asdict(arrival) for place, arrival in enumerate(self._kept)}
        return {"waiting": {str(w): turn for w, turn in self.waiting.items()}, "kept": kept}

    def load_state_dict(self, state: StateDict) -> None:
        self.waiting = {int(worker): turn for worker, turn in state["waiting"].items()}
        kept: Iterable[StateDict] = state["kept"].values()
        self._kept = [Arrival(**{**saved, "gradient": saved["gradient"].clone()}) for saved in kept]


def _alone(arrival: Arrival) -> Decision:
    return NOTHING if arrival.gradient is None else Decision((arrival,))


class Async:
    """Each gradient is an update, on arrival. Nobody waits."""

    def join(self, worker: int, moment: Moment) -> None:
        """Nothing to do: who is present does not matter."""

    def expect(self, worker: int, turn: int) -> None:
        """Nothing to do: nobody waits."""

    def arrive(self, arrival: Arrival, moment: Moment) -> Decision:
        del moment
        return _alone(arrival)

    def settle(self, moment: Moment) -> Decision:
        del moment
        return NOTHING

    def waits(self, worker: int) -> bool:
        del worker
        return False

    def turn(self, worker: int) -> int:
        del worker
        return 0

    def state_dict(self) -> StateDict:
        return {}

    def load_state_dict(self, state: StateDict) -> None:
        assert not state, "Async has no state"


class _Barrier:
    """Everyone waits from its arrival until the update that takes its gradient."""

    def __init__(self) -> None:
        self._group = _Group()

    def join(self, worker: int, moment: Moment) -> None:
        """Nothing to do: who is present is counted when it matters."""

    def expect(self, worker: int, turn: int) -> None:
        """Nothing to do where an update takes whoever comes."""

    def waits(self, worker: int) -> bool:
        return worker in self._group.waiting

    def turn(self, worker: int) -> int:
        del worker
        return 0

    def state_dict(self) -> StateDict:
        return self._group.state_dict()

    def load_state_dict(self, state: StateDict) -> None:
        self._group.load_state_dict(state)


class Sync(_Barrier):
    """A round ends when all m present have arrived, and its mean is one update.

    With ``backup`` b the first m − b end it. Those of the round that come later are dropped and go
    on at once, with new weights: no gradient of old weights is ever applied.
    """

    def __init__(self, backup: int = 0) -> None:
        super().__init__()
        if backup < 0:
            raise ConfigError(f"backup {backup} is no number of workers; use 0 or more")
        self._backup = backup
        self._round = 0
        self._expected: dict[int, int] = {}
        """By worker: the round that it comes for next, at the earliest."""

    def join(self, worker: int, moment: Moment) -> None:
        """What was expected of the one that had this number before says nothing."""
        del moment
        self._expected.pop(worker, None)

    def expect(self, worker: int, turn: int) -> None:
        self._expected[worker] = max(turn, self._expected.get(worker, 0))

    def turn(self, worker: int) -> int:
        del worker
        return self._round

    def arrive(self, arrival: Arrival, moment: Moment) -> Decision:
        turn = self._round if arrival.turn is None else arrival.turn
        # Weights change by rounds alone, so what is based on older ones is of an earlier round.
        if arrival.staleness > 0 or turn < self._round:
            if arrival.turn is not None:
                self.expect(arrival.worker, arrival.turn + 1)
            return self.settle(moment)._replace(dropped=LATE)
        self._group.add(arrival, turn)
        return self.settle(moment)

    def settle(self, moment: Moment) -> Decision:
        """Who arrived and left is not counted, but is in the mean: it was worked for."""
        waiting, present = self._group.waiting, moment.present
        if not waiting:
            return NOTHING
        # Rounds that nobody came for are left out; when all have left, nothing stays behind.
        last = min(waiting.values()) if present else max(waiting.values())
        come = [w for w in present if w in waiting or self._expected.get(w, 0) > last]
        if len(come) < max(min(len(present), 1), len(present) - self._backup):
            return NOTHING
        self._round = last + 1
        return self._group.close(last)

    def state_dict(self) -> StateDict:
        expected = {str(worker): turn for worker, turn in self._expected.items()}
        return {**super().state_dict(), "round": self._round, "expected": expected}

    def load_state_dict(self, state: StateDict) -> None:
        super().load_state_dict(state)
        self._round = state["round"]
        self._expected = {int(worker): turn for worker, turn in state["expected"].items()}


class Hybrid(_Barrier):
    """The k first make an update and go on; late ones are in the next, however stale.

    k = 1 is async; all of m (None), or where fewer than k are present, is sync. An update is also
    made when its first gradient is ``window_s`` old. Somebody has to look at the clock for that:
    ``Shard.tick``, or the next arrival, which is then in the update too.

    Workers that push to several shards need a window: each shard has its own k first, so each may
    keep somebody waiting until there is nobody left to come.
    """

    def __init__(self, k: int | None = None, window_s: float = math.inf) -> None:
        super().__init__()
        if k is not None and k < 1:
            raise ConfigError(f"an update cannot be made of k = {k} gradients; use 1 or more")
        if not window_s >= 0:
            raise ConfigError(f"a window of {window_s:g} s has no end; use 0 or more")
        self._k, self._window_s = k, window_s
        # Not in the state: the clock of a process that takes over starts anywhere.
        self._ends_s: float | None = None

    def arrive(self, arrival: Arrival, moment: Moment) -> Decision:
        self._group.add(arrival)
        return self.settle(moment)

    def settle(self, moment: Moment) -> Decision:
        if not self._group.waiting:
            return NOTHING
        if self._ends_s is None:
            self._ends_s = moment.now_s + self._window_s
        m = len(moment.present)
        needed = m if self._k is None else min(self._k, m)
        come = len(self._group.waiting.keys() & moment.present)
        if come < needed and moment.now_s < self._ends_s:
            return NOTHING
        self._ends_s = None
        return self._group.close()

    def load_state_dict(self, state: StateDict) -> None:
        super().load_state_dict(state)
        self._ends_s = None


class BoundedStaleness:
    """SSP (Ho 2013): a worker's clock counts its gradients, and may lead the slowest by s.

    A gradient is an update on arrival, unless its worker has to wait. Then it waits too, and makes
    one update with those that waited beside it and the one that let them go. So a bound of 0 is
    sync, and one that nobody reaches is async, bit for bit.
    """

    def __init__(self, bound: int) -> None:
        if bound < 0:
            raise ConfigError(f"staleness bound {bound} is no number of clocks; use 0 or more")
        self._bound = bound
        self._clocks: dict[int, int] = {}
        self._group = _Group()

    def join(self, worker: int, moment: Moment) -> None:
        """A new worker begins beside the slowest: it neither leads nor holds anybody back."""
        if not self.waits(worker):
            self._clocks[worker] = self._slowest(moment.present - {worker}) or 0

    def expect(self, worker: int, turn: int) -> None:
        self._clocks[worker] = max(turn, self._clocks[worker])

    def arrive(self, arrival: Arrival, moment: Moment) -> Decision:
        before = self._slowest(moment.present)
        clock = max(self._clocks[arrival.worker], arrival.turn or 0) + 1
        self._clocks[arrival.worker] = clock
        slowest = self._slowest(moment.present)
        assert slowest is not None, "who sends is present"
        if clock - slowest > self._bound:
            self._group.add(arrival, clock)
            return NOTHING
        if slowest == before:
            return _alone(arrival)
        self._group.add(arrival, clock)
        return self._group.close(slowest + self._bound)

    def settle(self, moment: Moment) -> Decision:
        slowest = self._slowest(moment.present)
        last = math.inf if slowest is None else slowest + self._bound
        if any(clock <= last for clock in self._group.waiting.values()):
            return self._group.close(last)
        return NOTHING

    def waits(self, worker: int) -> bool:
        return worker in self._group.waiting

    def turn(self, worker: int) -> int:
        return self._clocks.get(worker, 0)

    def _slowest(self, present: frozenset[int]) -> int | None:
        return min((self._clocks[worker] for worker in present), default=None)

    def state_dict(self) -> StateDict:
        clocks = {str(worker): clock for worker, clock in self._clocks.items()}
        return {"clocks": clocks, "group": self._group.state_dict()}

    def load_state_dict(self, state: StateDict) -> None:
        self._clocks = {int(worker): clock for worker, clock in state["clocks"].items()}
        self._group.load_state_dict(state["group"])


class _Guard:
    """Around another policy: some gradients do not reach it, though their workers do."""

    def __init__(self, inner: Admission) -> None:
        self._inner = inner
        self.dropped = 0
        """Gradients that this guard kept away."""

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

    def state_dict(self) -> StateDict:
        return {"dropped": self.dropped, "inner": self._inner.state_dict()}

    def load_state_dict(self, state: StateDict) -> None:
        self.dropped = state["dropped"]
        self._inner.load_state_dict(state["inner"])

    def _drop(self, arrival: Arrival, moment: Moment, reason: str) -> Decision:
        self.dropped += 1
        decision = self._inner.arrive(replace(arrival, gradient=None), moment)
        return decision._replace(dropped=reason)


class AgeLimit(_Guard):
    """Drops a gradient whose weights are more than ``limit`` updates old (1507.04296)."""

    def __init__(self, inner: Admission, limit: int) -> None:
        super().__init__(inner)
        if limit < 0:
            raise ConfigError(f"an age limit of {limit} updates drops everything; use 0 or more")
        self._limit = limit

    def arrive(self, arrival: Arrival, moment: Moment) -> Decision:
        if arrival.gradient is not None and arrival.staleness > self._limit:
            return self._drop(arrival, moment, TOO_OLD)
        return self._inner.arrive(arrival, moment)


class Outliers(_Guard):
    """Drops a gradient whose loss or norm lies beyond mean + ``sigmas`` · σ of the newest ones'.

    Gorila (1507.04296) judges losses; the norm finds a worker whose gradients alone went wrong.
    Nothing is dropped before ``window`` of a kind are known, nor while all of them are equal. What
    was too large enters the window as the limit: one outlier does not hide the next, and a level
    that stays is let in after a while.
    """

    def __init__(self, inner: Admission, window: int, sigmas: float) -> None:
        super().__init__(inner)
        if window < 2:
            raise ConfigError(f"a window of {window} has no spread; use 2 or more")
        if not sigmas > 0:
            raise ConfigError(f"sigmas {sigmas:g} drops what is usual; use above 0")
        self._sigmas = sigmas
        self._newest: dict[str, deque[float]] = {
            kind: deque(maxlen=window) for kind in ("losses", "norms")
        }

    def arrive(self, arrival: Arrival, moment: Moment) -> Decision:
        gradient = arrival.gradient
        if gradient is None:
            return self._inner.arrive(arrival, moment)
        usual = self._is_usual("norms", float(torch.linalg.vector_norm(gradient)))
        if arrival.loss is not None:
            usual = self._is_usual("losses", arrival.loss) and usual
        if not usual:
            return self._drop(arrival, moment, OUTLIER)
        return self._inner.arrive(arrival, moment)

    def _is_usual(self, kind: str, value: float) -> bool:
        newest = self._newest[kind]
        limit = self._limit(newest)
        # One that is not finite says nothing of the others, so it stays outside the window.
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
