"""One server process: a shard that many workers call at once. In: their messages; out: answers.

A plain class that tests call directly, from several threads where workers wait for each other. The
shard itself never waits; here a worker that has to is kept in its call until it may go on, so that
nobody has to ask again and again. Every wait has an end: after ``patience_s`` the answer is that
the worker still has to wait.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from threading import Condition
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray
from torch import Tensor

from qfleet.agent.updaters.optimisers import SGD, FlatOptimiser, make_optimiser
from qfleet.config.config import Config
from qfleet.core.errors import GivenUp
from qfleet.core.types import StateDict
from qfleet.engines.cluster.state_arrays import as_arrays, as_tensors
from qfleet.engines.parameter_server.admission import (
    Admission,
    AgeLimit,
    Async,
    BoundedStaleness,
    Hybrid,
    Outliers,
    Sync,
)
from qfleet.engines.parameter_server.compression import Cast
from qfleet.engines.parameter_server.limits import MOST_GROWTH
from qfleet.engines.parameter_server.schemes import Nesterov
from qfleet.engines.parameter_server.shard import Exchange, Push, Receipt, Shard, Stamp, Welcome
from qfleet.engines.parameter_server.wire import Wire, from_wire, plain, to_wire, wire_from_plain

TICK_S = 0.02
"""How often a waiting call looks at the clock, for time windows."""
SPARE_CALLS = 8
"""Calls that a server answers beside those of workers that wait."""
OUTLIER_WINDOW = 100
"""Newest losses and norms that a gradient is judged by."""
THREADED_FROM = 2**20
"""Weights of a shard. A shorter step is over before other threads have begun, on busy cores."""
MOST_THREADS = 4
CASTS = {"fp16": torch.float16, "bf16": torch.bfloat16}


class Answer(NamedTuple):
    """What a worker hears after a message."""

    receipt: Receipt | None
    """None where nothing was sent, only waited."""
    waits: bool
    """The worker has to ask again: others have not come yet."""
    stamp: Stamp
    weights: Wire | None = None
    """None where they are the ones that the worker knows, or where it waits."""
    waited_s: float = 0.0
    """How long the call was kept here for others to come."""
    is_present: bool = True
    """False: the worker was given up as lost, and has to join again."""
    turn: int = 0
    """Of the worker's next gradient, as far as this shard knows."""


