"""Which rows of a dataset each worker reads: contiguous shares of every epoch, by speed.

In: the workers' measured speeds. Out: pieces of rows, each in one epoch's order or across its end.
Every epoch is divided in proportion to the speeds, so that all workers finish it together. A worker
that is done early takes rows from the end of the share that would be finished last. Every row is
in exactly one piece, in units of whole batches but for the last piece of a run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from qfleet.core.types import StateDict

FIRST_BATCHES = 8
"""Batches of a worker's first piece, whose speed is not known yet."""


class RowShares:
    def __init__(self, transitions: int, batch_size: int, rows: int, done: int = 0) -> None:
        """``rows`` of the endless order of all epochs are read; the first ``done`` were before."""
        self._transitions, self._batch_size, self._rows = transitions, batch_size, rows
        self._next = min(done, rows)
        """First row of what is not divided yet."""
        self._shares: dict[int, list[range]] = {}
        """Rows that each worker has not been given yet, in their order."""
        self._pieces: dict[int, range] = {}
        """Rows that each worker is reading."""
        self._free: list[range] = []
        """Rows of workers that are gone."""

    def take(self, worker: int, speeds: Mapping[int, float], slice_s: float) -> range | None:
        """Return the next rows of a worker; None: there are none left.

        ``speeds``: rows per second of all workers at work, 0 if not known. A piece takes about
        ``slice_s``.
        """
        assert worker not in self._pieces, "its last piece is not reported"
        share = self._shares.setdefault(worker, [])
        if not share and not self._find_rows(worker, speeds):
            return None
        speed = speeds.get(worker, 0.0)
        batches = int(speed * slice_s / self._batch_size) or 1
        size = self._batch_size * (batches if speed else FIRST_BATCHES)
        piece, rest = share[0][:size], share[0][size:]
        share[:1] = [rest] if rest else []
        self._pieces[worker] = piece
        return piece

    def _find_rows(self, worker: int, speeds: Mapping[int, float]) -> bool:
        """Give a worker without rows those of a lost worker, of the slowest, or of a new epoch."""
        share = self._shares[worker]
        if self._free:
            share.append(self._free.pop(0))
        elif not self._take_from_slowest(worker, speeds) and self._next < self._rows:
            self._divide_epoch(speeds)
        if not share and self._next < self._rows:  # too slow for a batch of a short epoch
            self._divide_epoch({worker: 1.0})
        return bool(share)

    def _divide_epoch(self, speeds: Mapping[int, float]) -> None:
        rest = self._transitions - self._next % self._transitions
        # The batch that reaches into the next epoch belongs to this one.
        batches, total, before = math.ceil(rest / self._batch_size), 0.0, self._next
        end = min(self._next + batches * self._batch_size, self._rows)
        rates = _rates(speeds)
        for worker, rate in rates.items():
            total += rate
            edge = round(batches * total / sum(rates.values())) * self._batch_size
            until = min(self._next + edge, end)
            if until > before:
                self._shares.setdefault(worker, []).append(range(before, until))
            before = until
        self._next = end

    def _take_from_slowest(self, worker: int, speeds: Mapping[int, float]) -> bool:
        """Move the end of the share that would be finished last, so that both finish together."""
        rates = _rates({**dict.fromkeys(self._shares, 0.0), **speeds})

        def time_left(other: int) -> float:
            rows = sum(len(one) for one in self._shares[other])
            return rows / rates[other] if rows >= 2 * self._batch_size else 0.0

        slowest = max(self._shares, key=time_left)
        if slowest == worker or not time_left(slowest):
            return False
        last = self._shares[slowest][-1]
        whole = math.ceil(len(last) / self._batch_size)
        batches = int(whole * rates[worker] / (rates[worker] + rates[slowest]))
        cut = (whole - batches) * self._batch_size
        if batches == 0:
            return False
        self._shares[slowest][-1] = last[:cut]
        self._shares[worker].append(last[cut:])
        if not cut:
            self._shares[slowest].pop()
        return True

    def report(self, worker: int, done: int) -> None:
        """Count a piece as read; rows after the first ``done`` of it are given out again."""
        rest = self._pieces.pop(worker, range(0))[max(done, 0) :]
        if rest:
            self._free.append(rest)

    def lose(self, worker: int) -> None:
        """Give the rows of a worker that is gone to others; none of its piece counts as read."""
        self.report(worker, 0)
        self._free += self._shares.pop(worker, [])

    def state_dict(self) -> StateDict:
        """Return the rows that are not read yet."""
        shares = [one for share in self._shares.values() for one in share]
        left = [*self._pieces.values(), *self._free, *shares]
        return {"next": self._next, "left": [[one.start, one.stop] for one in left]}

    def load_state_dict(self, state: StateDict) -> None:
        self._next = state["next"]
        self._free = [range(*one) for one in state["left"]]


def _rates(speeds: Mapping[int, float]) -> dict[int, float]:
    """Return the speeds; a worker whose speed is not known has the mean of the others."""
    known = [speed for speed in speeds.values() if speed]
    usual = sum(known) / len(known) if known else 1.0
    return {worker: speed or usual for worker, speed in sorted(speeds.items())}
