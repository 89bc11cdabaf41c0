"""The recorder: blocks of a run in, a dataset out, written by a thread.

``add`` copies a block into a chunk of memory. A full chunk goes to the thread, which cuts it into
pieces of one environment each and writes them.
"""

from __future__ import annotations

import functools
import queue
import threading
import time
from collections.abc import Callable
from secrets import token_hex
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from qfleet.config.config import Config
from qfleet.core.errors import QfleetError, one_line
from qfleet.core.types import (
    FIRST,
    SKIP,
    TERMINATED,
    Block,
    Collector,
    EnvSpec,
    Episode,
    StateDict,
)
from qfleet.data.manifest import Origin
from qfleet.data.rows import Rows, complete, concatenate, row_bytes
from qfleet.data.writer import Writer

CHUNK_BYTES, LEAST_CHUNK_ROWS, MOST_CHUNK_ROWS = 64 * 2**20, 32, 4096
"""Size of a chunk. Up to three of them are in memory: one is filled, one waits, one is written."""
WRITE_TIMEOUT_S = 300.0
"""Longest time that a full chunk, or the end of a run, waits for the thread."""
FINISH_S = 60.0
"""Seconds after which a file is finished, full or not: the most that a kill loses."""
COLUMNS = ("obs", "action", "reward", "flags", "probability")


class _Open(NamedTuple):
    """The newest rows of all environments, ``[rows, N, …]``, which a next chunk continues."""

    rows: Rows
    written: int
    """Rows that are written already; frame stacks of later ones may need them."""


