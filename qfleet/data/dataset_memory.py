"""The memory of offline training: every transition of a dataset once per epoch, in bounded RAM.

An epoch is a random order of the row groups, cut into windows that fit into the memory given. A
window is a replay ring, so that n-step returns, frame stacks and bootstrapping are those of the
ring; its transitions are drawn in random order, without replacement, while a thread loads the next
window. The order depends on the dataset, the seed, the epoch and the size of windows alone: not on
the number of reader threads, and not on where a run was stopped and resumed.
"""

from __future__ import annotations

import functools
import itertools
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, wait
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from qfleet.accelerator.compiling import Compilable
from qfleet.core.errors import ConfigError, DataError
from qfleet.core.types import BATCH_FIELDS, SKIP, Batch, Block, StateDict
from qfleet.data.manifest import Dataset, Part
from qfleet.data.rows import PartFile, Rows, row_bytes
from qfleet.data.writer import GROUP_BYTES
from qfleet.memory.ring import Ring
from qfleet.memory.samplers import UniformSampler

T = TypeVar("T")

READ_TIMEOUT_S = 600.0
"""Longest time that training waits for a row group."""
CLOSE_S = 3.0
"""Longest time that the end waits for readers. One whose storage hangs is left; without the wait,
18 of 25 processes with daemon threads inside of pyarrow aborted as Python ended."""
MOST_READERS = 4
BLANK_ROWS = 1024
RESERVED_BYTES = (5 + 4 * MOST_READERS) * GROUP_BYTES
"""Memory besides the windows: of each reader a row group in the file, decoded and checked, and what
allocators keep. It does not depend on the number of readers, so that the windows do not either."""

# Rows of a file are only copied from; a writable copy of each would take as much memory again.
warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)


class GroupAt(NamedTuple):
    """A row group, by its file and its place there."""

    part: Part
    group: int

    @property
    def rows(self) -> int:
        return self.part.groups[self.group][0]

    @property
    def transitions(self) -> int:
        return self.part.groups[self.group][1]


class Window(NamedTuple):
    ring: Ring
    usable: Tensor
    """Rows of the ring that are transitions, in the order of the ring."""
    order: Tensor
    """The same in the order in which they are drawn."""


class BatchShare(NamedTuple):
    """A rank's part of every batch: ``size`` samples from ``first`` on, of ``of`` samples."""

    first: int
    size: int
    of: int


@dataclass
class _Filled:
    ring: Ring
    total_rows: int = 0
    """Rows written into it so far; it wraps around."""


class _Threads:
    """Calls in daemon threads: unlike an executor's, one that hangs does not keep Python alive."""

    def __init__(self) -> None:
        self._under_way = set[Future[Any]]()
        self._is_closed, self._lock = False, threading.Lock()

    def start(self, function: Callable[[], T]) -> Future[T]:
        future = Future[T]()
        with self._lock:  # what begins before the end is waited for
            if self._is_closed:
                raise CancelledError("the memory is closed")
            self._under_way.add(future)
        future.add_done_callback(self._under_way.discard)

        def call() -> None:
            try:
                future.set_result(function())
            except BaseException as error:  # ``result`` raises it
                future.set_exception(error)

        threading.Thread(target=call, daemon=True).start()
        return future

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
        wait(list(self._under_way), CLOSE_S)


