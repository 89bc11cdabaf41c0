"""The connection between ranks, which carries orders and states and finds lost ranks.

Rank 0 gives orders, one per turn of the loop; the other ranks wait for them as long as it takes,
because rank 0 also evaluates and saves. Everything else that ranks exchange has a deadline,
``worker_timeout_s``. A thread of every rank writes a sign of life into the store each second. So a
rank that waits for a lost rank 0 ends, and after a failed exchange the lost rank is named.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from qfleet.core.errors import ClusterError, ConfigError, RankLost, one_line
from qfleet.engines.all_reduce.messages import receive_state, send_state
from qfleet.engines.all_reduce.world import (
    LOOPBACK,
    World,
    count_restarts,
    listen_locally,
    start_rank,
)

START_S = 180.0
"""Deadline of the start of all ranks, which import torch and make their environments."""
TUNED_S = 900.0
"""Deadline of the slowest rank's tuning, which may compile."""
LEAVE_S = 10.0
"""Deadline of the end of NCCL, which waits for what a lost rank owes it."""
BEAT_S = 1.0
"""Most seconds between two signs of life."""
FOREVER = timedelta(days=1000)
CONNECTION = re.compile(
    "time.?out|timed out|connect|peer|broken pipe|socket|unreachable|no route|is down", re.I
)
"""In errors that a rank has because another is lost, or late."""
GONE = "rank 0 is lost: it ended, or it cannot be reached"
RUN, END = "run/{}", "end"
"""Key of a run's configuration in the store, and its value when there are no more runs."""


class Order(IntEnum):
    STOP = 0
    GO = 1
    SEND_STATE = 2
    SEND_REPORT = 3
    TAKE_STATE = 4
    SEND_PIECE = 5
    FORWARD = 6


