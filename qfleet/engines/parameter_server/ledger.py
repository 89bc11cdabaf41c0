"""Gradients that were lost with a server: counted, not guessed. In: what was heard; out: a number.

A server that dies takes along what it was sent since its last snapshot. Nobody can ask it any more,
but the workers know how far they had come: they number their messages to a server and tell with
every report which came last, and the snapshot says which of them it has. The difference is lost. Of
a worker that died itself the servers tell, when they are told that it left. Only where worker and
server died at once, neither of them can be asked; that is counted too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping


class Ledger:
    """Of one server, over all its epochs: from one restore to the next."""

    def __init__(self) -> None:
        self._heard: dict[int, dict[int, int]] = defaultdict(dict)
        """By epoch and worker: messages that it had sent by then, those of earlier epochs too."""
        self._kept: dict[int, Mapping[int, int]] = {}
        """By epoch that has ended: how many of each worker the next one began with."""
        self.unknown = 0
        """Times that a worker died when its server could not be asked how far it had come."""

    def heard(self, worker: int, sent: Mapping[int, int]) -> None:
        """By epoch: so many messages this worker has sent. News may come late, or twice."""
        for epoch, count in sent.items():
            known = self._heard[epoch]
            known[worker] = max(count, known.get(worker, 0))

    def restored(self, epoch: int, kept: Mapping[int, int]) -> None:
        """The server of this epoch died; its successor knows so many messages of each worker."""
        self._kept[epoch] = dict(kept)

    @property
    def lost(self) -> int:
        """Messages that were sent and are in no weights."""
        return sum(
            max(0, count - kept.get(worker, 0))
            for epoch, kept in self._kept.items()
            for worker, count in self._heard[epoch].items()
        )
