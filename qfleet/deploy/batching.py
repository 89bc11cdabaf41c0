"""Batches of requests. In: the observations of many requests; out: the answers of each.

One thread per model computes. What has arrived while it computed a batch is its next batch, so a
request never waits for others unless ``max_wait_s`` asks for it, and batches grow with the load.
"""

from __future__ import annotations

import asyncio
import collections
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from qfleet.core.errors import QfleetError, one_line
from qfleet.deploy.models import Answers, Model


class Overloaded(QfleetError):
    """A request that cannot be computed now; it may be sent again."""


class Reply(NamedTuple):
    """The answers to one request, all of them by the model ``version``."""

    answers: Answers
    version: str


class _Request(NamedTuple):
    observations: NDArray[Any]
    action_masks: NDArray[Any] | None
    reply: asyncio.Future[Reply]


class Batcher:
    """Computes requests in batches, each with the model of that moment.

    ``model`` may be replaced at any time, by one that has the same signature: a batch in progress
    is finished by the model that began it. ``submit`` must be called by one event loop only.
    """

    def __init__(
        self,
        model: Model,
        max_batch: int = 256,
        max_wait_s: float = 0.0,
        max_queue: int = 4096,
        timeout_s: float = 10.0,
        count: Callable[[str, float], None] = lambda _kind, _amount: None,
    ) -> None:
        """``max_batch``, ``max_queue``: numbers of observations; ``count`` adds to metrics."""
        self.model = model
        self.pending = 0
        """Observations that were accepted and not answered yet."""
        self.count = count
        self._max_batch, self._max_wait_s, self._max_queue = max_batch, max_wait_s, max_queue
        self._timeout_s = timeout_s
        self._waiting: collections.deque[tuple[float, asyncio.Future[Reply]]] = collections.deque()
        """Replies that are awaited, oldest first, with the time at which they are given up."""
        self._sweep_timer: asyncio.TimerHandle | None = None
        # In C: put and get take about 0.2 µs, without a lock of Python's.
        self._queue: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._compute_all, name="batcher", daemon=True)
        self._thread.start()

    def submit(
        self, observations: NDArray[Any], action_masks: NDArray[Any] | None
    ) -> asyncio.Future[Reply]:
        """Return the future reply to ``[B, …]`` valid observations; raise Overloaded at the limit.

        A request with more observations than the limit is accepted if nothing else is pending.
        """
        if self.pending and self.pending + len(observations) > self._max_queue:
            raise Overloaded(f"{self.pending} observations are waiting already; try again later")
        loop = asyncio.get_running_loop()
        reply: asyncio.Future[Reply] = loop.create_future()
        self.pending += len(observations)
        self._waiting.append((loop.time() + self._timeout_s, reply))
        if self._sweep_timer is None:
            self._sweep_timer = loop.call_later(self._timeout_s, self._sweep, loop)
        self._queue.put(_Request(observations, action_masks, reply))
        return reply

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        """Give up replies that take too long. One timer for all: one each took 8 µs a request."""
        waiting, now_s = self._waiting, loop.time()
        while waiting and (waiting[0][1].done() or waiting[0][0] <= now_s):
            _, reply = waiting.popleft()
            if not reply.done():
                reply.set_exception(Overloaded(f"no answer within {self._timeout_s:g} s"))
        self._sweep_timer = None
        if waiting:
            self._sweep_timer = loop.call_at(waiting[0][0], self._sweep, loop)

    def stop(self) -> None:
        """Compute what is waiting, then end the thread."""
        self._queue.put(None)
        self._thread.join()

    def _compute_all(self) -> None:
        request = self._queue.get()
        while request is not None:
            batch, request = self._gather(request)
            # A request that waits no longer: its time is over, or its client has gone.
            live = [one for one in batch if not one.reply.done()]
            replies = self._compute(live) if live else []
            self.count("batches", float(bool(live)))
            loop = batch[0].reply.get_loop()
            loop.call_soon_threadsafe(self._deliver, batch, live, replies)
            request = request or self._queue.get()

    def _gather(self, first: _Request) -> tuple[list[_Request], _Request | None]:
        """Return a batch that begins with ``first``, and the request that did not fit, if any."""
        batch, size, until_s = [first], len(first.observations), 0.0
        if self._max_wait_s:
            until_s = time.monotonic() + self._max_wait_s
        while size < self._max_batch:
            try:
                wait_s = until_s - time.monotonic() if until_s else 0.0
                request = self._queue.get(block=wait_s > 0, timeout=max(wait_s, 0.0))
            except queue.Empty:
                break
            if request is None:  # stop after this batch
                self._queue.put(None)
                break
            size += len(request.observations)
            if size > self._max_batch:
                return batch, request
            batch.append(request)
        return batch, None

    def _compute(self, batch: list[_Request]) -> list[Reply] | Overloaded:
        """Return the replies to a batch, computed by one model, or why there are none."""
        model = self.model
        observations, masks = batch[0].observations, batch[0].action_masks
        if len(batch) > 1:
            observations = np.concatenate([request.observations for request in batch])
            if masks is not None:
                masks = np.concatenate([request.action_masks for request in batch])
        try:
            parts = [
                model(observations[rows], None if masks is None else masks[rows])
                for rows in self._slices(len(observations))
            ]
        except Exception as error:  # of a runtime: out of memory, a lost device …
            self.count("failures", 1.0)
            return Overloaded(f"the model failed: {one_line(error)}")
        self.count("observations", float(len(observations)))
        q_values, actions = parts[0].q_values, parts[0].actions
        if len(parts) > 1:
            q_values = np.concatenate([part.q_values for part in parts])
            actions = np.concatenate([part.actions for part in parts])
        replies, begin = [], 0
        for request in batch:
            rows = slice(begin, begin + len(request.observations))
            replies.append(Reply(Answers(q_values[rows], actions[rows]), model.version))
            begin = rows.stop
        return replies

    def _slices(self, count: int) -> list[slice]:
        """Only a single request can be larger than a batch."""
        return [slice(begin, begin + self._max_batch) for begin in range(0, count, self._max_batch)]

    def _deliver(
        self, batch: list[_Request], live: list[_Request], replies: list[Reply] | Overloaded
    ) -> None:
        """Hand out replies, in the event loop."""
        answered = sum(len(request.observations) for request in batch)
        self.pending -= answered
        self.count("pending", self.pending)
        for number, request in enumerate(live):
            if request.reply.done():
                continue
            if isinstance(replies, Overloaded):
                request.reply.set_exception(replies)
            else:
                request.reply.set_result(replies[number])
        while self._waiting and self._waiting[0][1].done():
            self._waiting.popleft()
