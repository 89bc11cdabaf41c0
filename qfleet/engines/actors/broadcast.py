"""The weights channel to many actors. In: versions; out: one flat vector, stored once for all."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from qfleet.agent.weights import FlatWeights
from qfleet.core.types import Lag
from qfleet.engines.actors.account import Account
from qfleet.engines.cluster.ray_cluster import Cluster

INTERVAL_S = 0.2
"""Shortest time between two versions: actors load a new one at most once per block."""


class Broadcast:
    def __init__(
        self,
        cluster: Cluster,
        source: FlatWeights,
        account: Account,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cluster, self._source, self._account, self._clock = cluster, source, account, clock
        self.lag = Lag()
        self.restart(0)

    def publish(self, version: int) -> None:
        if version > self.version and self._clock() - self._stored_s >= INTERVAL_S:
            self.restart(version)

    def refresh(self) -> int:
        return self.version

    def restart(self, version: int) -> None:
        # A copy: the learner changes its weights in place.
        weights = np.array(self._source.data.detach().cpu().numpy())
        self.reference: Any = self._cluster.put(weights)
        """Ray's reference of the weights; old ones are freed when no actor needs them."""
        self.version = version
        self._stored_s = self._clock()
        self._account.bytes_sent += weights.nbytes
        self._account.messages += 1
        self._account.broadcasts += 1
