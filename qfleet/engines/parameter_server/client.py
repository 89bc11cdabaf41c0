"""A worker's side of the servers. In: whole vectors. Out: the same, cut, sent and joined again.

``Servers`` calls all shards at once through *lines*: calls that are started, then waited for. It
knows which weights of each shard it has, numbers its messages, repeats a message whose reply did
not come, and counts the traffic. ``ServersLost`` reports the servers that died, after all others
have replied.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from qfleet.core.errors import MemberLost, MemberSilent
from qfleet.engines.cluster.ray_cluster import Cluster
from qfleet.engines.parameter_server.compression import Compressor, Vector, bytes_of, unpack
from qfleet.engines.parameter_server.layout import cut
from qfleet.engines.parameter_server.shard import OTHER_EPOCH
from qfleet.engines.parameter_server.wire import (
    Exchange,
    Join,
    Ping,
    Pull,
    Push,
    Reply,
    Request,
    Stamp,
    Wait,
    Welcome,
    decode,
    encode,
)
from qfleet.telemetry.timers import Timers

PATIENCE_S = 1.0
"""How long a server may hold the call of a worker that has to wait."""
TRIES = 3
"""How often a message is sent if no reply comes."""
KEPT_CALLS = 256
FLOAT_BYTES = 4
UNANSWERED, HEARD, SERVER_LOST = "unanswered", "heard", "server-lost"
NOT_PRESENT = "not-present"
"""Outcomes of messages without one in a reply: it is not known (yet) whether the message arrived;
it arrived, as a later reply shows; its server died; the server had removed the worker and ignored
the message."""


class Line(Protocol):
    """The connection of a worker to one server."""

    def start(self, request: Request) -> Any: ...

    def finish(self, started: Any) -> Any:
        """Wait for the reply; ``MemberLost`` if the server died, ``MemberSilent`` if none came."""
        ...


class RemoteLine:
    def __init__(self, cluster: Cluster, handle: Any, number: int) -> None:
        self._cluster, self._handle, self._name = cluster, handle, f"server {number}"

    def start(self, request: Request) -> Any:
        return self._handle.ask.remote(encode(request))

    def finish(self, started: Any) -> Any:
        return decode(self._cluster.get(started, self._name))


class ServersLost(MemberLost):
    def __init__(self, numbers: Sequence[int]) -> None:
        self.numbers = tuple(numbers)
        super().__init__(f"server {', '.join(map(str, numbers))} died; start it again")


@dataclass
class Traffic:
    """What one worker sent and received."""

    bytes_sent: int = 0
    bytes_received: int = 0
    plain_bytes_sent: int = 0
    """The bytes without compression."""
    plain_bytes_received: int = 0
    messages: int = 0
    packing_s: float = 0.0
    """Time of compressing the vectors that were sent."""
    outcomes: Counter[str] = field(default_factory=Counter)
    """Number of pushes and exchanges of all shards by outcome (a reply's, or one of the above)."""
    sent: list[dict[int, int]] = field(default_factory=list)
    """By shard and epoch: the number after that of the last message that was accepted there."""
    calls: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=KEPT_CALLS))
    """Bytes and seconds of the newest messages, without the time of waiting for other workers."""


class _Calls(NamedTuple):
    """Messages that were sent to several servers at once."""

    requests: Mapping[int, Request]
    sent: Sequence[Vector] | None
    started: Mapping[int, Any]
    began_s: float