class Group:
    """All ranks of a run, as one of them sees them."""

    def __init__(
        self,
        world: World,
        run: int,
        timeout_s: float,
        store: Store,
        started: Sequence[subprocess.Popen[bytes]] = (),
    ) -> None:
        """``run`` counts the runs of these ranks; ``started`` are the ranks that this one began."""
        self.rank, self.size = world.rank, world.size
        self._world, self._started, self._timeout_s = world, started, timeout_s
        self._beat_s = min(BEAT_S, timeout_s / 10)
        self._prefix = f"run-{run}"
        self._store = PrefixStore(self._prefix, store)
        self._orders: Any = None
        self.has_nccl = False
        """Whether every rank learns on a GPU of its own, so that NCCL connects them."""
        self.shares_gpus = False
        """Whether two ranks learn on one GPU."""
        self.is_tuning = False
        """Whether this rank is measured alone, without exchanges."""
        self._passed = 0
        """Number of exchanges that this rank has begun, of those that all make equally often."""
        self._heard_s = dict[int, float]()
        """When a rank that this one listens to gave its newest sign of life."""
        self._closed = threading.Event()
        self._is_closing = False
        self.exchange_s = 0.0
        """Seconds in exchanges, waiting for slower ranks and for orders included."""

    # --- start and end ------------------------------------------------------------------------

    def connect(self, device: torch.device) -> None:
        """Wait until all ranks are ready, and connect them. ``device``: where this rank learns."""
        is_gpu = device.type == "cuda" and dist.is_nccl_available()
        self._run_thread(self._beat)
        gpus = self.meet("start", str(_gpu_id(device)) if is_gpu else "")
        self.shares_gpus = all(gpus) and len(set(gpus)) < self.size
        if dist.is_initialized():
            raise ConfigError(
                "torch.distributed is already initialised in this process, which --engine "
                "all-reduce does itself; call destroy_process_group first"
            )
        self.has_nccl = all(gpus) and not self.shares_gpus
        self._heard_s = dict.fromkeys(
            range(1, self.size) if self.rank == 0 else [0], time.monotonic()
        )
        if self.rank or self.has_nccl:
            # A rank does not see that a connection breaks while it waits for its GPU, or for other
            # ranks to be connected.
            self._run_thread(self._watch)
        shows_errors = sys.excepthook
        # The rest of the time is for finding out who is lost.
        limit = timedelta(seconds=0.75 * self._timeout_s)
        with self.exchange(), _on_loopback(self._world):
            dist.init_process_group(
                "gloo",
                store=PrefixStore("ranks", self._store),
                rank=self.rank,
                world_size=self.size,
                timeout=limit,
            )
            # The others wait for an order as long as rank 0 evaluates or saves.
            wait = FOREVER if self.rank else limit
            self._orders = dist.new_group(timeout=wait, backend="gloo")
        sys.excepthook = shows_errors  # torch's own puts the rank before every line

    def _run_thread(self, work: Callable[[], None]) -> None:
        threading.Thread(target=work, name=f"rank {self.rank}", daemon=True).start()

    def meet(self, what: str, words: str, limit_s: float = START_S) -> list[str]:
        """Wait until all ranks have done this; return what each of them says."""
        self.arrive(what, words)
        self.await_ranks(what, range(self.size), limit_s)
        return [self._store.get(f"{what}/{rank}").decode() for rank in range(self.size)]

    def arrive(self, what: str, words: str = "") -> None:
        """Say that this rank has done this: "start", "tune" …"""
        self._store.set(f"{what}/{self.rank}", words)

    def await_ranks(self, what: str, ranks: Iterable[int], limit_s: float) -> None:
        """Wait until these ranks have done this."""
        until_s = time.monotonic() + limit_s
        while missing := [r for r in ranks if not self._store.check([f"{what}/{r}"])]:
            for rank in missing:
                if loss := self._why_ended(rank) or self._why_silent(rank):
                    raise RankLost(f"rank {rank} of {self.size} did not {what}: {loss}")
            if time.monotonic() > until_s:
                raise RankLost(
                    f"rank {missing[0]} of {self.size} did not {what} within {limit_s:g} s; look "
                    "at what it printed, and start as many ranks as --workers says"
                )
            time.sleep(0.02)

    def close(self, error: BaseException | None = None) -> None:
        """Leave; ``error`` is what ended this rank, which the other ranks then report."""
        if self._closed.is_set():
            return
        self._is_closing = True
        with contextlib.suppress(RuntimeError):  # the store may be gone
            if error is not None and not (self.rank and isinstance(error, RankLost)):
                self._store.set(f"end/{self.rank}", one_line(error))
            self._store.set(f"left/{self.rank}", "")
            if self.rank == 0 and error is not None:
                self._let_others_leave()
                for process in self._started:
                    process.kill()  # a stopped one too
        self._closed.set()
        if self._orders is not None:
            leaving = threading.Thread(target=_destroy_groups, daemon=True)
            leaving.start()
            leaving.join(LEAVE_S)

    def _let_others_leave(self) -> None:
        """Keep the store for a moment, until the other ranks have read which rank is lost."""
        until_s = time.monotonic() + 5 * self._beat_s
        while time.monotonic() < until_s:
            others = range(1, self.size)
            if all(self._store.check([f"left/{rank}"]) for rank in others):
                return
            time.sleep(0.02)

    @property
    def is_closed(self) -> bool:
        return self._closed.is_set()

    # --- exchanges ----------------------------------------------------------------------------

    def open_channels(self, every: Sequence[Sequence[int]], backend: str) -> Any:
        """Connect the ranks of each list; return the channel of this rank's list."""
        # Before an exchange of NCCL, which has its own deadline, a rank may compile.
        limit = timedelta(seconds=0.75 * self._timeout_s) if backend == "gloo" else None
        with self.exchange(), _on_loopback(self._world):
            # All ranks make all of them: torch asks for that.
            channels = [dist.new_group(list(r), timeout=limit, backend=backend) for r in every]
        return next(c for c, ranks in zip(channels, every, strict=True) if self.rank in ranks)

    def give_order(self, order: Order, number: float = 0.0) -> None:
        """Tell all other ranks what to do (rank 0).

        ``number``: of GO, the factor of the learning rate; of SEND_PIECE, which one; of FORWARD,
        how many observations follow; of other orders, the rank meant.
        """
        if self.size > 1:
            with self.exchange():
                message = torch.tensor([order, number], dtype=torch.float64)
                dist.broadcast(message, 0, group=self._orders)

    def take_order(self) -> tuple[Order, float]:
        """Wait until rank 0 says what to do."""
        message = torch.zeros(2, dtype=torch.float64)
        with self.exchange():
            dist.broadcast(message, 0, group=self._orders)
        return Order(int(message[0])), float(message[1])

    def send_state(self, state: Any, rank: int) -> None:
        with self.exchange(of_all=False):
            send_state(state, rank)

    def receive_state(self, rank: int) -> Any:
        with self.exchange(of_all=False):
            return receive_state(rank)

    @contextlib.contextmanager
    def exchange(self, of_all: bool = True) -> Iterator[None]:
        """Time what is exchanged inside, and find the rank that is lost if it fails."""
        self._passed += of_all
        began_s = time.perf_counter()
        try:
            yield
        except RuntimeError as error:  # what gloo and the store raise, and faults of this rank
            if not isinstance(error, dist.DistError) and not CONNECTION.search(str(error)):
                raise
            raise self._find_lost(error) from None
        finally:
            self.exchange_s += time.perf_counter() - began_s

    # --- who is lost --------------------------------------------------------------------------

    def _beat(self) -> None:
        """Write a sign of life each second; on other ranks than 0, also look for that of rank 0."""
        beats, newest, store = 0, dict[int, bytes](), None
        while not self._closed.wait(self._beat_s):
            beats += 1
            try:
                # A connection of its own: the other one may wait.
                store = store or PrefixStore(self._prefix, connect(self._world, serves=False))
                store.set(f"beat/{self.rank}", f"{beats} {self._passed}")
                if self.rank > 0 and store.check(["end/0"]):
                    self._exit(f"rank 0 ended: {store.get('end/0').decode()}")
                heard = [r for r in self._heard_s if store.check([f"beat/{r}"])]
                found = {rank: store.get(f"beat/{rank}") for rank in heard}
            except (RuntimeError, ClusterError):
                if self.rank > 0:
                    self._exit(GONE)
                self._heard_s.clear()  # nobody is heard from here on, lost or not
                return
            for rank, beat in found.items():
                if beat != newest.get(rank):
                    newest[rank], self._heard_s[rank] = beat, time.monotonic()

    def _watch(self) -> None:
        """End this rank if one is silent; a store that is stopped with rank 0 answers no call."""
        while not self._closed.wait(self._beat_s):
            for rank in list(self._heard_s):
                if why := self._why_silent(rank):
                    self._exit(f"rank {rank} is lost: {why}")

    def _why_silent(self, rank: int) -> str | None:
        now_s = time.monotonic()
        silent_s = now_s - self._heard_s.get(rank, now_s)
        return f"no sign of life for {self._timeout_s:g} s" if silent_s > self._timeout_s else None

    def _exit(self, why: str) -> None:
        """End this rank, whose main thread may wait for ever."""
        # Unless it is about to say so itself. Rank 0 serves the store, which others may wait for.
        is_ending = self._is_closing and self.rank == 0
        if not self._closed.wait(2 * self._beat_s) and not is_ending:
            for process in self._started:
                process.kill()  # a stopped one too
            sys.stderr.write(f"qfleet: rank {self.rank}: {why}\n")
            sys.stderr.flush()
            os._exit(RankLost.exit_code)

    def _find_lost(self, error: BaseException) -> RankLost:
        """Return which rank is lost; the survivor that finds it first tells all others."""
        try:
            others = [rank for rank in range(self.size) if rank != self.rank]
            before = self._beats(others)
            time.sleep(2.5 * self._beat_s)
            loss = self._describe_lost(others, before) or (
                f"the connection to a rank broke: {one_line(error)}"
            )
            # Only the first answer counts: a rank that has found the loss ends, which looks like
            # another loss to slower ones.
            loss = self._store.compare_set("lost", "", loss).decode()
        except RuntimeError:
            loss = GONE
        return RankLost(f"{loss}; continue from the last checkpoint with: qfleet resume")

    def _describe_lost(self, others: Sequence[int], before: dict[int, bytes]) -> str | None:
        after = self._beats(others)
        for rank in others:
            if why := self._why_ended(rank):
                return f"rank {rank} of {self.size} is lost: {why}"
        for rank in others:
            if before[rank] == after[rank]:
                text = "it was killed or stopped, or cannot be reached"
                return f"rank {rank} of {self.size} is lost: {text}"
        passed = {rank: int(beat.split()[1]) for rank, beat in after.items()}
        last = min(others, key=lambda rank: passed[rank])
        if passed[last] >= self._passed:
            return None
        return (
            f"rank {last} of {self.size} did not get as far as the others within "
            f"worker_timeout_s {self._timeout_s:g}"
        )

    def _beats(self, ranks: Sequence[int]) -> dict[int, bytes]:
        known = [rank for rank in ranks if self._store.check([f"beat/{rank}"])]
        return dict.fromkeys(ranks, b"0 0") | {r: self._store.get(f"beat/{r}") for r in known}

    def _why_ended(self, rank: int) -> str | None:
        if self._store.check([f"end/{rank}"]):
            return self._store.get(f"end/{rank}").decode()
        code = self._started[rank - 1].poll() if self._started and rank else None
        if code is None:
            return None
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
        return f"its process {self._started[rank - 1].pid} {how}"