class DatasetMemory:
    def __init__(
        self,
        dataset: Dataset,
        n_steps: int,
        gamma: float,
        memory_bytes: int,
        readers: int,
        seed: int,
        device: torch.device,
        rewards: Callable[[Tensor], Tensor],
        share: BatchShare | None = None,
    ) -> None:
        """``memory_bytes`` is the most that rows take; ``rewards`` maps those that were recorded.

        The rows are on ``device``. ``share``: the part of every batch that is drawn here.
        """
        self._share = share
        self.device, self._dataset, self._rewards = device, dataset, rewards
        self._n_steps, self._gamma, self._seed = n_steps, gamma, seed
        groups = [
            GroupAt(part, i) for part in dataset.manifest.parts for i in range(len(part.groups))
        ]
        self._groups = [group for group in groups if group.transitions]
        self.transitions = sum(group.transitions for group in self._groups)
        if not self.transitions:
            raise DataError(f"dataset '{dataset.url}' has no transitions; record some")
        # Besides the columns of the ring, 16 bytes for the order.
        per_row, usable_bytes = row_bytes(dataset.spec) + 16, memory_bytes - RESERVED_BYTES
        total = sum(group.rows for group in self._groups)
        fits = total * per_row <= usable_bytes
        self._window_rows = total if fits else usable_bytes // per_row // 2
        largest = max(group.rows for group in self._groups)
        if self._window_rows < largest:
            least = (2 * largest * per_row + RESERVED_BYTES) // 2**20 + 1
            raise ConfigError(
                f"data_memory_mb must be ≥ {least} for '{dataset.url}', got "
                f"{memory_bytes // 2**20}; raise it"
            )
        self.epoch, self._window, self._offset = 0, 0, 0
        """Where the next transition is: ``_offset`` counts transitions of the window."""
        self._total_rows = 0
        # Two rings in turn, because a new one for each window would leave the old one to Python's
        # garbage collector, which may run much later.
        capacity = max(self._window_rows, n_steps + dataset.spec.frame_stack)
        self._rings = [_Filled(self._make_ring(capacity)) for _ in range(1 if fits else 2)]
        self._loads = 0
        self._plan = self._plan_of(0)
        self._threads, self._readers = _Threads(), readers
        self._close_threads = weakref.finalize(self, self._threads.close)  # also as Python ends
        self._current: Window | None = None
        self._loading: Future[Window] | None = None
        self._newest_load: Future[Window] | None = None
        """The load that began last, also if rows were skipped since; None: no load is left."""
        self._env = torch.zeros((), dtype=torch.int64, device=device)

    # --- the order ----------------------------------------------------------------------------

    def _plan_of(self, epoch: int) -> list[list[GroupAt]]:
        """Return the row groups of each window of an epoch."""
        if len(self._rings) == 1:
            return [self._groups]
        order = np.random.default_rng([self._seed, epoch]).permutation(len(self._groups))
        windows, rows = [list[GroupAt]()], 0
        for group in (self._groups[i] for i in order):
            if rows + group.rows > self._window_rows:
                windows.append([])
                rows = 0
            windows[-1].append(group)
            rows += group.rows
        return windows

    def go_to_row(self, row: int) -> None:
        """Go to a row of the endless order of all epochs."""
        if row != self.epoch * self.transitions + self.position:
            self._go_to(*divmod(row, self.transitions))

    def _go_to(self, epoch: int, transition: int) -> None:
        whole = self._current if len(self._plan) == 1 else None  # all is in memory
        self.epoch, self._window, self._offset = epoch, 0, transition
        self._plan = self._plan_of(epoch)
        for window in self._plan[:-1]:
            size = sum(group.transitions for group in window)
            if self._offset < size:
                break
            self._offset -= size
            self._window += 1
        self._current, self._loading = None, None
        if whole is not None:
            self._current = self._shuffled(*whole[:2], epoch, 0)

    @property
    def position(self) -> int:
        """Transitions of this epoch that were drawn."""
        before = self._plan[: self._window]
        return self._offset + sum(group.transitions for window in before for group in window)

    # --- windows ------------------------------------------------------------------------------

    def _advance(self) -> Window:
        """Return the window with the next transition; begin to load the one behind it."""
        if self._current is not None:
            if self._offset < len(self._current.order):
                return self._current
            self._offset, self._window = 0, self._window + 1
            if self._window == len(self._plan):
                self._window, self.epoch = 0, self.epoch + 1
                self._plan = self._plan_of(self.epoch)
        if len(self._plan) == 1 and self._current is not None:  # all is in memory
            self._current = self._shuffled(*self._current[:2], self.epoch, 0)
            return self._current
        loading = self._loading or self._load(self.epoch, self._window, self._plan[self._window])
        self._current = loading.result()  # no limit: the load has one for each of its row groups
        self._newest_load = None
        if len(self._plan) > 1:
            last = self._window + 1 == len(self._plan)
            epoch, window = (self.epoch + 1, 0) if last else (self.epoch, self._window + 1)
            plan = self._plan_of(epoch) if last else self._plan
            self._loading = self._load(epoch, window, plan[window])
        return self._current

    def _make_ring(self, capacity: int) -> Ring:
        sampler = UniformSampler(torch.Generator(device=self.device))  # not drawn from
        spec = self._dataset.spec
        ring = Ring(spec, 1, capacity, self._n_steps, self._gamma, sampler, self.device)
        # The row after a terminated one may not be written yet: its values count 0 times, but NaN
        # would count.
        for start in range(0, ring.rows, BLANK_ROWS):
            rows = min(BLANK_ROWS, ring.rows - start)
            blank = torch.zeros((rows, 1, *spec.frame_shape), dtype=spec.torch_dtype)
            ring.write_frames(start, blank.to(self.device))
        return ring

    def _load(self, epoch: int, window: int, groups: Sequence[GroupAt]) -> Future[Window]:
        """Begin to load a window into the ring that is not in use."""
        into = self._rings[self._loads % len(self._rings)]
        self._loads += 1
        before = filter(None, [self._newest_load])

        def read() -> Window:
            wait(before)  # it may fill the same ring
            return self._read_window(epoch, window, groups, into)

        self._newest_load = self._threads.start(read)
        return self._newest_load

    def _read_window(
        self, epoch: int, window: int, groups: Sequence[GroupAt], into: _Filled
    ) -> Window:
        usable = list[Tensor]()
        for read in self._read(groups):
            block = self._block(read)
            into.ring.extend(block)
            rows = (block.flags.view(-1) & SKIP == 0).nonzero().view(-1)
            usable.append((rows + into.total_rows) % into.ring.rows)
            into.total_rows += block.rows
        return self._shuffled(into.ring, torch.cat(usable).to(self.device), epoch, window)

    def _read(self, groups: Sequence[GroupAt]) -> Iterator[Rows]:
        """Yield the rows of the groups in their order; each reader has one group in flight."""
        reads = (functools.partial(self._read_group, group) for group in groups)
        started = map(self._threads.start, reads)
        waiting = list(itertools.islice(started, self._readers))
        while waiting:
            try:
                yield waiting.pop(0).result(READ_TIMEOUT_S)
            except TimeoutError:
                raise DataError(
                    f"dataset '{self._dataset.url}' gave no rows for {READ_TIMEOUT_S:g} s; check "
                    "its storage and resume the run"
                ) from None
            waiting += itertools.islice(started, 1)

    def _read_group(self, at: GroupAt) -> Rows:
        return PartFile(at.part, self._dataset.local(at.part), self._dataset.spec).read(at.group)

    def _block(self, rows: Rows) -> Block:
        columns = [
            torch.from_numpy(column).unsqueeze(1)
            for column in (rows.obs, rows.action.astype(np.int64), rows.reward, rows.flags)
        ]
        if self.device.type == "cuda":
            columns = [column.pin_memory() for column in columns]
        obs, action, reward, flags = columns
        return Block(obs, action, self._rewards(reward), flags)

    def _shuffled(self, ring: Ring, usable: Tensor, epoch: int, window: int) -> Window:
        draws = np.random.default_rng([self._seed, epoch, window]).permutation(len(usable))
        return Window(ring, usable, usable[torch.from_numpy(draws).to(self.device)])

    # --- the interface of memories ------------------------------------------------------------

    def extend(self, block: Block) -> None:
        """Count the rows: an offline run collects nothing, and its clock counts rows read."""
        self._total_rows += block.rows

    def can_sample(self) -> bool:
        return True

    def sample(self, count: int, _beta: float | Tensor) -> Batch:
        """Return the next ``count`` transitions of the order, also across the end of an epoch.

        With a share, ``count`` is that of this share, and the rest of every batch is passed over.
        """
        pieces, share, drawn = list[Batch](), self._share, 0
        count = count if share is None else count // share.size * share.of
        while drawn < count:
            window = self._advance()
            rows = window.order[self._offset : self._offset + count - drawn]
            self._offset += len(rows)
            drawn += len(rows)
            if share is not None:
                place = torch.arange(drawn - len(rows), drawn, device=self.device) % share.of
                rows = rows[(place >= share.first) & (place < share.first + share.size)]
            pieces.append(window.ring.gather(rows, self._env))
        if len(pieces) == 1:
            return pieces[0]
        return Batch(*(torch.cat([getattr(one, name) for one in pieces]) for name in BATCH_FIELDS))

    def in_file_order(self, rows: Tensor) -> Batch:
        """Return transitions by their places in the files; the dataset must fit into memory."""
        window = self._advance()
        assert len(self._plan) == 1, "the dataset is read in windows"
        return window.ring.gather(window.usable[rows], self._env)

    def update_priorities(self, index: Tensor, priority: Tensor) -> None:
        """Do nothing: every transition is drawn once per epoch."""

    def generators(self) -> list[torch.Generator]:
        return []

    def compilables(self) -> list[Compilable]:
        return []

    def end_open_episodes(self) -> None:
        """Do nothing: a dataset has no open episodes."""

    def close(self) -> None:
        """Stop reading; a reader whose storage does not answer is left after ``CLOSE_S``."""
        self._close_threads()
        self._current = self._loading = self._newest_load = None

    def state_dict(self) -> StateDict:
        return {
            "total_rows": self._total_rows,
            "epoch": self.epoch,
            "position": self.position,
            "dataset": self._dataset.manifest.sha256,
            "window_rows": self._window_rows,
        }

    def load_state_dict(self, state: StateDict) -> None:
        self._dataset.check_same(state["dataset"])
        if state["window_rows"] != self._window_rows:
            raise DataError(
                f"'{self._dataset.url}' has windows of another size than when the checkpoint was "
                "written; resume with the same data_memory_mb"
            )
        self._total_rows = state["total_rows"]
        self._go_to(state["epoch"], state["position"])
