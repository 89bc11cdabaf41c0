"""Evaluation beside training: a thread plays a copy of the weights while the learner learns on.

In: an evaluator of a network of its own, and the weights of the learner. Out: an ``Evaluation`` of
the weights at the moment of ``start``. Everything that the thread queues on an accelerator goes to
a stream of its own.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

import torch

from qfleet.accelerator.streams import has_streams, stream_of
from qfleet.agent.evaluation import Evaluation, GiveUp
from qfleet.agent.weights import FlatWeights
from qfleet.telemetry.timers import Timers

CLOSE_S = 5.0
"""Most seconds for an evaluation to end at the end of a run."""


class Beside:
    """Plays one evaluation at a time in a thread."""

    def __init__(
        self,
        play: Callable[[GiveUp], Evaluation | None],
        source: FlatWeights,
        weights: FlatWeights,
        timers: Timers,
    ) -> None:
        """``play`` evaluates the network of ``weights``, into which ``source`` is copied."""
        self._play, self._source = play, source
        self._device = device = weights.data.device
        self.weights, self.timers = weights, timers
        self._stream = stream_of(device) if has_streams(device) else None
        self._under_way: Future[Evaluation | None] | None = None
        self._thread: threading.Thread | None = None
        self._closing = False

    def start(self, give_up: GiveUp) -> None:
        """Copy the weights and begin to play them; ``give_up`` is called in the thread."""
        assert self._under_way is None, "result() first: an evaluation is under way"
        self.weights.mirror(self._source)
        if self._stream is not None:
            self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        self._under_way = Future()
        # A daemon: the process must end even if an environment hangs.
        self._thread = threading.Thread(
            target=self._work, args=(self._under_way, give_up), name="evaluator", daemon=True
        )
        self._thread.start()

    def _work(self, future: Future[Evaluation | None], give_up: GiveUp) -> None:
        began_s = time.perf_counter()
        try:
            with self._stream or contextlib.nullcontext():
                evaluation = self._play(lambda done: self._closing or give_up(done))
            self.timers.add("evaluate", began_s, time.perf_counter())
            future.set_result(evaluation)
        except BaseException as error:  # ``result`` raises it again
            future.set_exception(error)

    def play(self, give_up: GiveUp) -> Evaluation | None:
        """Play the weights of this moment, and wait for it."""
        self.start(give_up)
        return self.result()

    @property
    def is_done(self) -> bool:
        return self._under_way is not None and self._under_way.done()

    def result(self) -> Evaluation | None:
        """Wait for the evaluation under way; None if it was given up."""
        assert self._under_way is not None, "start() first"
        future, self._under_way = self._under_way, None
        return future.result()

    def close(self) -> None:
        self._closing = True
        if self._thread is not None:
            self._thread.join(CLOSE_S)