class Servers:
    def __init__(
        self,
        worker: int,
        size: int,
        lines: Sequence[Line],
        timers: Timers,
        make_compressor: Callable[[], Compressor | None] = lambda: None,
        life: int = 0,
    ) -> None:
        """``make_compressor`` returns the compressor of one shard's gradients, or None.

        ``life`` is the number of earlier workers with this worker's number.
        """
        self._worker, self._lines, self._timers = worker, list(lines), timers
        self._life, self._numbers = life, range(len(lines))
        self._slices = cut(size, len(lines))
        self._compressors = [make_compressor() for _ in lines]
        self._known: list[Stamp | None] = [None] * len(lines)
        self._sequences = [0] * len(lines)
        self._turn = 0
        """The turn of the next gradient: the largest that a shard reported, above the last one."""
        self._unanswered: dict[int, tuple[int, int]] = {}
        """By shard: epoch and number of the message that got no reply."""
        self.takes_part = False
        self.is_behind = False
        """Whether a shard has applied this worker's last gradient and sent no weights since."""
        self.on_entering: Callable[[int], None] = lambda _: None
        """Called when a worker that only looked takes part, with the turn of its first message."""
        self._under_way: _Calls | None = None
        """The gradient that was sent and whose reply was not waited for yet."""
        self.traffic = Traffic(sent=[{} for _ in lines])

    def replace(self, number: int, line: Line) -> None:
        """Use another server in the place of this one."""
        self._lines[number] = line
        self._known[number] = None

    def join(self, into: Tensor) -> None:
        """Take part in all shards, again where necessary, and fetch the newest weights."""
        self._take(self._enter(self._numbers), into)
        self.takes_part = True

    def look(self, into: Tensor) -> None:
        """Fetch the newest weights without taking part: no other worker waits for this one."""
        self._take(self._ask(dict.fromkeys(self._numbers, Pull())), into)

    def refresh(self, into: Tensor) -> None:
        """Fetch the weights that have changed since the last reply."""
        stamps = {number: self._stamp(number) for number in self._numbers}
        self.is_behind = False
        self._take(self._ask({n: Pull(tuple(stamp)) for n, stamp in stamps.items()}), into)

    def ping(self) -> None:
        """Send an empty message to every server, to measure what a message costs."""
        self._ask(dict.fromkeys(self._numbers, Ping()))

    def push(
        self, vector: Tensor, learning_rate: float, loss: float | None, weight: float, into: Tensor
    ) -> None:
        """Send a gradient, wait where a shard requires it, and fetch the new weights."""
        self.start_push(vector, learning_rate, loss, weight, into)
        self.finish_push(into, at_once=True)

    def start_push(
        self, vector: Tensor, learning_rate: float, loss: float | None, weight: float, into: Tensor
    ) -> None:
        """Send a gradient, after the reply to the last one; ``finish_push`` waits for its reply.

        ``vector`` must not change until then: a message without a reply is sent again.
        """
        based_on = [self._stamp(number) for number in self._numbers]  # before newer ones arrive
        self.finish_push(into)
        sent = self._packed(vector)
        self._begin()
        turn = self._turn
        self._turn += 1
        requests = {}
        for number, gradient in enumerate(sent):
            epoch, version = based_on[number]
            requests[number] = Push(
                self._worker, self._sequences[number], epoch, version, gradient, learning_rate,
                loss, weight, turn, self._life, PATIENCE_S,
            )  # fmt: skip
        self._under_way = self._start(requests, sent)

    def finish_push(self, into: Tensor, at_once: bool = False) -> None:
        """Wait for the reply to the gradient under way, if there is one, and take its weights.

        ``at_once``: nothing else was done meanwhile, so that the time of the message is known.
        """
        calls, self._under_way = self._under_way, None
        if calls is None:
            return
        replies = self._finish(calls, at_once)
        self._count(replies)
        replies |= self._wait([number for number, reply in replies.items() if reply.waits])
        self.is_behind = any(r.outcome == "applied" and r.weights is None for r in replies.values())
        self._take(replies, into)
        self._join_again(replies, into)

    def exchange(self, weights: Tensor, alpha: float) -> None:
        """Average elastically with all shards; ``weights`` change in place."""
        sent: list[Vector] = [weights[part].clone().numpy() for part in self._slices]
        self._begin()
        requests = {}
        for number, part in enumerate(sent):
            sequence, epoch = self._sequences[number], self._stamp(number).epoch
            requests[number] = Exchange(self._worker, sequence, epoch, part, alpha, self._life)
        replies = self._ask(requests, sent)
        self._count(replies)
        for number, reply in replies.items():
            if reply.weights is not None:
                weights[self._slices[number]].sub_(unpack(reply.weights))
            self._known[number] = reply.stamp
        self._join_again(replies, None)

    # --- inside -------------------------------------------------------------------------------

    def _stamp(self, number: int) -> Stamp:
        known = self._known[number]
        assert known is not None, "join first"
        return known

    def _begin(self) -> None:
        """Prepare a message that all shards must get alike."""
        if not self.takes_part:
            # A worker that only looked takes part from its first gradient on, stale as that is.
            looked = list(self._known)
            entered = self._enter(self._numbers)
            self._known, self.takes_part = looked, True
            self._learn_turn(entered)
            if any(reply.stamp != looked[number] for number, reply in entered.items()):
                # The gradient is of an earlier round; the next one is the first that counts.
                self._turn = max(0, self._turn - 1)
            self.on_entering(self._turn)
        for number, sent in enumerate(self.traffic.sent):
            sent[self._stamp(number).epoch] = self._sequences[number] + 1

    def _enter(self, numbers: Iterable[int]) -> dict[int, Reply]:
        """Take part in these shards, and wait there for gradients sent before leaving."""
        welcomes = self._ask({n: Join(self._worker, self._life, self._turn) for n in numbers})
        for number, welcome in welcomes.items():
            self._settle_unanswered(number, welcome)
            self._sequences[number] = welcome.sequence
            self._known[number] = None
        return self._wait(welcomes)

    def _settle_unanswered(self, number: int, welcome: Welcome) -> None:
        """Count what became of a message without a reply: the shard reports its next number."""
        if number not in self._unanswered:
            return
        epoch, sequence = self._unanswered.pop(number)
        was_heard = welcome.sequence > sequence
        if was_heard or welcome.epoch > epoch:
            self.traffic.outcomes[UNANSWERED] -= 1
            self.traffic.outcomes[HEARD if was_heard else SERVER_LOST] += 1

    def _wait(self, numbers: Iterable[int]) -> dict[int, Reply]:
        """Wait until these shards let the worker go on, or have removed it."""
        replies: dict[int, Reply] = {}
        waiting = list(numbers)
        while waiting:
            requests = {}
            for number in waiting:
                known = self._known[number]
                plain = known and tuple(known)
                requests[number] = Wait(self._worker, plain, PATIENCE_S, self._life)
            again = self._ask(requests)
            replies |= again
            waiting = [number for number, reply in again.items() if reply.waits]
        return replies

    def _packed(self, vector: Tensor) -> list[Vector]:
        whole = vector.numpy()  # a slice of an array costs a tenth of a tensor's
        began_s = time.perf_counter()
        packed = [
            whole[part] if compressor is None else compressor.pack(vector[part])
            for part, compressor in zip(self._slices, self._compressors, strict=True)
        ]
        self.traffic.packing_s += time.perf_counter() - began_s
        return packed

    def _ask(
        self, requests: Mapping[int, Request], sent: Sequence[Vector] | None = None
    ) -> dict[int, Any]:
        """Call these servers at once; return the replies by number. ``sent``: vectors to count."""
        return self._finish(self._start(requests, sent))

    def _start(
        self, requests: Mapping[int, Request], sent: Sequence[Vector] | None = None
    ) -> _Calls:
        began_s = time.perf_counter()
        started = {n: self._lines[n].start(request) for n, request in requests.items()}
        self._timers.add("communicate", began_s, time.perf_counter())
        return _Calls(requests, sent, started, began_s)

    def _finish(self, calls: _Calls, at_once: bool = True) -> dict[int, Any]:
        requests, sent, started, began_s = calls
        resumed_s = time.perf_counter()
        replies, lost = {}, []
        for n, call in started.items():
            try:
                replies[n] = self._finished(n, requests[n], call)
            except MemberLost:
                lost.append(n)
        ended_s = time.perf_counter()
        waited_s = max((getattr(r, "waited_s", 0.0) for r in replies.values()), default=0.0)
        waited_s = min(waited_s, ended_s - resumed_s)  # the rest was used for other work
        self._timers.add("communicate", resumed_s, ended_s - waited_s)
        self._timers.add("idle", ended_s - waited_s, ended_s)
        moved = sum(
            self._weigh(n, None if sent is None else sent[n], replies.get(n)) for n in requests
        )
        if at_once:
            self.traffic.calls.append((moved, ended_s - began_s - waited_s))
        if lost:
            if sent is not None:
                self._count(replies)
                self.traffic.outcomes[UNANSWERED] += len(lost)
                for n in lost:
                    self._unanswered[n] = self._stamp(n).epoch, self._sequences[n]
            raise ServersLost(lost)
        return replies

    def _finished(self, number: int, request: Request, call: Any) -> Any:
        """Return the reply. A message without one is sent again; the shard applies it once."""
        for _ in range(TRIES - 1):
            try:
                return self._lines[number].finish(call)
            except MemberSilent:
                call = self._lines[number].start(request)
        return self._lines[number].finish(call)

    def _weigh(self, number: int, sent: Vector | None, reply: Any) -> int:
        """Count a message and its reply; return the bytes of their vectors."""
        traffic, part = self.traffic, self._slices[number]
        plain_bytes = FLOAT_BYTES * (part.stop - part.start)
        before = traffic.bytes_sent + traffic.bytes_received
        traffic.messages += 1
        if sent is not None:
            traffic.bytes_sent += bytes_of(sent)
            traffic.plain_bytes_sent += plain_bytes
        if isinstance(reply, Reply) and reply.weights is not None:
            traffic.bytes_received += reply.weights.nbytes
            traffic.plain_bytes_received += plain_bytes
        return traffic.bytes_sent + traffic.bytes_received - before

    def _count(self, replies: dict[int, Reply]) -> None:
        for number, reply in replies.items():
            self.traffic.outcomes[reply.reason or reply.outcome or NOT_PRESENT] += 1
            if not reply.outcome or reply.reason == OTHER_EPOCH:
                # The shard ignored the message, so its number is free.
                self.traffic.sent[number][self._stamp(number).epoch] = self._sequences[number]
            else:
                self._sequences[number] += 1

    def _learn_turn(self, replies: dict[int, Reply]) -> None:
        self._turn = max(self._turn, *(reply.turn for reply in replies.values()), 0)

    def _take(self, replies: dict[int, Reply], into: Tensor) -> None:
        self._learn_turn(replies)
        whole = into.numpy()
        for number, reply in replies.items():
            if reply.weights is not None:
                whole[self._slices[number]] = unpack(reply.weights).numpy()
            self._known[number] = reply.stamp

    def _join_again(self, replies: dict[int, Reply], into: Tensor | None) -> None:
        """Join the shards again that have removed this worker or were restored."""
        numbers = [n for n, r in replies.items() if not r.is_present or r.reason == OTHER_EPOCH]
        if numbers:
            entered = self._enter(numbers)
            if into is not None:
                self._take(entered, into)
            for number, reply in entered.items():
                self._known[number] = reply.stamp
