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
"""Least time between two versions: actors take over a new one once per block, at most."""


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
        self._store(0)

    def publish(self, version: int) -> None:
        if version > self.version and self._clock() - self._stored_s >= INTERVAL_S:
            self._store(version)

    def restart(self, version: int) -> None:
        self._store(version)

    def refresh(self) -> int:
        return self.version

    def _store(self, version: int) -> None:
        # A copy: the learner goes on with these very weights.
        weights = np.array(self._source.data.detach().cpu().numpy())
        self.reference: Any = self._cluster.put(weights)
        """Stands for the weights; old ones are let go when no actor needs them any more."""
        self.version = version
        self._stored_s = self._clock()
        self._account.sent(weights.nbytes)
        self._account.messages += 1
        self._account.broadcasts += 1