def _destroy_groups() -> None:
    with contextlib.suppress(RuntimeError):
        dist.destroy_process_group()


def _gpu_id(device: torch.device) -> object:
    return torch.cuda.get_device_properties(device).uuid


def connect(world: World, serves: bool, listener: int | None = None) -> Store:
    """Return the store, which this process then ``serves`` to the others."""
    try:
        if serves and listener is None and world.host in LOOPBACK:
            listener = listen_locally(world.port).detach()
        store = TCPStore(
            world.host,
            world.port,
            is_master=serves,
            wait_for_workers=False,
            timeout=timedelta(seconds=START_S),
            master_listen_fd=listener,
        )
        # The store of torchrun outlives the ranks: those that it starts again must not read what
        # the former ones wrote.
        return PrefixStore(f"start-{count_restarts()}", store)
    except (RuntimeError, OSError) as error:
        place = f"{world.host}:{world.port}"
        raise ClusterError(
            f"rank {world.rank} of {world.size} cannot reach or open the store at {place} "
            f"(MASTER_ADDR and MASTER_PORT): {one_line(error)}"
        ) from None


@contextlib.contextmanager
def _on_loopback(world: World) -> Iterator[None]:
    """Let gloo connect ranks of one machine where no other can reach them."""
    name = "GLOO_SOCKET_IFNAME"
    if not world.is_one_machine or sys.platform != "linux" or name in os.environ:
        yield
        return
    os.environ[name] = "lo"
    try:
        yield
    finally:
        del os.environ[name]


class LocalRanks:
    """The other ranks of a run that no launcher started: processes on this machine."""

    def __init__(self, size: int, patience_s: float = 5.0) -> None:
        """``patience_s``: how long they may take to end."""
        self._patience_s = patience_s
        listener = listen_locally()
        world = World(0, size, 0, size, "127.0.0.1", listener.getsockname()[1])
        self.world, self.store = world, connect(world, True, listener.detach())
        self.processes = [
            start_rank(world._replace(rank=rank, local_rank=rank)) for rank in range(1, size)
        ]

    def close(self) -> None:
        """End them; kill those that do not end in time."""
        with contextlib.suppress(RuntimeError):
            self.store.set(RUN.format(1), END)
        until_s = time.monotonic() + self._patience_s
        for process in self.processes:
            try:
                process.wait(max(0.0, until_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()  # SIGKILL ends a stopped process too
                process.wait()
