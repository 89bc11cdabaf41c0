"""The supervisor: the workers of one run. In: how many there should be; out: what they report.

Workers are called for one slice of work after another. A worker that dies is replaced by another
with the same number; when fewer are wanted, the last ones are not called again, and when more are,
others join. That happens in a thread of its own, because an evaluation must not keep workers
waiting.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from qfleet.core.types import Episode
from qfleet.data.recorder import WRITE_TIMEOUT_S
from qfleet.engines.cluster.member_pool import Member, MemberPool
from qfleet.engines.cluster.processes_hook import SteadyRate
from qfleet.engines.cluster.ray_cluster import Cluster
from qfleet.engines.parameter_server.row_shares import RowShares
from qfleet.engines.parameter_server.servers import LOOK_S, ServerRow
from qfleet.engines.parameter_server.worker import RemoteWorker, Report, WorkOrder
from qfleet.engines.parts import Setup
from qfleet.telemetry.fleet import WorkerAccount
from qfleet.telemetry.timers import COMPUTING, KIND_OF, STAGES
from qfleet.telemetry.trace import SpanRecord

SLICE_S_PER_WORKER = 0.1
MIN_SLICE_S, MAX_SLICE_S = 0.2, 1.0
"""Length of a slice of work before a report: the more workers there are, the longer."""
END_S = 15.0
"""Time that workers have to finish their slices when the run is over."""


@dataclass
class WorkerState(Member):
    """A worker's number: the process that has it, and what all processes with it did."""

    report: Report | None = None
    """The newest report of this life."""
    earlier: list[Report] = field(default_factory=list)
    """The last report of each earlier life."""
    restarts: int = 0
    """Lives that were lost."""
    granted: int = 0
    """Env steps that it may still take in the slice under way."""
    renewals: dict[int, int] = field(default_factory=dict)
    """Renewals of each server that this worker knows of."""
    logged_faults: Counter[str] = field(default_factory=Counter)
    """Faults of this life that are in the run's log, by kind."""
    spans: list[SpanRecord] = field(default_factory=list)
    rows_per_s: float = 0.0
    """Rows of a dataset per second, mostly in the last pieces; 0: not known."""

    @property
    def reports(self) -> list[Report]:
        """The last report of each life."""
        return self.earlier if self.report is None else [*self.earlier, self.report]

    def total(self, what: str) -> Any:
        return sum(getattr(report, what) for report in self.reports)

    def forget_life(self) -> None:
        """Start the next life without a report; what this one did still counts."""
        self.earlier = self.reports
        self.report, self.granted, self.rows_per_s = None, 0, 0.0
        self.logged_faults.clear()

    def measure_rows(self, report: Report) -> int:
        """Return the rows of a dataset that were read since the last report; note their speed."""
        rows = report.env_steps - (self.report.env_steps if self.report else 0)
        if rows > 0:
            # Without the time between slices: a worker that had no rows to read is not slower.
            speed = rows / max(report.slice_s, 1e-9)
            self.rows_per_s = (self.rows_per_s + speed) / 2 if self.rows_per_s else speed
        return rows

    def account(self) -> WorkerAccount:
        reports = self.reports
        traffic = [report.traffic for report in reports]
        outcomes = sum((Counter(each["outcomes"]) for each in traffic), Counter[str]())
        totals = ("env_steps", "updates", "wall_s", "processor_s")
        sent = ("bytes_sent", "bytes_received", "messages", "packing_s")
        return WorkerAccount(
            number=self.number,
            host=reports[-1].host if reports else "",
            seconds={stage: sum(r.seconds[stage] for r in reports) for stage in STAGES},
            outcomes=dict(outcomes),
            calls=tuple(traffic[-1]["calls"]) if traffic else (),
            restarts=self.restarts,
            **{name: self.total(name) for name in totals},
            **{name: sum(each[name] for each in traffic) for name in sent},
        )


