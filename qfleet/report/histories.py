"""Histories of runs: metrics as growing columns, read as far as a run has written them.

In: run folders, whose files may be written at the same time. Out: numpy arrays per metric.
"""

from __future__ import annotations

import os
import re
from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qfleet.core.errors import ConfigError
from qfleet.core.files import open_regular
from qfleet.telemetry.formatting import finite
from qfleet.telemetry.runs import (
    EVAL_RETURN,
    ROLLOUT_RETURN,
    RunData,
    current_result,
    parse_metrics,
    read_object,
    run_name,
    summarise,
)

FloatArray = NDArray[np.float64]
UPDATES, ELAPSED_S, RATE = "train/n_updates", "time/time_elapsed", "time/fps"
KEPT = (
    EVAL_RETURN, ROLLOUT_RETURN, "rollout/exploration_rate", "train/loss", "train/q_mean",
    RATE, UPDATES, ELAPSED_S,
)  # fmt: skip
"""Metrics whose history is kept; of the others only the newest value."""
_OF_AGENT = re.compile(r"agent_(0|[1-9]\d{0,5})/(.+)")
READ_BYTES = 2**24
"""Bytes of metrics that are parsed at a time: rows take many times the memory of their columns."""
HEAD_BYTES = 512
"""Bytes by which a file is known again: its first rows have times."""


class History:
    """One run's configuration, result, newest metrics, and columns of the metrics in ``KEPT``.

    ``refresh`` reads what has been appended. An incomplete last line is left for the next time.
    """

    def __init__(self, folder: Path) -> None:
        self.run = RunData(folder, run_name(folder), {}, None, [])
        """Without rows of metrics."""
        self.last: dict[str, float] = {}
        """Newest value of each metric."""
        self._columns: dict[str, tuple[array[float], array[float]]] = {}
        self._stamps: dict[str, tuple[int, int, int]] = {}
        self._inode, self._head, self._read_bytes = -1, b"", 0

    def refresh(self) -> bool:
        """Read what is new; return whether anything is. Raises ConfigError without config.json."""
        changed = [self._read_objects(), self._read_metrics()]
        if not self.run.config:
            raise ConfigError(
                f"'{self.run.path}' is not a run folder: it has no readable config.json"
            )
        return any(changed)

    def _read_objects(self) -> bool:
        changed = False
        for name in ("config", "result"):
            path = self.run.path / f"{name}.json"
            stamp = _stamp(path)
            if stamp != self._stamps.get(name, ()):
                self._stamps[name] = stamp
                value = read_object(path)
                setattr(self.run, name, (value or self.run.config) if name == "config" else value)
                changed = True
        return changed

    def _read_metrics(self) -> bool:
        try:
            path = self.run.path / "metrics.jsonl"
            with open_regular(path) as file:
                status = os.fstat(file.fileno())
                # A resumed run replaces its file by one without the rows that it writes again; the
                # file of another run may get the number of a removed one.
                head, known = file.read(HEAD_BYTES), self._head
                is_same = status.st_ino == self._inode and head.startswith(known)
                self._head = head
                if not is_same or status.st_size < self._read_bytes:
                    self._inode, self._read_bytes = status.st_ino, 0
                    self._columns, self.last = {}, {}
                began = self._read_bytes
                file.seek(began)
                while chunk := file.read(READ_BYTES):
                    complete = chunk[: chunk.rfind(b"\n") + 1]
                    if len(chunk) == READ_BYTES and not complete:
                        complete = chunk  # no row is this long: it is not read again
                    if not complete:
                        break
                    self._read_bytes += len(complete)
                    self._add(parse_metrics(complete.decode(errors="replace")))
                    file.seek(self._read_bytes)
                return self._read_bytes > began
        except OSError:
            return False  # not written yet

    def _add(self, rows: Iterable[dict[str, Any]]) -> None:
        for row in rows:
            env_steps = row["env_steps"]
            for name, value in row.items():
                number = finite(value)
                if number is None:
                    continue
                self.last[name] = number
                agent = _OF_AGENT.fullmatch(name)
                if (agent[2] if agent else name) in KEPT:
                    steps, values = self._columns.setdefault(name, (array("d"), array("d")))
                    steps.append(env_steps)
                    values.append(number)

    @property
    def agents(self) -> list[int]:
        """Numbers of the agents of a population that have been logged."""
        found = (_OF_AGENT.fullmatch(name) for name in self._columns)
        return sorted({int(agent[1]) for agent in found if agent})

    def series(self, metric: str) -> tuple[FloatArray, FloatArray]:
        """Return env steps and values of a metric in ``KEPT`` or of an agent of a population."""
        steps, values = self._columns.get(metric, (array("d"), array("d")))
        return np.array(steps), np.array(values)

    def at_steps(self, metric: str, env_steps: FloatArray) -> FloatArray:
        """Return the values of a metric at given env steps, interpolated; NaN if it has none."""
        steps, values = self.series(metric)
        return (
            np.interp(env_steps, steps, values) if steps.size else np.full(env_steps.size, np.nan)
        )

    def summary(self) -> dict[str, Any]:
        """Return the run's score, speed and state."""
        evaluations, rates = (self.series(name)[1].tolist() for name in (EVAL_RETURN, RATE))
        return summarise(self.run, self._last_env_steps, evaluations, rates)

    @property
    def result(self) -> dict[str, Any]:
        """The run's result; empty while it trains, also after it was resumed."""
        return current_result(self.run, self._last_env_steps)

    @property
    def _last_env_steps(self) -> int | None:
        last = self.last.get("env_steps")
        return None if last is None else int(last)


def read_histories(folders: Iterable[Path]) -> list[History]:
    """Return the histories of run folders, read to their present ends."""
    histories = [History(folder) for folder in folders]
    for history in histories:
        history.refresh()
    return histories


def _stamp(path: Path) -> tuple[int, int, int]:
    """Return what changes whenever a file is replaced; zeros if there is none."""
    try:
        status = path.stat()
    except OSError:
        return (0, 0, 0)
    return (status.st_ino, status.st_size, status.st_mtime_ns)
