"""Batches of requests. In: the observations of many requests; out: the answers of each.

A thread computes, so that requests are received meanwhile, and what has arrived while it computed a
batch is its next batch. So a request never waits for others, unless ``max_wait_s`` asks for it, and
batches grow with the load. (Small networks were tried in the event loop itself: the rate was the
same.)
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

from qfleet.core.errors import ConfigError, QfleetError, one_line
from qfleet.deploy.models import Answers, Model

STOP_S = 5.0
"""Seconds that a thread has to end. It does not keep the process alive if it takes longer."""


class Overloaded(QfleetError):
    """A request that cannot be answered now; it may be sent again."""


class Reply(NamedTuple):
    """The answers to one request: rows of a batch that the model ``version`` has computed."""

    batch: Answers
    rows: slice
    version: str


class _Request(NamedTuple):
    observations: NDArray[Any]
    action_masks: NDArray[Any] | None
    reply: asyncio.Future[Reply]


class Batcher:
    """Computes requests in batches, each with the model of that moment.

    ``model`` may be replaced at any time, by one that has the same signature: a batch in progress
    is finished by the model that began it. Only one event loop may call ``submit``.
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
        self.count = count
        self.pending = 0
        """Observations that were accepted and not answered yet."""
        self._max_batch, self._max_wait_s, self._max_queue = max_batch, max_wait_s, max_queue
        self._timeout_s = timeout_s
        self._waiting: collections.deque[tuple[float, asyncio.Future[Reply]]] = collections.deque()
        """Replies that are awaited, oldest first, with the time at which they are given up."""
        self._sweep_timer: asyncio.TimerHandle | None = None
        self._queue: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._compute_all, name="batcher", daemon=True)
        self._thread.start()

    def submit(
        self, observations: NDArray[Any], action_masks: NDArray[Any] | None
    ) -> asyncio.Future[Reply]:
        """Return the future reply to ``[B, …]`` valid observations.

        Raise Overloaded at the limit, and ConfigError for a request that is above it by itself.
        """
        if len(observations) > self._max_queue:
            raise ConfigError(
                f"a request must have at most {self._max_queue} observations, "
                f"got {len(observations)}; send them in parts"
            )
        if self.pending + len(observations) > self._max_queue:
            raise Overloaded(f"{self.pending} observations are waiting already; try again later")
        loop = asyncio.get_running_loop()
        reply: asyncio.Future[Reply] = loop.create_future()
        self.pending += len(observations)
        self._waiting.append((loop.time() + self._timeout_s, reply))
        if self._sweep_timer is None:
            self._sweep_timer = loop.call_later(self._timeout_s, self._sweep, loop)
        self._queue.put(_Request(observations, action_masks, reply))
        return reply

    @property
    def is_alive(self) -> bool:
        """Whether requests are computed: False if the thread has ended."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """Compute what is waiting, then end the thread."""
        self._queue.put(None)
        self._thread.join(STOP_S)

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

    def _compute_all(self) -> None:
        """Compute what is in the queue, until it holds None."""
        while (request := self._queue.get()) is not None:
            requests, until_s = [request], time.monotonic() + self._max_wait_s
            size = len(request.observations)
            while request is not None and size < self._max_batch:
                wait_s = max(0.0, until_s - time.monotonic()) if self._max_wait_s else 0.0
                try:
                    request = self._queue.get(block=wait_s > 0, timeout=wait_s)
                except queue.Empty:
                    break
                if request is None:
                    self._queue.put(None)  # stop after these
                else:
                    requests.append(request)
                    size += len(request.observations)
            loop = requests[0].reply.get_loop()
            for batch in self._batches(requests):
                loop.call_soon_threadsafe(self._deliver, batch, self._compute(batch))

    def _batches(self, requests: list[_Request]) -> list[list[_Request]]:
        """Split requests into batches of at most ``max_batch``, or of a single, larger request."""
        batches, size = [list[_Request]()], 0
        for request in requests:
            size += len(request.observations)
            if size > self._max_batch and batches[-1]:
                batches.append([])
                size = len(request.observations)
            batches[-1].append(request)
        return batches

    def _compute(self, batch: list[_Request]) -> list[Reply] | Overloaded:
        """Return the replies to a batch, computed by one model, or why there are none."""
        if all(request.reply.done() for request in batch):
            return Overloaded("all replies were given up")
        model, (observations, masks, _) = self.model, batch[0]
        try:
            if len(batch) > 1:
                observations = np.concatenate([request.observations for request in batch])
                if masks is not None:  # all have masks, or none has
                    masks = np.concatenate([np.asarray(request.action_masks) for request in batch])
            answers = self._answer(model, observations, masks)
            counts = len(answers.q_values), len(answers.actions)
            if counts != (len(observations),) * 2:
                raise ValueError(f"{counts} answers to {len(observations)} observations")
        except Exception as error:  # of a runtime: out of memory, a lost device …
            self.count("failures", 1.0)
            return Overloaded(f"the model failed: {one_line(error)}")
        self.count("batches", 1.0)
        self.count("observations", len(observations))
        replies, end = list[Reply](), 0
        for request in batch:
            begin, end = end, end + len(request.observations)
            replies.append(Reply(answers, slice(begin, end), model.version))
        return replies

    def _answer(
        self, model: Model, observations: NDArray[Any], masks: NDArray[Any] | None
    ) -> Answers:
        """Return a model's answers, in parts if a request is larger than a batch."""
        if len(observations) <= self._max_batch:
            return model(observations, masks)
        parts = []
        for begin in range(0, len(observations), self._max_batch):
            rows = slice(begin, begin + self._max_batch)
            parts.append(model(observations[rows], None if masks is None else masks[rows]))
        return Answers(
            np.concatenate([part.q_values for part in parts]),
            np.concatenate([part.actions for part in parts]),
        )

    def _deliver(self, batch: list[_Request], replies: list[Reply] | Overloaded) -> None:
        """Hand out replies, in the event loop."""
        self.pending -= sum(len(request.observations) for request in batch)
        self.count("pending", self.pending)
        for number, request in enumerate(batch):
            if request.reply.done():
                continue
            if isinstance(replies, Overloaded):
                request.reply.set_exception(replies)
            else:
                request.reply.set_result(replies[number])
        while self._waiting and self._waiting[0][1].done():
            self._waiting.popleft()
