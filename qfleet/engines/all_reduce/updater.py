"""The updater of a rank: average the gradient over all ranks, then take a step of one's own.

All ranks hold the same weights, receive the same bits and take the same step. If the gradient of
any rank is not finite then neither is the average, so that all ranks skip it together.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from torch import Tensor

from qfleet.accelerator.compiling import Compilable
from qfleet.agent.weights import FlatWeights
from qfleet.core.types import StateDict, Updater
from qfleet.engines.all_reduce.compression import Exchange, Ranks
from qfleet.telemetry.timers import Timers


class AllReduceUpdater(Updater):
    def __init__(
        self,
        weights: FlatWeights,
        local: Updater,
        ranks: Ranks,
        exchange: Exchange,
        share: float,
        timers: Timers,
    ) -> None:
        """``share``: this rank's part of the samples of an update."""
        self._weights, self._local, self._ranks, self._exchange = weights, local, ranks, exchange
        self._share, self._timers = share, timers

    def apply(
        self, learning_rate: float | Tensor, loss: Callable[[], Tensor] | None = None
    ) -> Mapping[str, Tensor | float]:
        if self._ranks.size > 1:
            began_s = time.perf_counter()
            self._exchange.sum(self._weights.grad.mul_(self._share), self._ranks)
            ended_s = time.perf_counter()
            self._timers.add("communicate", began_s, ended_s)
            self._timers.seconds["learn"] -= ended_s - began_s  # which is timed around this call
        return self._local.apply(learning_rate, loss)

    def compilables(self) -> list[Compilable]:
        return self._local.compilables()

    def state_dict(self) -> StateDict:
        return self._local.state_dict()

    def load_state_dict(self, state: StateDict) -> None:
        self._local.load_state_dict(state)
