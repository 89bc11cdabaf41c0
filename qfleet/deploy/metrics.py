"""Metrics of a policy server, in the text format of Prometheus.

They live in memory that all worker processes share: each worker adds to a row of its own, without
locks, and whichever worker is asked sums the rows. A worker that is restarted continues its row.
"""

from __future__ import annotations

import bisect
import multiprocessing
from collections.abc import Sequence

KINDS = {
    "observations": "counter", "batches": "counter", "failures": "counter", "reloads": "counter",
    "reload_failures": "counter", "pending": "gauge",
}  # fmt: skip
"""Numbers per model. failures: batches that the model could not compute; pending: observations
that were accepted and not answered yet."""
STATUSES = (200, 400, 401, 404, 405, 408, 413, 415, 422, 431, 500, 503, "other")
BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


class Metrics:
    """Counters, and histograms of the seconds from a request's headers to its reply."""

    def __init__(self, models: Sequence[str], workers: int = 1) -> None:
        self._models, self._first = tuple(models), 0
        keys: list[tuple[str, object]] = [("status", status) for status in STATUSES]
        for model in models:
            kinds = [*KINDS, "seconds", *(f"bucket {i}" for i in range(len(BUCKETS_S) + 1))]
            keys += [(kind, model) for kind in kinds]
        self._columns = {key: column for column, key in enumerate(keys)}
        self._cells = multiprocessing.get_context("spawn").RawArray("d", workers * len(keys))

    def begin_worker(self, number: int) -> None:
        """Make this process worker ``number``; what an earlier one had pending is lost."""
        self._first = number * len(self._columns)
        for model in self._models:
            self.count(model, "pending", 0.0)

    def count(self, model: str, kind: str, amount: float) -> None:
        """Add to a counter, or set a gauge."""
        cell = self._first + self._columns[kind, model]
        before = self._cells[cell] if KINDS[kind] == "counter" else 0.0
        self._cells[cell] = before + amount

    def add_reply(self, status: int) -> None:
        key = ("status", status if status in STATUSES else "other")
        self._cells[self._first + self._columns[key]] += 1.0

    def add_time(self, model: str, seconds: float) -> None:
        """Count a reply in a histogram."""
        bucket = self._first + self._columns["bucket 0", model]
        self._cells[bucket + bisect.bisect_left(BUCKETS_S, seconds)] += 1.0
        self._cells[bucket - 1] += seconds

    def total(self, kind: str, label: object) -> float:
        """Return the sum over all workers."""
        width = len(self._columns)
        return float(sum(self._cells[self._columns[kind, label] :: width]))

    def render(self) -> str:
        lines = ["# TYPE qfleet_responses_total counter"]
        lines += [
            f'qfleet_responses_total{{status="{status}"}} {self.total("status", status):g}'
            for status in STATUSES
        ]
        for kind, sort in KINDS.items():
            name = f"qfleet_{kind}{'_total' if sort == 'counter' else ''}"
            lines.append(f"# TYPE {name} {sort}")
            for model in self._models:
                lines.append(f'{name}{{model="{model}"}} {self.total(kind, model):.15g}')
        lines.append("# TYPE qfleet_request_seconds histogram")
        for model in self._models:
            count = 0.0
            for number, bound in enumerate((*BUCKETS_S, "+Inf")):
                count += self.total(f"bucket {number}", model)
                labels = f'model="{model}",le="{bound}"'
                lines.append(f"qfleet_request_seconds_bucket{{{labels}}} {count:.15g}")
            labels = f'model="{model}"'
            lines.append(f"qfleet_request_seconds_sum{{{labels}}} {self.total('seconds', model):g}")
            lines.append(f"qfleet_request_seconds_count{{{labels}}} {count:.15g}")
        return "\n".join([*lines, ""])
