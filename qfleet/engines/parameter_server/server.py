"""One server process: a shard that many workers call at once. In: requests. Out: replies.

``Server`` is a plain class that tests call directly, from several threads where workers wait for
each other. The shard itself never waits. A server holds the call of a worker that has to wait until
it may go on, so that the worker need not poll. Every wait ends: after ``patience_s`` the reply is
that the worker still has to wait.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from threading import Condition
from typing import Any, TypeVar

import torch
from numpy.typing import NDArray
from torch import Tensor

from qfleet.agent.updaters.optimisers import SGD, FlatOptimiser, make_optimiser
from qfleet.config.config import Config
from qfleet.core.cores import usable_cores
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
from qfleet.engines.parameter_server.compression import make_cast
from qfleet.engines.parameter_server.limits import MOST_GROWTH
from qfleet.engines.parameter_server.schemes import Nesterov
from qfleet.engines.parameter_server.shard import Shard
from qfleet.engines.parameter_server.updaters import fetches_for_each_gradient
from qfleet.engines.parameter_server.wire import (
    Exchange,
    Join,
    Ping,
    Pull,
    Push,
    Reply,
    Request,
    Wait,
    Welcome,
    decode,
    encode,
)

Result = TypeVar("Result")
TICK_S = 0.02
"""How often a waiting call reads the clock, for time windows."""
SPARE_CALLS = 8
"""Concurrent calls per server besides those of waiting workers."""
OUTLIER_WINDOW = 100
"""Number of newest losses and norms that a gradient is compared with."""
THREADED_FROM = 2**20
"""Weights of a shard. A shorter step is over before other threads have begun, on busy cores."""
MOST_THREADS = 4


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
    """Concurrent calls per server: 1, or several per worker when a call may block at a barrier.

    Threads that take turns cost a push a tenth of its time.
    """
    never_blocks = config.update in ("async", "easgd")
    return 1 if never_blocks else MOST_GROWTH * config.workers + SPARE_CALLS


def make_shard_optimiser(
    config: Config, weights: Tensor, factors: Tensor | None = None
) -> FlatOptimiser:
    """Return the configured optimiser, or the fixed one of a scheme (``schemes.py``)."""
    if config.update == "local-sgd":
        return Nesterov(weights, config.outer_momentum)
    if config.update in ("admm", "easgd"):
        return SGD()
    eps, decay = config.optimizer_eps, config.weight_decay
    return make_optimiser(config.optimizer, weights, eps, decay, factors)


class Server:
    def __init__(
        self,
        config: Config,
        weights: NDArray[Any],
        optimiser: StateDict | None = None,
        epoch: int = 0,
        snapshot: StateDict | None = None,
        rate_factors: NDArray[Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin with ``weights`` and perhaps an optimiser's state, or go on from a snapshot.

        ``rate_factors``: each weight's learning rate relative to the run's; None: all are alike.
        """
        mine = torch.tensor(weights)
        cast = make_cast(config.weight_compression)
        factors = None if rate_factors is None else torch.tensor(rate_factors)
        made = make_shard_optimiser(config, mine, factors)
        if optimiser is not None:
            made.load_state_dict(optimiser)
        self._shard = Shard(mine, made, make_admission(config), cast, epoch)
        self._clock = clock
        self._changed = Condition()
        self._fetched_later = fetches_for_each_gradient(config)
        self._lends = False
        """Replies hold the shard's own weights, not copies: the caller reads them at once."""
        self._lives: dict[int, int] = {}
        """By worker: its current life. Requests of earlier lives are ignored."""
        if snapshot is not None:
            self._shard.restore(as_tensors(snapshot))
            # The workers join again by themselves; the gradients kept of them are applied now.
            for worker in self._shard.present:
                self._shard.remove_worker(worker)

    # --- requests of workers ------------------------------------------------------------------

    def handle(self, request: Request) -> Any:
        """Call the method that has the name of the request."""
        return getattr(self, type(request).__name__.lower())(request)

    def join(self, request: Join) -> Welcome:
        """Refuse a worker that was cut off and comes back after another has taken its place."""
        worker, life, turn = request
        with self._changed:
            now = self._lives.get(worker, 0)
            if life < now:
                raise GivenUp(
                    f"worker {worker} was given up and replaced: its life is {life}, the current "
                    f"one is {now}; end this worker"
                )
            self._lives[worker] = life
            return self._watched(self._shard.add_worker, worker, turn, self._clock())

    def ping(self, request: Ping | None = None) -> Ping:
        """Return at once: proves that the process is alive."""
        del request
        return Ping()

    def pull(self, request: Pull) -> Reply:
        with self._changed:
            return self._shard.pull(request.known, self._lends)

    def push(self, push: Push) -> Reply:
        with self._changed:
            if not self._is_present(push.worker, push.life):
                return self._absent()
            done = self._watched(self._shard.push, push, self._clock())
            epoch, version = self._shard.stamp
            is_alone = version - push.version <= 1
            if self._fetched_later and not is_alone and not done.waits and epoch == push.epoch:
                # Others update meanwhile: these weights would be old before its next gradient,
                # for which it fetches newer ones. Until then it keeps those that it has.
                turn = self._shard.turn(push.worker)
                return Reply(*push.known, done.outcome, done.reason, turn=turn)
            return self._when_free(push, done.outcome, done.reason)

    def wait(self, wait: Wait) -> Reply:
        with self._changed:
            return self._when_free(wait)

    def exchange(self, exchange: Exchange) -> Reply:
        """Average elastically; the weights of the reply are the difference to subtract."""
        with self._changed:
            if not self._is_present(exchange.worker, exchange.life):
                return self._absent()
            return self._watched(self._shard.exchange, exchange)

    # --- calls of the supervisor --------------------------------------------------------------

    def leave(self, worker: int, life: int = 0) -> Welcome:
        """Remove the worker, and later accept only this life of it or a later one.

        Return the number of its next message.
        """
        with self._changed:
            if life >= self._lives.get(worker, 0):
                self._lives[worker] = life
                self._watched(self._shard.remove_worker, worker, self._clock())
                self._changed.notify_all()
            return self._shard.next_message(worker)

    def snapshot(self) -> StateDict:
        with self._changed:
            return as_arrays(self._shard.snapshot())

    def account(self) -> dict[str, Any]:
        """Return counters, version, and the processor time of this process."""
        with self._changed:
            return {
                **self._shard.counters.state_dict(),
                "epoch": self._shard.stamp.epoch,
                "version": self._shard.stamp.version,
                "present": sorted(self._shard.present),
                "processor_s": time.process_time(),
                "pid": os.getpid(),
            }

    # --- inside -------------------------------------------------------------------------------

    def _watched(self, act: Callable[..., Result], *arguments: Any) -> Result:
        """Call ``act``, and wake the waiting calls if it made new weights."""
        before = self._shard.stamp
        result = act(*arguments)
        if self._shard.stamp != before:
            self._changed.notify_all()
        return result

    def _is_present(self, worker: int, life: int) -> bool:
        return worker in self._shard.present and life == self._lives.get(worker, 0)

    def _absent(self, outcome: str = "", reason: str = "") -> Reply:
        return Reply(*self._shard.stamp, outcome, reason, is_present=False)

    def _when_free(self, request: Push | Wait, outcome: str = "", reason: str = "") -> Reply:
        """Reply when the worker may go on, was removed, or has waited ``patience_s``."""
        shard, worker, since_s = self._shard, request.worker, self._clock()
        while self._is_present(worker, request.life):
            waited_s = self._clock() - since_s
            if not shard.waits(worker):
                reply = shard.pull(request.known, self._lends)
                turn = shard.turn(worker)
                return reply._replace(outcome=outcome, reason=reason, waited_s=waited_s, turn=turn)
            if waited_s >= request.patience_s:
                return Reply(*shard.stamp, outcome, reason, True, None, waited_s)
            self._changed.wait(min(request.patience_s - waited_s, TICK_S))
            self._watched(shard.tick, self._clock())
        return self._absent(outcome, reason)


