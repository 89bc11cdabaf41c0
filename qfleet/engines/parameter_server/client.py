"""A worker's side of the servers. In: whole vectors; out: the same, cut, sent and put together.

``Servers`` speaks to all shards at once through *lines*: calls that are started, then waited for.
It knows which weights of each shard it has, numbers its messages, sends a message again whose
answer did not come, and counts what travelled. A server that died is told by ``ServersLost``, when
all others have answered.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from qfleet.core.errors import MemberLost, MemberSilent
from qfleet.engines.cluster.ray_cluster import Cluster
from qfleet.engines.parameter_server.compression import Codec, decode
from qfleet.engines.parameter_server.layout import cut
from qfleet.engines.parameter_server.server import Answer, answer_from_plain
from qfleet.engines.parameter_server.shard import OTHER_EPOCH, Exchange, Push, Stamp, Welcome
from qfleet.engines.parameter_server.wire import (
    Wire,
    bytes_of_wire,
    from_wire,
    plain,
    to_wire,
    vector_from_wire,
)
from qfleet.telemetry.timers import Timers

PATIENCE_S = 1.0
"""How long a server may keep a call whose worker has to wait."""
TRIES = 3
"""How often a message is sent whose answer does not come."""
KEPT_CALLS = 256
FLOAT_BYTES = 4
UNANSWERED, HEARD, SERVER_LOST = "unanswered", "heard", "server-lost"
NOT_PRESENT = "not-present"
FATES = (UNANSWERED, HEARD, SERVER_LOST, NOT_PRESENT)
"""Of messages without a receipt: nobody knows yet, or it never arrived; it did arrive, as turned
out later; its server died; the server had given the worker up and did not look at it."""
_ELSEWHERE: Any = None
"""Stands in a message for the vector, which travels beside it."""


class Line(Protocol):
    """One server, as a worker calls it."""

    def start(self, method: str, *arguments: Any) -> Any: ...

    def finish(self, started: Any) -> Any:
        """Wait for the answer; ``MemberLost`` if the server died, ``MemberSilent`` if none came."""
        ...


class RemoteLine:
    def __init__(self, cluster: Cluster, handle: Any, number: int) -> None:
        self._cluster, self._handle, self._who = cluster, handle, f"server {number}"

    def start(self, method: str, *arguments: Any) -> Any:
        return self._handle.ask.remote(plain((method, *arguments)))

    def finish(self, started: Any) -> Any:
        return answer_from_plain(self._cluster.get(started, self._who))


class DirectLine:
    """A server in this process, for tests; its calls are made on the spot."""

    def __init__(self, server: Any) -> None:
        self._server = server

    def start(self, method: str, *arguments: Any) -> Any:
        return getattr(self._server, method)(*arguments)

    def finish(self, started: Any) -> Any:
        return started


class ServersLost(MemberLost):
    def __init__(self, numbers: Sequence[int]) -> None:
        self.numbers = tuple(numbers)
        super().__init__(f"server {', '.join(map(str, numbers))} died; start it anew")


@dataclass
class Traffic:
    """What one worker sent and received."""

    bytes_sent: int = 0
    bytes_received: int = 0
    plain_bytes_sent: int = 0
    """What it would have been uncompressed."""
    plain_bytes_received: int = 0
    messages: int = 0
    packing_s: float = 0.0
    """Spent on compressing what was sent."""
    outcomes: Counter[str] = field(default_factory=Counter)
    """Of pushes and exchanges, over all shards: what their receipts said, or ``FATES``."""
    sent: list[dict[int, int]] = field(default_factory=list)
    """By shard and its epoch: the number after that of the last message that was taken there."""
    calls: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=KEPT_CALLS))
    """Bytes and seconds of the newest messages, without what was waited for others."""


class Servers:
    def __init__(
        self,
        worker: int,
        size: int,
        lines: Sequence[Line],
        timers: Timers,
        make_codec: Callable[[], Codec | None] = lambda: None,
        life: int = 0,
    ) -> None:
        """``make_codec`` gives the codec of a shard's gradients; None sends them as they are.

        ``life`` counts the workers that had this number before.
        """
        self._worker, self._lines, self._timers = worker, list(lines), timers
        self._life = life
        self._slices = cut(size, len(lines))
        self._codecs = [make_codec() for _ in lines]
        self._known: list[Stamp | None] = [None] * len(lines)
        self._sequences = [0] * len(lines)
        self._turn = 0
        """Of the next gradient: the largest that any shard has told, and larger than the last."""
        self._unanswered: dict[int, Stamp] = {}
        """By shard: epoch and number of the message whose answer did not come."""
        self.takes_part = False
        self.on_entering: Callable[[int], None] = lambda _: None
        """Told when one that only looked takes part: the turn that its first message is for."""
        self.traffic = Traffic(sent=[{} for _ in lines])

    def replace(self, number: int, line: Line) -> None:
        """Another server stands in for this one."""
        self._lines[number] = line
        self._known[number] = None

    def join(self, into: Tensor) -> None:
        """Take part everywhere, again where need be, and fetch the newest weights."""
        self._take(self._enter(set(range(len(self._lines)))), into)
        self.takes_part = True

    def look(self, into: Tensor) -> None:
        """Fetch the newest weights without taking part: nobody waits for who only looks."""
        self._take(self._ask("pull", lambda _: (None,)), into)

    def ping(self) -> None:
        """An empty message to everybody, for the account of what messages cost."""
        self._ask("ping", lambda _: ())

    def push(
        self, vector: Tensor, learning_rate: float, loss: float | None, weight: float, into: Tensor
    ) -> None:
        """Send a gradient, wait where that is asked, and fetch the weights that came of it."""
        sent = self._packed(vector)

        def arguments(number: int) -> tuple[Any, ...]:
            based_on = self._known[number]
            assert based_on is not None, "join first"
            push = Push(
                self._worker,
                self._sequences[number],
                based_on,
                _ELSEWHERE,
                learning_rate,
                loss,
                weight,
                turn,
            )
            return push, sent[number], PATIENCE_S, self._life

        self._begin()
        turn = self._turn
        self._turn += 1
        answers = self._ask("push", arguments, sent)
        self._count(answers)
        answers |= self._wait({number for number, answer in answers.items() if answer.waits})
        self._take(answers, into)
        self._join_again(answers, into)

    def exchange(self, weights: Tensor, alpha: float) -> None:
        """Elastic averaging with all shards; ``weights`` move in place."""
        sent = [to_wire(weights[part].clone()) for part in self._slices]

        def arguments(number: int) -> tuple[Any, ...]:
            known = self._known[number]
            assert known is not None, "join first"
            exchange = Exchange(
                self._worker, self._sequences[number], known.epoch, _ELSEWHERE, alpha
            )
            return exchange, sent[number], self._life

        self._begin()
        answers = self._ask("exchange", arguments, sent)
        self._count(answers)
        for number, answer in answers.items():
            if answer.weights is not None:
                weights[self._slices[number]].sub_(decode(from_wire(answer.weights)))
            self._known[number] = answer.stamp
        self._join_again(answers, None)

    # --- inside -------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Before a message of which no shard may be told less than the others."""
        if not self.takes_part:
            # Whoever only looked takes part from his first gradient on, which is as old as it is.
            looked = list(self._known)
            entered = self._enter(set(range(len(self._lines))))
            self._known, self.takes_part = looked, True
            self._learn_turn(entered)
            if any(answer.stamp != looked[number] for number, answer in entered.items()):
                # It is of an earlier round, and the next one the first that counts.
                self._turn = max(0, self._turn - 1)
            self.on_entering(self._turn)
        for known, sequence, sent in zip(
            self._known, self._sequences, self.traffic.sent, strict=True
        ):
            assert known is not None, "join first"
            sent[known.epoch] = sequence + 1

    def _enter(self, numbers: set[int]) -> dict[int, Answer]:
        """Take part in these shards; one may have to wait there for what it sent before it left."""
        welcomes = self._ask("join", lambda _: (self._worker, self._life, self._turn), only=numbers)
        for number, welcome in welcomes.items():
            self._settle_unanswered(number, welcome)
            self._sequences[number] = welcome.sequence
            self._known[number] = None
        return self._wait(numbers)

    def _settle_unanswered(self, number: int, welcome: Welcome) -> None:
        """What became of a message without an answer: now the shard says how far it has heard."""
        if number not in self._unanswered:
            return
        epoch, sequence = self._unanswered.pop(number)
        was_heard = welcome.sequence > sequence
        if was_heard or welcome.epoch > epoch:
            self.traffic.outcomes[UNANSWERED] -= 1
            self.traffic.outcomes[HEARD if was_heard else SERVER_LOST] += 1

    def _wait(self, numbers: set[int]) -> dict[int, Answer]:
        """Until these shards let the worker go on, or have given it up."""
        answers: dict[int, Answer] = {}
        while numbers:
            again = self._ask(
                "wait",
                lambda number: (self._worker, self._known[number], PATIENCE_S, self._life),
                only=numbers,
            )
            answers |= again
            numbers = {number for number, answer in again.items() if answer.waits}
        return answers

    def _packed(self, vector: Tensor) -> list[Wire]:
        whole = vector.numpy()  # whose slices cost a tenth of a tensor's
        began_s = time.perf_counter()
        packed = [
            whole[part] if codec is None else to_wire(codec.encode(vector[part]))
            for part, codec in zip(self._slices, self._codecs, strict=True)
        ]
        self.traffic.packing_s += time.perf_counter() - began_s
        return packed

    def _ask(
        self,
        method: str,
        arguments: Callable[[int], tuple[Any, ...]],
        sent: Sequence[Wire] | None = None,
        only: set[int] | None = None,
    ) -> dict[int, Any]:
        """Call all servers, or some, at once; their answers by number."""
        numbers = [n for n in range(len(self._lines)) if only is None or n in only]
        began_s = time.perf_counter()
        started = {n: self._lines[n].start(method, *arguments(n)) for n in numbers}
        answers, lost = {}, []
        for n, call in started.items():
            try:
                answers[n] = self._finished(n, method, call, arguments)
            except MemberLost:
                lost.append(n)
        ended_s = time.perf_counter()
        waited_s = max((getattr(a, "waited_s", 0.0) for a in answers.values()), default=0.0)
        self._timers.add("communicate", began_s, ended_s - waited_s)
        self._timers.add("idle", ended_s - waited_s, ended_s)
        moved = sum(
            self._weigh(sent[n] if sent is not None else None, answers.get(n)) for n in numbers
        )
        self.traffic.calls.append((moved, ended_s - began_s - waited_s))
        if lost:
            if sent is not None:
                self._count(answers)
                self._miss(lost)
            raise ServersLost(lost)
        return answers

    def _finished(
        self, number: int, method: str, call: Any, arguments: Callable[[int], tuple[Any, ...]]
    ) -> Any:
        """The answer. A message that is not answered is sent again, and counts once."""
        for _ in range(TRIES - 1):
            try:
                return self._lines[number].finish(call)
            except MemberSilent:
                call = self._lines[number].start(method, *arguments(number))
        return self._lines[number].finish(call)

    def _weigh(self, sent: Wire | None, answer: Any) -> int:
        """Count a message and its answer; bytes of the vectors in them."""
        traffic = self.traffic
        before = traffic.bytes_sent + traffic.bytes_received
        traffic.messages += 1
        if sent is not None:
            traffic.bytes_sent += bytes_of_wire(sent)
            traffic.plain_bytes_sent += FLOAT_BYTES * sent.size
        weights = answer.weights if isinstance(answer, Answer) else None
        if weights is not None:
            traffic.bytes_received += bytes_of_wire(weights)
            traffic.plain_bytes_received += FLOAT_BYTES * weights.size
        return traffic.bytes_sent + traffic.bytes_received - before

    def _miss(self, numbers: list[int]) -> None:
        self.traffic.outcomes[UNANSWERED] += len(numbers)
        for number in numbers:
            known = self._known[number]
            assert known is not None, "who sends knows weights"
            self._unanswered[number] = Stamp(known.epoch, self._sequences[number])

    def _count(self, answers: dict[int, Answer]) -> None:
        for number, answer in answers.items():
            receipt, known = answer.receipt, self._known[number]
            assert known is not None, "who sends knows weights"
            self.traffic.outcomes[
                NOT_PRESENT if receipt is None else receipt.reason or receipt.outcome
            ] += 1
            if receipt is None or receipt.reason == OTHER_EPOCH:
                # It was not looked at, and its number is free.
                self.traffic.sent[number][known.epoch] = self._sequences[number]
            else:
                self._sequences[number] += 1

    def _learn_turn(self, answers: dict[int, Answer]) -> None:
        self._turn = max(self._turn, *(answer.turn for answer in answers.values()), 0)

    def _take(self, answers: dict[int, Answer], into: Tensor) -> None:
        self._learn_turn(answers)
        whole = into.numpy()
        for number, answer in answers.items():
            if answer.weights is not None:
                whole[self._slices[number]] = vector_from_wire(answer.weights)
            self._known[number] = answer.stamp

    def _join_again(self, answers: dict[int, Answer], into: Tensor | None) -> None:
        """Where a server has given this worker up, or was restored, come back."""
        numbers = {
            number
            for number, answer in answers.items()
            if not answer.is_present
            or (answer.receipt is not None and answer.receipt.reason == OTHER_EPOCH)
        }
        if not numbers:
            return
        entered = self._enter(numbers)
        if into is not None:
            self._take(entered, into)
        for number, answer in entered.items():
            self._known[number] = answer.stamp
