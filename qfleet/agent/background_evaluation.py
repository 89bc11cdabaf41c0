"""Evaluation in the background: a thread plays a copy of the weights while the learner goes on.

In: an evaluator of a network of its own, and the weights of the learner. Out: an ``Evaluation`` of
the weights at the moment of ``start``. Everything that the thread queues on an accelerator goes to
a stream of its own.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeAlias

import torch

from qfleet.accelerator.streams import has_streams, stream_of
from qfleet.agent.evaluation import Evaluation, GiveUp
from qfleet.agent.weights import FlatWeights
from qfleet.telemetry.timers import Timers

_Result: TypeAlias = "Future[Evaluation | None]"
CLOSE_S = 5.0
"""Most seconds for the thread to end its evaluation and close its environments."""


class BackgroundEvaluator:
    """Plays one evaluation at a time. One thread plays and closes: some environments need that."""

    def __init__(
        self,
        play: Callable[[GiveUp], Evaluation | None],
        source: FlatWeights,
        weights: FlatWeights,
        timers: Timers,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        """``play`` evaluates the network of ``weights``, into which ``source`` is copied.

        ``close`` closes what ``play`` has opened.
        """
        self._play, self._close, self._source = play, close, source
        self._device = device = weights.data.device
        self.weights, self.timers = weights, timers
        self._stream = stream_of(device) if has_streams(device) else None
        self._under_way: _Result | None = None
        self._jobs: queue.SimpleQueue[tuple[_Result, GiveUp] | None] = queue.SimpleQueue()
        self._is_closing = False
        # A daemon: the process must end even if an environment hangs.
        self._thread = threading.Thread(target=self._work, name="evaluator", daemon=True)
        self._thread.start()

    def start(self, give_up: GiveUp) -> None:
        """Copy the weights and begin to play them; ``give_up`` is called in the thread."""
        assert self._under_way is None, "result() first: an evaluation is under way"
        self.weights.mirror(self._source)
        if self._stream is not None:
            self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        self._under_way = Future()
        self._jobs.put((self._under_way, give_up))

    def _work(self) -> None:
        with self._stream or contextlib.nullcontext():
            while (job := self._jobs.get()) is not None:
                self._evaluate(*job)
        self._close()

    def _evaluate(self, future: _Result, give_up: GiveUp) -> None:
        began_s = time.perf_counter()
        try:
            evaluation = self._play(lambda done: self._is_closing or give_up(done))
            self.timers.add("evaluate", began_s, time.perf_counter())
            future.set_result(evaluation)
        except BaseException as error:  # ``result`` raises it again
            future.set_exception(error)

    @property
    def is_done(self) -> bool:
        return self._under_way is not None and self._under_way.done()

    def result(self) -> Evaluation | None:
        """Wait for the evaluation under way; None if it was given up."""
        assert self._under_way is not None, "start() first"
        future, self._under_way = self._under_way, None
        return future.result()

    def play(self, give_up: GiveUp) -> Evaluation | None:
        """Play the weights of this moment, and wait for it."""
        self.start(give_up)
        return self.result()

    def close(self) -> None:
        """Give up what is under way, and end the thread."""
        self._is_closing = True
        self._jobs.put(None)
        self._thread.join(CLOSE_S)