class RemoteServer(Server):
    """A server in a process of its own. Messages come and go encoded (``wire.encode``)."""

    def __init__(self, config: Config, *others: Any) -> None:
        super().__init__(config, *others)
        torch.set_num_threads(threads_for(config, self._shard.size))
        # Ray's thread that made a call also serialises its reply, before it makes the next one.
        self._lends = calls_at_once(config) == 1

    def ask(self, message: tuple[Any, ...]) -> tuple[Any, ...]:
        """Handle one request. It is one argument, because every argument costs Ray some time."""
        return encode(self.handle(decode(message)))


def threads_for(config: Config, weights: int) -> int:
    """Return the threads of an optimiser's step: several for a long vector (memory-bound).

    They get the cores that the workers leave: between two steps they do not sleep for a while.
    """
    if weights < THREADED_FROM:
        return 1
    left = usable_cores() - (0 if config.address else config.workers)
    return max(1, min(MOST_THREADS, left // config.servers))


def join_states(states: list[StateDict], sizes: list[int]) -> StateDict:
    """Concatenate the optimiser states of all shards; other values are those of the first."""
    joined: StateDict = {}
    for name in states[0]:
        values = [torch.as_tensor(state[name]) for state in states]
        whole = all(v.dim() == 1 and len(v) == n for v, n in zip(values, sizes, strict=True))
        joined[name] = torch.cat(values) if whole else values[0].clone()
    return joined


def cut_state(state: StateDict, size: int, part: slice) -> StateDict:
    """Return a shard's slice of a joined state."""
    return {
        name: (value[part] if value.dim() == 1 and len(value) == size else value).clone()
        for name, value in state.items()
    }