def make_admission(config: Config) -> Admission:
    admission: Admission
    if config.update in ("sync", "local-sgd", "admm"):
        admission = Sync(config.backup_workers)
    elif config.update == "ssp":
        admission = BoundedStaleness(config.staleness)
    elif config.update == "hybrid":
        k = config.hybrid_workers or max(1, config.workers // 2)
        admission = Hybrid(k, config.hybrid_window_s)
    else:
        admission = Async()
    if config.outlier_sigmas:
        admission = Outliers(admission, OUTLIER_WINDOW, config.outlier_sigmas)
    if config.max_gradient_age:
        admission = AgeLimit(admission, config.max_gradient_age)
    return admission


def calls_at_once(config: Config) -> int:
    """Calls that a server answers side by side: one, unless somebody may have to wait in his.

    Threads that take turns cost a push a tenth of its time.
    """
    nobody_waits = config.update in ("async", "easgd")
    return 1 if nobody_waits else MOST_GROWTH * config.workers + SPARE_CALLS


def make_shard_optimiser(config: Config, weights: Tensor) -> FlatOptimiser:
    """The configured one for gradients; for the schemes, what their servers do."""
    if config.update == "local-sgd":
        return Nesterov(weights, config.outer_momentum)
    if config.update in ("admm", "easgd"):
        return SGD()
    return make_optimiser(config.optimizer, weights, config.optimizer_eps)


class Server:
    def __init__(
        self,
        config: Config,
        weights: NDArray[Any],
        optimiser: StateDict | None = None,
        epoch: int = 0,
        snapshot: StateDict | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begins with ``weights`` and perhaps an optimiser's state, or goes on from a snapshot."""
        mine = torch.tensor(weights)
        wire = None
        if config.weight_compression != "none":
            wire = Cast(CASTS[config.weight_compression])
        made = make_shard_optimiser(config, mine)
        if optimiser is not None:
            made.load_state_dict(optimiser)
        self._shard = Shard(mine, made, make_admission(config), wire, epoch)
        self._clock = clock
        self._changed = Condition()
        self._lends = False
        """Answers have the shard's own weights, not copies: who asks reads them at once."""
        self._lives: dict[int, int] = {}
        """Of each worker: the one that is listened to. Those before it were given up."""
        if snapshot is not None:
            self._shard.restore(as_tensors(snapshot))
            # They come again by themselves; what they had sent is in the weights then.
            for worker in self._shard.present:
                self._shard.remove_worker(worker)

    # --- what workers call --------------------------------------------------------------------

    def join(self, worker: int, life: int = 0, turn: int = 0) -> Welcome:
        """``life`` counts those that had this number before; ``turn``: of its next gradient.

        One that was cut off may come back when another has its place: it is not let in.
        """
        with self._changed:
            now = self._lives.get(worker, 0)
            if life < now:
                raise GivenUp(
                    f"worker {worker} was given up, and its place is another's: life {life} "
                    f"comes after {now}; end it"
                )
            self._lives[worker] = life
            welcome: Welcome = self._watched(
                lambda: self._shard.add_worker(worker, turn, self._clock())
            )
            return welcome

    def ping(self) -> None:
        """Nothing: what a message costs that carries nothing."""

    def pull(self, known: Stamp | None) -> Answer:
        with self._changed:
            return self._with_weights(None, known, 0.0)

    def push(self, push: Push, gradient: Wire, patience_s: float, life: int = 0) -> Answer:
        """``push`` without its gradient, which comes beside it."""
        with self._changed:
            if not self._is_present(push.worker, life):
                return Answer(None, False, self._shard.stamp, is_present=False)
            whole = push._replace(gradient=from_wire(gradient))
            receipt = self._watched(lambda: self._shard.push(whole, self._clock()))
            return self._when_free(push.worker, life, receipt, push.based_on, patience_s)

    def wait(self, worker: int, known: Stamp | None, patience_s: float, life: int = 0) -> Answer:
        with self._changed:
            return self._when_free(worker, life, None, known, patience_s)

    def exchange(self, exchange: Exchange, weights: Wire, life: int = 0) -> Answer:
        """Elastic averaging; the answer's weights are the difference to be subtracted."""
        with self._changed:
            if not self._is_present(exchange.worker, life):
                return Answer(None, False, self._shard.stamp, is_present=False)
            whole = exchange._replace(weights=from_wire(weights))
            done = self._watched(lambda: self._shard.exchange(whole))
            moved = None if done.difference is None else to_wire(done.difference)
            return Answer(done.receipt, False, done.receipt.stamp, moved)

    # --- what the supervisor calls ------------------------------------------------------------

    def leave(self, worker: int, life: int = 0) -> Welcome:
        """Nobody waits for this worker any more; who comes back must be of this life or later.

        The answer is how far it has come.
        """
        with self._changed:
            if life >= self._lives.get(worker, 0):
                self._lives[worker] = life
                self._watched(lambda: self._shard.remove_worker(worker, self._clock()))
                self._changed.notify_all()
            return self._shard.heard_from(worker)

    def snapshot(self) -> StateDict:
        with self._changed:
            return as_arrays(self._shard.snapshot())

    def account(self) -> dict[str, Any]:
        """Counters, version, and the processor time of this process."""
        with self._changed:
            counted = self._shard.counters.state_dict()
            return {
                **counted,
                "epoch": self._shard.stamp.epoch,
                "version": self._shard.stamp.version,
                "present": sorted(self._shard.present),
                "processor_s": time.process_time(),
                "pid": os.getpid(),
            }

    # --- inside -------------------------------------------------------------------------------

    def _watched(self, act: Callable[[], Any]) -> Any:
        """Do something, and wake those that wait if there are new weights."""
        before = self._shard.stamp
        done = act()
        if self._shard.stamp != before:
            self._changed.notify_all()
        return done

    def _is_present(self, worker: int, life: int) -> bool:
        return worker in self._shard.present and life == self._lives.get(worker, 0)

    def _when_free(
        self,
        worker: int,
        life: int,
        receipt: Receipt | None,
        known: Stamp | None,
        patience_s: float,
    ) -> Answer:
        since_s = self._clock()
        until_s = since_s + patience_s
        while True:
            if not self._is_present(worker, life):
                return Answer(receipt, False, self._shard.stamp, is_present=False)
            if not self._shard.waits(worker):
                answer = self._with_weights(receipt, known, self._clock() - since_s)
                return answer._replace(turn=self._shard.turn(worker))
            left_s = until_s - self._clock()
            if left_s <= 0:
                return Answer(receipt, True, self._shard.stamp, waited_s=self._clock() - since_s)
            self._changed.wait(min(left_s, TICK_S))
            self._watched(lambda: self._shard.tick(self._clock()))

    def _with_weights(
        self, receipt: Receipt | None, known: Stamp | None, waited_s: float
    ) -> Answer:
        stamp, weights = self._shard.pull(known, lend=self._lends)
        return Answer(
            receipt, False, stamp, None if weights is None else to_wire(weights), waited_s
        )


class RemoteServer(Server):
    """A server in a process of its own: messages come and go as plain tuples (``wire.plain``)."""

    def __init__(self, config: Config, *others: Any) -> None:
        super().__init__(config, *others)
        torch.set_num_threads(_threads(config, self._shard.size))
        # Ray's thread that made a call also writes its answer down, before it makes the next one.
        self._lends = calls_at_once(config) == 1

    def ask(self, message: tuple[Any, ...]) -> Any:
        """A call of another method, as one argument: each costs Ray some time of its own."""
        method, *arguments = message
        if method == "push":
            (worker, sequence, based_on, *rest), gradient, patience_s, life = arguments
            push = Push(worker, sequence, Stamp(*based_on), *rest)
            return plain(self.push(push, wire_from_plain(gradient), patience_s, life))
        if method == "wait":
            worker, known, patience_s, life = arguments
            return plain(self.wait(worker, known and Stamp(*known), patience_s, life))
        if method == "exchange":
            exchange, weights, life = arguments
            return plain(self.exchange(Exchange(*exchange), wire_from_plain(weights), life))
        if method == "join":
            return plain(self.join(*arguments))
        if method == "pull":
            return plain(self.pull(*arguments))
        assert method == "ping", f"workers do not call {method}"
        return self.ping()


def answer_from_plain(value: Any) -> Any:
    """What ``RemoteServer`` meant: an ``Answer``, a ``Welcome``, or nothing."""
    if value is None or len(value) == len(Welcome._fields):
        return value and Welcome(*value)
    receipt, waits, stamp, weights, *rest = value
    if receipt is not None:
        at, *how = receipt
        receipt = Receipt(Stamp(*at), *how)
    return Answer(receipt, waits, Stamp(*stamp), wire_from_plain(weights), *rest)


def _threads(config: Config, weights: int) -> int:
    """Of an optimiser's step: several for a long vector, whose step is bound by memory."""
    if weights < THREADED_FROM:
        return 1
    return max(1, min(MOST_THREADS, (os.cpu_count() or 1) // config.servers))


def join_states(states: list[StateDict], sizes: list[int]) -> StateDict:
    """The optimisers' states of all shards as that of one; what is no vector is the first's."""
    joined: StateDict = {}
    for name in states[0]:
        values = [torch.as_tensor(state[name]) for state in states]
        whole = all(v.dim() == 1 and len(v) == n for v, n in zip(values, sizes, strict=True))
        joined[name] = torch.cat(values) if whole else values[0].clone()
    return joined


def cut_state(state: StateDict, size: int, part: slice) -> StateDict:
    """A shard's part of a joined state."""
    return {
        name: (value[part] if value.dim() == 1 and len(value) == size else value).clone()
        for name, value in state.items()
    }