class Recorder:
    """Writes blocks to a dataset. A failure is reported once and ends the recording only.

    A store that does not answer is no failure: files wait for it on this machine.
    """

    def __init__(
        self, writer: Writer, spec: EnvSpec, num_envs: int, on_fault: Callable[[str, str], None]
    ) -> None:
        self._writer, self._spec, self._num_envs = writer, spec, num_envs
        self._on_fault = on_fault
        rows = CHUNK_BYTES // (num_envs * row_bytes(spec))
        self._chunk_rows = max(LEAST_CHUNK_ROWS, min(rows, MOST_CHUNK_ROWS))
        self._chunk, self._filled = self._new_chunk(), 0
        self._open: _Open | None = None
        self._chunks: queue.Queue[Block | None] = queue.Queue(maxsize=1)
        self.failure: str | None = None
        """Why the recording has ended early."""
        self._reported = self._is_away = False
        self._handed_s = self._finished_s = time.monotonic()
        self._thread = threading.Thread(target=self._write_chunks, daemon=True, name="recorder")
        self._thread.start()

    def _new_chunk(self) -> Block:
        shape = (self._chunk_rows, self._num_envs)
        return Block(
            obs=torch.empty((*shape, *self._spec.frame_shape), dtype=self._spec.torch_dtype),
            action=torch.empty(shape, dtype=torch.int64),
            reward=torch.empty(shape),
            flags=torch.empty(shape, dtype=torch.uint8),
            probability=torch.full(shape, torch.nan),
        )

    def add(self, block: Block) -> None:
        """Copy a block; wait for the thread if it is more than a chunk behind."""
        start = 0
        while start < block.rows and self.failure is None:
            stop = min(block.rows, start + self._chunk_rows - self._filled)
            into = slice(self._filled, self._filled + stop - start)
            for name in COLUMNS:
                column = getattr(block, name)
                if column is not None:
                    getattr(self._chunk, name)[into].copy_(column[start:stop])
            self._filled, start = into.stop, stop
            is_due = time.monotonic() - self._handed_s >= FINISH_S
            # The first chunk has all rows that ``_begin`` may mark.
            is_due &= self._open is not None or self._filled >= self._spec.frame_stack - 1
            if self._filled == self._chunk_rows or is_due:
                self._hand_over()
        self._report()

    def _hand_over(self) -> None:
        columns = {name: getattr(self._chunk, name)[: self._filled] for name in COLUMNS}
        self._put(Block(**columns))
        self._chunk, self._filled, self._handed_s = self._new_chunk(), 0, time.monotonic()

    def _put(self, chunk: Block | None) -> None:
        try:
            self._chunks.put(chunk, timeout=WRITE_TIMEOUT_S)
        except queue.Full:
            self.failure = f"the storage took no rows for {WRITE_TIMEOUT_S:g} s"

    def _report(self) -> None:
        if self.failure is not None and not self._reported:
            self._reported = True
            self._on_fault("record", f"recording ended, training goes on: {self.failure}")
        away = self._writer.upload_failure
        if away and not self._is_away:
            self._on_fault("record", f"recorded on this machine only, until it answers: {away}")
        self._is_away = bool(away)

    def close(self) -> None:
        """Write what is left, and the manifest; later calls do nothing."""
        if not self._thread.is_alive():
            return
        if self._filled:
            self._hand_over()
        self._put(None)
        self._thread.join(WRITE_TIMEOUT_S)
        if self._thread.is_alive():
            self.failure = (
                f"the manifest was not complete after {WRITE_TIMEOUT_S:g} s; make it with: "
                f"qfleet data merge {self._writer.url}"
            )
        self._report()

    # --- the thread ---------------------------------------------------------------------------

    def _write_chunks(self) -> None:
        while (chunk := self._chunks.get()) is not None:
            self._try(functools.partial(self._write_chunk, chunk))
        self._try(self._finish)

    def _try(self, write: Callable[[], None]) -> None:
        """Write unless an earlier write failed; ``add`` then need not wait for the thread."""
        if self.failure is None:
            try:
                write()
            except Exception as error:  # whatever it is, it must not end the training
                self.failure = str(error) if isinstance(error, QfleetError) else one_line(error)

    def _write_chunk(self, chunk: Block) -> None:
        self._write(self._continue(chunk), ends=False)
        if (
            time.monotonic() - self._finished_s >= FINISH_S / 2
        ):  # chunks come at most FINISH_S apart
            self._writer.finish_file()
            self._finished_s = time.monotonic()

    def _finish(self) -> None:
        if self._open is not None:
            self._write(self._open, ends=True)
        self._writer.close()

    def _continue(self, chunk: Block) -> _Open:
        """Return the rows of a chunk behind those that are open, with episodes and steps."""
        assert chunk.probability is not None
        flags = chunk.flags.numpy()
        count, envs = flags.shape
        inside = np.zeros(envs, np.bool_)
        if self._open is None:
            inside = flags[0] & FIRST == 0
            flags = self._begin(flags)
            episode = self._writer.first_episode + np.arange(envs) - envs
            step = np.full(envs, -1)
        else:
            episode, step = self._open.rows.episode[-1], self._open.rows.step[-1]
        first = flags & FIRST != 0
        episodes = episode + envs * first.cumsum(axis=0)
        row = np.arange(count)[:, None]
        opened = np.maximum.accumulate(np.where(first, row, -1), axis=0)
        steps = np.where(opened < 0, step + 1 + row, row - opened)
        # Step 0 is the beginning of an episode: where that was not recorded, steps begin with 1.
        steps += inside & (opened == 0)
        rows = Rows(
            chunk.obs.numpy(), chunk.action.numpy(), chunk.reward.numpy(), flags,
            np.zeros(flags.shape, np.bool_), episodes, steps, chunk.probability.numpy(),
        )  # fmt: skip
        if self._open is None:
            return _Open(rows, 0)
        return _Open(concatenate([self._open.rows, rows]), self._open.written)

    def _begin(self, flags: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Mark the first rows of the recording as the first of episodes.

        In the middle of an episode (a resumed run) the frames before them are unknown: rows whose
        stacks need these are no transitions.
        """
        flags = flags.copy()
        incomplete = self._spec.frame_stack - 1
        known = np.logical_or.accumulate(flags[:incomplete] & FIRST != 0, axis=0)
        flags[:incomplete] |= np.where(known, 0, SKIP).astype(np.uint8)
        flags[0] |= FIRST
        return flags

    def _write(self, now: _Open, ends: bool) -> None:
        """Write all rows but the newest two, which say how the rows before them ended.

        ``ends``: write these too; the newest row then has no next observation.
        """
        rows, behind = now.rows, self._spec.frame_stack - 1
        flags = rows.flags.copy()
        total = len(flags)
        if ends:
            flags[-1] |= np.where(flags[-1] & TERMINATED, 0, SKIP).astype(np.uint8)
        # An episode that did not terminate is followed by its last observation, then by another.
        ended = np.ones((2, self._num_envs), np.bool_)
        skip = np.concatenate((flags & SKIP != 0, ended[:1]))[1:]
        first = np.concatenate((flags & FIRST != 0, ended))[2:]
        usable = flags & (SKIP | TERMINATED) == 0
        rows = rows._replace(flags=flags, truncated=usable & skip & first)
        stop = total if ends else max(now.written, total - 2)
        for env in range(self._num_envs if stop > now.written else 0):
            of_env = Rows(*(column[:, env] for column in rows))
            self._writer.add(complete(of_env, now.written, stop, self._spec.frame_stack))
        keep = max(0, stop - behind)
        kept = Rows(*(column[keep:].copy() for column in now.rows))
        self._open = _Open(kept, stop - keep)


def make_recorder(
    config: Config, spec: EnvSpec, num_envs: int, on_fault: Callable[[str, str], None]
) -> Recorder:
    """Return the recorder of a run, or of one of its processes; their names never coincide."""
    names = ("algo", "engine", "seed", "exploration_initial_eps", "exploration_final_eps")
    policy = {name: getattr(config, name) for name in names}
    origin = Origin.of(config, spec, {"training": True, **policy})
    return Recorder(Writer(config.record, origin, token_hex(4)), spec, num_envs, on_fault)


class RecordingCollector:
    """A collector whose blocks are recorded."""

    def __init__(self, collector: Collector, recorder: Recorder) -> None:
        self._collector, self._recorder = collector, recorder

    def collect(self, rows: int) -> Block:
        block = self._collector.collect(rows)
        self._recorder.add(block)
        return block

    def take_episodes(self) -> list[Episode]:
        return self._collector.take_episodes()

    def exploration_rate(self) -> float:
        return self._collector.exploration_rate()

    def state_dict(self) -> StateDict:
        return self._collector.state_dict()

    def load_state_dict(self, state: StateDict) -> bool:
        return self._collector.load_state_dict(state)
