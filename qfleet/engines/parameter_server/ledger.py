"""Counts the gradients that are lost with a server. In: message numbers. Out: their number.

A server that dies loses the messages since its last snapshot. Workers number their messages to a
server and report the last number, and the snapshot has the last number that it includes: the
difference is lost. For a worker that died itself, the servers report its last number when it
leaves. Only if worker and server die together is the number unknown; that is counted too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping


class Ledger:
    """The account of one server over all its epochs, from one restore to the next."""

    def __init__(self) -> None:
        self._sent: dict[int, dict[int, int]] = defaultdict(dict)
        """By epoch and worker: messages sent until then, including those of earlier epochs."""
        self._kept: dict[int, Mapping[int, int]] = {}
        """By ended epoch and worker: messages in the snapshot that the next epoch began with."""
        self.unknown = 0
        """How often a worker died when its server could not report its last message number."""

    def record_sent(self, worker: int, sent: Mapping[int, int]) -> None:
        """Record the messages sent by a worker, by epoch. Reports may come late or twice."""
        for epoch, count in sent.items():
            known = self._sent[epoch]
            known[worker] = max(count, known.get(worker, 0))

    def restored(self, epoch: int, kept: Mapping[int, int]) -> None:
        """Record that the server of this epoch died and its successor has ``kept``, by worker."""
        self._kept[epoch] = dict(kept)

    @property
    def lost(self) -> int:
        """Messages that were sent and are in no weights."""
        return sum(
            max(0, count - kept.get(worker, 0))
            for epoch, kept in self._kept.items()
            for worker, count in self._sent[epoch].items()
        )
