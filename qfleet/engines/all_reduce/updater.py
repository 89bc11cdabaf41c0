"""The updater of a rank: average the gradient over all ranks, then take a step of one's own.

All ranks hold the same weights, receive the same bits and take the same step. If the gradient of
any rank is not finite then neither is the average, so that all ranks skip it together.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch
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
        waits: bool = False,
    ) -> None:
        """``share``: this rank's part of the samples of an update.

        ``waits``: the exchange needs the gradient on the host, which waits for an accelerator.
        """
        self._weights, self._local, self._ranks, self.exchange = weights, local, ranks, exchange
        self._share, self._timers, self._waits = share, timers, waits
        self.traffic = (0, 0)
        """Bytes and messages that this rank sends per update."""

    def apply(
        self, learning_rate: float | Tensor, loss: Callable[[], Tensor] | None = None
    ) -> Mapping[str, Tensor | float]:
        ranks = self._ranks
        if ranks.exchanges:
            if self._waits:
                torch.accelerator.synchronize()  # computing is not part of the exchange
            began_s, sent, messages = time.perf_counter(), ranks.bytes_sent, ranks.messages
            self.exchange.sum(self._weights.grad.mul_(self._share), ranks)
            ended_s = time.perf_counter()
            self.traffic = (ranks.bytes_sent - sent, ranks.messages - messages)
            self._timers.add("communicate", began_s, ended_s)
            self._timers.seconds["learn"] -= ended_s - began_s  # which is timed around this call
        return self._local.apply(learning_rate, loss)

    def compilables(self) -> list[Compilable]:
        return self._local.compilables()

    def state_dict(self) -> StateDict:
        return self._local.state_dict()

    def load_state_dict(self, state: StateDict) -> None:
        self._local.load_state_dict(state)
