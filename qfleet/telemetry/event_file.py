"""A file of TensorBoard events that is written in this thread.

torch's SummaryWriter writes in a thread of its own, which ends with a traceback on the terminal and
loses what it had queued when the disk is full. Here each write succeeds or raises OSError.
"""

from __future__ import annotations

import io
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qfleet.core.files import append_bytes


class EventFile:
    """Events of one process. TensorBoard reads the files of a folder in the order of names."""

    def __init__(self, folder: Path, first_step: int) -> None:
        """``first_step``: TensorBoard hides what older files of the folder have from there on."""
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.0"
        self._path, self._first_step = folder / name, first_step

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        self._append({"step": step, "summary": Summary(value=values)})

    def write_hyperparameters(
        self, step: int, values: Mapping[str, Any], metrics: Mapping[str, float]
    ) -> None:
        """Write what the HPARAMS tab shows: the values of this run beside its final metrics."""
        from torch.utils.tensorboard.summary import hparams

        summaries = hparams(dict(values), dict(metrics))  # type: ignore[no-untyped-call]
        self._append(*({"summary": summary} for summary in summaries))
        self.write(step, metrics)

    def _append(self, *events: dict[str, Any]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        # Looked up each time: somebody may have deleted the file.
        if not self._path.exists() or not self._path.stat().st_size:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            start = SessionLog(status=SessionLog.START)
            head = {"file_version": "brain.Event:2"}
            events = (head, {"step": self._first_step, "session_log": start}, *events)
        data, now_s = io.BytesIO(), time.time()
        records = RecordWriter(data)
        for fields in events:
            records.write(Event(wall_time=now_s, **fields).SerializeToString())
        append_bytes(self._path, data.getvalue())