class Supervisor:
    """A thread that keeps the wanted number of workers at work."""

    def __init__(
        self,
        setup: Setup,
        cluster: Cluster,
        servers: ServerRow,
        base_env_steps: int,
        lr_scale: Callable[[], float],
        rows: RowShares | None = None,
    ) -> None:
        """``base_env_steps`` were taken before this run was resumed; ``rows``: of a dataset."""
        self._rows = rows
        config = setup.config
        self._setup, self._config, self._faults = setup, config, setup.faults
        self._cluster, self._servers = cluster, servers
        self._base_env_steps, self._lr_scale = base_env_steps, lr_scale
        self._pool: MemberPool[WorkerState] = MemberPool(
            cluster, "worker", self._spawn, timeout_s=config.worker_timeout_s
        )
        self._requested = self._wanted = config.workers
        """Workers as requested last, by any thread; as they are in this turn of the thread."""
        self._episodes: list[Episode] = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._supervise, name="supervisor")
        self._failure: BaseException | None = None
        self.workers = self._pool.members
        self.lock = threading.Lock()
        """Held while reports, or sums over them, are read or written."""
        self.news = threading.Event()
        """Set when a worker has reported, or something failed."""
        self.rate = SteadyRate()

    # --- for the run's own thread -------------------------------------------------------------

    def start(self, keep_going: Callable[[], bool]) -> bool:
        """Start all workers and servers at once; return False if ``keep_going`` does before all
        servers answer."""
        for number in range(self._wanted):
            self.workers[number] = WorkerState(number)
            self._pool.spawn(self.workers[number])
        if not self._servers.await_start(keep_going):
            return False
        # All join before any begins: otherwise the first would make rounds on its own, and from
        # then on the others would collect while it learns, and the other way round.
        self._servers.join(list(self.workers))
        for worker in self.workers.values():
            self._set_to_work(worker)
        self._thread.start()
        return True

    def stop(self) -> None:
        """Wait until the workers have finished their slices, at most ``END_S``; stop them all."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()
            if self._config.record:
                self._pool.finish_recordings(WRITE_TIMEOUT_S, self._faults)
        self._pool.stop()

    @property
    def is_over(self) -> bool:
        return self._stopping.is_set()

    def check(self) -> None:
        """Raise what went wrong in the thread."""
        if self._failure is not None:
            raise self._failure

    def resize(self, workers: int) -> None:
        """Request a number of workers; the thread starts or dismisses some."""
        self._requested = workers

    def env_steps(self) -> int:
        """Return the env steps of all workers since the start or resume; needs the lock."""
        return sum(worker.total("env_steps") for worker in self.workers.values())

    def take_episodes(self) -> list[Episode]:
        with self.lock:
            episodes, self._episodes = self._episodes, []
        return episodes

    def reports(self, all_lives: bool = False) -> list[Report]:
        """Return the newest report of each worker at work, or the last one of every life."""
        with self.lock:
            if all_lives:
                return [report for w in self.workers.values() for report in w.reports]
            return [w.report for w in self.workers.values() if w.report is not None]

    # --- the thread ---------------------------------------------------------------------------

    def _supervise(self) -> None:
        try:
            snapshot_s = time.monotonic()
            while not self._stopping.is_set():
                self._wanted = self._pool.processors_needed = self._requested
                self._take_results(LOOK_S)
                self._settle_size()
                if time.monotonic() - snapshot_s >= self._config.snapshot_s:
                    self._servers.take_snapshots()
                    snapshot_s = time.monotonic()
            self._finish()
        except BaseException as error:  # the run's own thread raises it
            self._failure = error
        self.news.set()

    def _take_results(self, wait_s: float) -> None:
        results = self._pool.results(wait_s)
        for worker, report, loss in results:
            if report is None:
                self._replace(worker, loss)
            elif isinstance(report, Report):  # not the answer to the first ping
                self._take_report(worker, report)
                for server in report.lost_servers:
                    if self._servers.is_lost(server, worker.renewals.get(server, 0)):
                        self._servers.replace(server)
            if worker.handle is not None:
                self._set_to_work(worker)
            self.news.set()
        if any(report is None for _, report, _ in results):
            self._set_idle_to_work()

    def _set_idle_to_work(self) -> None:
        """Give the steps of workers that are gone to those that had none left to take."""
        for worker in self.workers.values():
            if worker.handle is not None and worker.call is None:
                self._set_to_work(worker)

    def _settle_size(self) -> None:
        """Start missing workers; dismiss those above the wanted number once they have reported."""
        for number in range(self._wanted):
            if number not in self.workers:
                with self.lock:
                    self.workers[number] = WorkerState(number)
            if self.workers[number].handle is None:
                self._pool.spawn(self.workers[number])
                self._set_to_work(self.workers[number])
        above = [w for n, w in self.workers.items() if n >= self._wanted and w.handle is not None]
        dismissed = [worker for worker in above if worker.call is None or not worker.is_ready]
        if self._config.record:
            ready = [worker for worker in dismissed if worker.is_ready]
            self._pool.finish_recordings(WRITE_TIMEOUT_S, self._faults, ready)
        for worker in dismissed:
            self._servers.leave({worker.number: worker.life + 1})
            self._end_life(worker)
        if above:
            self._set_idle_to_work()

    def _end_life(self, worker: WorkerState) -> None:
        self._pool.end(worker)
        with self.lock:
            worker.forget_life()
            if self._rows is not None:
                self._rows.lose(worker.number)

    def _finish(self) -> None:
        """Take the last reports; servers stop waiting for each worker that has reported."""
        until_s = time.monotonic() + END_S
        for worker in self.workers.values():
            if not worker.is_ready:
                self._pool.drop_call(worker)
        idle = [worker for worker in self.workers.values() if worker.call is None]
        self._servers.leave({worker.number: worker.life for worker in idle})
        while busy := [worker for worker in self.workers.values() if worker.call is not None]:
            if time.monotonic() > until_s:
                break
            for worker, report, _ in self._pool.results(LOOK_S):
                if report is None:
                    self._leave_dead(worker)
                else:
                    self._take_report(worker, report)
                    self._servers.leave({worker.number: worker.life})
        for worker in busy:  # so that servers make the updates that wait for them
            self._leave_dead(worker)

    # --- one worker ---------------------------------------------------------------------------

    def _spawn(self, worker: WorkerState) -> Any:
        # A cluster of our own has as many processors as the run had workers at first.
        is_extra = self._cluster.folder is not None and worker.number >= self._config.workers
        worker.renewals = self._servers.renewals
        return self._cluster.spawn(
            RemoteWorker,
            self._config,
            worker.number,
            self._servers.handles,
            # A replacement must not play the first episodes of its predecessor again.
            self._setup.restarted_at + worker.life,
            self._setup.trace is not None,
            worker.life,
            self._thread.is_alive(),  # whether it joins late
            processors=0 if is_extra else 1,
            at_once=2,  # so that it can answer a ping while it works
        )

    def _set_to_work(self, worker: WorkerState) -> None:
        if not worker.is_ready:
            # It is granted no steps yet: where no node has room for it, others take them.
            self._pool.call(worker, worker.handle.ping.remote())
            return
        if worker.number >= self._wanted:
            return  # it is dismissed in a moment
        slice_s = min(MAX_SLICE_S, max(MIN_SLICE_S, SLICE_S_PER_WORKER * self._wanted))
        piece: range | None = None
        with self.lock:
            granted = sum(other.granted for other in self.workers.values())
            done = self._base_env_steps + self.env_steps()
            left = self._config.steps - done - granted
            over = left <= 0 or self._stopping.is_set()
            worker.granted = 0 if over else -(-left // self._wanted)
            if self._rows is not None:
                piece = None if over else self._rows.take(worker.number, self._speeds(), slice_s)
                worker.granted = len(piece or ())
        if worker.granted == 0:
            self._servers.leave({worker.number: worker.life})
            return
        own = worker.report.env_steps if worker.report else 0
        order = WorkOrder(
            done - own,
            own + worker.granted,
            slice_s,
            self._lr_scale(),
            self._share(worker.number),
            self._servers.renewed_since(worker.renewals),
            piece,
        )
        worker.renewals = self._servers.renewals
        self._pool.call(worker, worker.handle.work.remote(order))

    def _speeds(self) -> dict[int, float]:
        """Return the rows per second of each worker at work; 0 before its first report."""
        at_work = {n: w for n, w in self.workers.items() if w.is_ready and n < self._wanted}
        return {number: worker.rows_per_s for number, worker in at_work.items()}

    def _share(self, number: int) -> float:
        """Return a worker's pace in its own working time, as a share of the fastest one's."""
        if not self._config.balance:
            return 1.0
        paces = {n: _pace(w.report) for n, w in self.workers.items() if w.report is not None}
        ready = sum(worker.is_ready for worker in self.workers.values())
        if number not in paces or len(paces) < ready:
            return 1.0
        return paces[number] / max(paces.values())

    def _take_report(self, worker: WorkerState, report: Report) -> None:
        self._servers.record_sent(worker.number, report.traffic["sent"])
        with self.lock:
            if self._rows is not None:
                self._rows.report(worker.number, worker.measure_rows(report))
            worker.report, worker.granted, worker.failures = report, 0, 0
            worker.spans += _shifted(report, time.perf_counter())
            self._episodes += [Episode(*episode) for episode in report.episodes]
            have_all = all(w.report for w in self.workers.values() if w.handle is not None)
            self.rate.record(time.monotonic(), self.env_steps(), have_all)
        for kind, (count, messages) in report.faults.items():
            for _ in range(count - worker.logged_faults[kind]):
                self._faults(kind, f"worker {worker.number}: {messages[-1]}")
            worker.logged_faults[kind] = count

    def _replace(self, worker: WorkerState, loss: str) -> None:
        if self._pool.waits_for_room(worker):
            self._pool.replace(worker)
            return
        worker.restarts += 1
        room = "" if self._pool.has_room() else " when there is room"
        self._faults("worker", f"{loss}; another takes its place{room}")
        self._pool.count_failure(worker, loss)
        # It may only be disconnected: servers must not accept two workers with one number.
        self._leave_dead(worker)
        self._end_life(worker)
        if worker.number < self._wanted:
            self._pool.spawn(worker)

    def _leave_dead(self, worker: WorkerState) -> None:
        """Tell the servers that a worker died: it may have sent more than it has reported."""
        self._servers.leave({worker.number: worker.life + 1}, worker.renewals)


def _shifted(report: Report, now_s: float) -> list[SpanRecord]:
    """Return a report's spans on this process's clock; the transfer counts as no time."""
    shift_s = now_s - report.clock_s
    return [(stage, start + shift_s, end + shift_s) for stage, start, end in report.spans]


def _pace(report: Report) -> float:
    """Return env steps per second of collecting and learning, without messages and waits."""
    spent = sum(report.seconds[stage] for stage in STAGES if KIND_OF[stage] == COMPUTING)
    return report.env_steps / max(spent, 1e-9)
