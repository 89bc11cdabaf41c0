"""The workers of one run, supervised. In: how many there shall be; out: what they report.

They are called for one slice of work after another. One that dies is replaced by another of the
same number; when fewer are wanted, the last ones are not called again, and when more are, others
join. That happens in a thread of its own, because an evaluation must not keep workers waiting.
Nothing is restarted behind its back, and nothing outlives the run.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from qfleet.config.config import Config
from qfleet.core.errors import ClusterError
from qfleet.core.types import Episode
from qfleet.engines.cluster.member_pool import MemberPool
from qfleet.engines.cluster.ray_cluster import RUN_AGAIN, TIMEOUT_S, Cluster
from qfleet.engines.parameter_server.servers import LOOK_S, MOST_LOSSES, ServerRow
from qfleet.engines.parameter_server.worker import RemoteWorker, Report, WorkOrder
from qfleet.telemetry.faults import FaultLog
from qfleet.telemetry.fleet import WorkerAccount
from qfleet.telemetry.timers import COMPUTING, KIND_OF, STAGES
from qfleet.telemetry.trace import SpanRecord

SLICE_S_PER_WORKER = 0.05
LEAST_SLICE_S, LONGEST_SLICE_S = 0.1, 1.0
"""How long a worker works before it reports: the more there are, the longer each."""
END_S = 15.0
"""How long workers may take to finish when the run is over."""


@dataclass
class WorkerState:
    """One number, and who has it."""

    handle: Any = None
    """None: nobody, for so many are not wanted."""
    is_there: bool = False
    """It has started: a node had room for it, and it said so."""
    report: Report | None = None
    """Its newest, since it was started."""
    earlier: list[Report] = field(default_factory=list)
    """The last ones of those that had this number before."""
    life: int = 0
    """How many had it before."""
    restarts: int = 0
    """How many of them were lost."""
    losses: int = 0
    """In a row, without a report in between."""
    granted: int = 0
    """Env steps that it may still take in the slice under way."""
    renewals: dict[int, int] = field(default_factory=dict)
    """By server: how often it had been started anew when this worker was last told."""
    spans: list[SpanRecord] = field(default_factory=list)

    @property
    def reports(self) -> list[Report]:
        """The last one of everybody who had this number."""
        return self.earlier if self.report is None else [*self.earlier, self.report]

    def total(self, what: str) -> Any:
        return sum(getattr(report, what) for report in self.reports)

    def end(self) -> None:
        """Its life is over; what it did stays."""
        self.earlier = self.reports
        self.report, self.granted, self.is_there = None, 0, False
        self.handle, self.life = None, self.life + 1

    def account(self, number: int) -> WorkerAccount:
        reports = self.reports
        outcomes: Counter[str] = Counter()
        for report in reports:
            outcomes.update(report.traffic["outcomes"])
        traffic = {
            name: sum(report.traffic[name] for report in reports)
            for name in ("bytes_sent", "bytes_received", "messages")
        }
        return WorkerAccount(
            number=number,
            host=reports[-1].host if reports else "",
            env_steps=self.total("env_steps"),
            updates=self.total("updates"),
            wall_s=self.total("wall_s"),
            processor_s=self.total("processor_s"),
            seconds={stage: sum(r.seconds[stage] for r in reports) for stage in STAGES},
            **traffic,
            outcomes=dict(outcomes),
            packing_s=sum(report.traffic["packing_s"] for report in reports),
            calls=tuple(reports[-1].traffic["calls"]) if reports else (),
            restarts=self.restarts,
        )


class Supervisor:
    def __init__(
        self,
        config: Config,
        cluster: Cluster,
        servers: ServerRow,
        faults: FaultLog,
        restarted_at: int,
        traced: bool,
        base_env_steps: int,
        lr_scale: Callable[[], float],
    ) -> None:
        """``base_env_steps`` were taken before this sitting."""
        self._config, self._cluster, self._servers, self._faults = config, cluster, servers, faults
        self._restarted_at, self._traced = restarted_at, traced
        self._base_env_steps, self._lr_scale = base_env_steps, lr_scale
        self._crew = MemberPool(cluster, "worker", config.worker_timeout_s)
        self._asked = self._wanted = config.workers
        """As others may ask for at any moment; as it is in this turn of the thread."""
        self._episodes: list[Episode] = []
        self._told_faults: Counter[tuple[int, str]] = Counter()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._supervise, name="supervisor")
        self._failure: BaseException | None = None
        self.workers: dict[int, WorkerState] = {}
        self.lock = threading.Lock()
        """Around reports and what is summed over them."""
        self.news = threading.Event()
        """Somebody has reported, or something failed."""
        self.steady: tuple[float, int] | None = None
        """When every worker had reported once: time, and env steps by then."""
        self.newest_s = time.monotonic()
        """When the newest report came."""

    # --- for the run's own thread -------------------------------------------------------------

    def start(self, keep_going: Callable[[], bool]) -> bool:
        """Start everybody, workers and servers side by side; False where that is not wanted any
        more before all servers are there."""
        for number in range(self._wanted):
            self.workers[number] = WorkerState()
            self._spawn(number, is_late=False)
        if not self._servers.await_start(keep_going):
            return False
        # All of them before anybody begins: else the first would make rounds on its own, and the
        # others would collect while it learns, and the other way round, from then on.
        self._servers.join(list(self.workers))
        for number in self.workers:
            self._set_to_work(number)
        self._thread.start()
        return True

    def stop(self) -> None:
        """Wait for those at work, so long at most; end all of them."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()
        for worker in self.workers.values():
            if worker.handle is not None:
                with contextlib.suppress(Exception):
                    self._cluster.stop(worker.handle)

    @property
    def is_over(self) -> bool:
        return self._stopping.is_set()

    def check(self) -> None:
        """Raise what went wrong in the thread."""
        if self._failure is not None:
            raise self._failure

    def resize(self, workers: int) -> None:
        """From now on there shall be so many; the thread sees to it."""
        self._asked = workers

    def env_steps(self) -> int:
        """Of all, in this sitting; under the lock."""
        return sum(worker.total("env_steps") for worker in self.workers.values())

    def take_episodes(self) -> list[Episode]:
        with self.lock:
            episodes, self._episodes = self._episodes, []
        return episodes

    def reports(self) -> list[Report]:
        """The newest of those that are at work."""
        with self.lock:
            return [w.report for w in self.workers.values() if w.report is not None]

    # --- the thread ---------------------------------------------------------------------------

    def _supervise(self) -> None:
        try:
            snapshot_s = time.monotonic()
            while not self._stopping.is_set():
                self._wanted = self._asked
                self._come(LOOK_S)
                self._settle_size()
                if time.monotonic() - snapshot_s >= self._config.snapshot_s:
                    self._servers.take_snapshots()
                    snapshot_s = time.monotonic()
            self._end()
        except BaseException as error:  # the run's own thread raises it
            self._failure = error
        self.news.set()

    def _come(self, wait_s: float) -> None:
        came = self._crew.come(wait_s)
        for number, report, loss in came:
            worker = self.workers[number]
            if report is None:
                if worker.is_there or self._has_room():
                    self._replace(number, loss)
                else:
                    with contextlib.suppress(Exception):
                        self._cluster.stop(worker.handle)
                    self._spawn(number)
            elif not worker.is_there:
                worker.is_there = True
            else:
                self._take_report(number, report)
                for server in report.lost_servers:
                    if self._servers.is_lost(server, worker.renewals.get(server, 0)):
                        self._servers.replace(server)
            if worker.handle is not None:
                self._set_to_work(number)
            self.news.set()
        if any(report is None for _, report, _ in came):
            # What the lost ones were to do is to be done by those that had nothing left to do.
            self._set_idle_to_work()

    def _set_idle_to_work(self) -> None:
        for number in [n for n, w in self.workers.items() if w.handle is not None]:
            if number not in self._crew.busy:
                self._set_to_work(number)

    def _settle_size(self) -> None:
        """As many as are wanted: others join, or the last ones leave when they have reported."""
        wanted = self._wanted
        for number in range(wanted):
            worker = self.workers.get(number)
            if worker is None or worker.handle is None:
                with self.lock:
                    self.workers.setdefault(number, WorkerState())
                self._spawn(number)
                self._set_to_work(number)
        unwanted = [n for n, w in self.workers.items() if n >= wanted and w.handle is not None]
        for number in unwanted:
            if not self.workers[number].is_there:
                self._crew.drop(number)
            if number not in self._crew.busy:
                self._dismiss(number)
        if unwanted:
            # There may be steps that they were to take.
            self._set_idle_to_work()

    def _dismiss(self, number: int, is_dead: bool = False) -> None:
        worker = self.workers[number]
        # One that died may have sent more than it has told.
        self._servers.leave({number: worker.life + 1}, worker.renewals if is_dead else None)
        with contextlib.suppress(Exception):
            self._cluster.stop(worker.handle)
        with self.lock:
            worker.end()
        self._forget_faults(number)

    def _has_room(self) -> bool:
        """Or is a worker only waiting for a node to come? Not for ever, if all of them are."""
        if self._fits():
            return True
        if not any(worker.is_there for worker in self.workers.values()):
            there = self._cluster.processors()
            raise ClusterError(
                f"no worker is left, and cluster {self._cluster.address} has {there} processors; "
                "add nodes and resume the run, perhaps with fewer workers"
            )
        return False

    def _fits(self) -> bool:
        """A cluster of our own has room for all; in another, nodes may be gone."""
        is_own = self._cluster.folder is not None
        return is_own or self._cluster.processors() >= self._wanted

    def _end(self) -> None:
        """Nobody is called again; who has reported is waited for by nobody."""
        until_s = time.monotonic() + END_S
        for number in [n for n, worker in self.workers.items() if not worker.is_there]:
            self._crew.drop(number)
        idle = set(self.workers) - self._crew.busy
        while True:
            self._servers.leave({number: self.workers[number].life for number in idle})
            if not self._crew.busy:
                return
            if time.monotonic() > until_s:
                # Nobody waits any longer: what was kept for an update with theirs is to be made.
                for number in self._crew.busy:
                    worker = self.workers[number]
                    self._servers.leave({number: worker.life + 1}, worker.renewals)
                return
            idle = set()
            for number, report, _ in self._crew.come(LOOK_S):
                if report is None:
                    worker = self.workers[number]
                    self._servers.leave({number: worker.life + 1}, worker.renewals)
                else:
                    self._take_report(number, report)
                    idle.add(number)

    # --- one worker ---------------------------------------------------------------------------

    def _spawn(self, number: int, is_late: bool = True) -> None:
        worker = self.workers[number]
        # Of a cluster of our own the processors are as many as the run began with.
        is_extra = self._cluster.folder is not None and number >= self._config.workers
        worker.renewals = self._servers.renewals
        worker.handle = self._cluster.spawn(
            RemoteWorker,
            self._config,
            number,
            self._servers.handles,
            # One that takes another's place must not play its first episodes again.
            self._restarted_at + worker.life,
            self._traced,
            worker.life,
            is_late,
            processors=0 if is_extra else 1,
            at_once=2,  # so that it can say that it is there while it works
        )

    def _set_to_work(self, number: int) -> None:
        worker = self.workers[number]
        if not worker.is_there:
            # It is granted nothing yet: where no node has room for it, others do its part.
            ask = worker.handle.ping.remote
            self._crew.called(number, ask(), ask, grace_s=TIMEOUT_S)
            return
        if number >= self._wanted:
            return  # it is dismissed in a moment
        with self.lock:
            granted = sum(other.granted for other in self.workers.values())
            done = self._base_env_steps + self.env_steps()
            left = self._config.steps - done - granted
            over = left <= 0 or self._stopping.is_set()
            grant = 0 if over else -(-left // self._wanted)
            worker.granted = grant
        if grant == 0:
            self._servers.leave({number: worker.life})
            return
        own = worker.report.env_steps if worker.report else 0
        order = WorkOrder(
            done - own,
            own + grant,
            self._slice_s(),
            self._lr_scale(),
            self._share(number),
            self._servers.renewed_since(worker.renewals),
        )
        worker.renewals = self._servers.renewals
        self._crew.called(number, worker.handle.work.remote(order), worker.handle.ping.remote)

    def _slice_s(self) -> float:
        return min(LONGEST_SLICE_S, max(LEAST_SLICE_S, SLICE_S_PER_WORKER * self._wanted))

    def _share(self, number: int) -> float:
        """A worker's pace in its own working time, as a share of the quickest one's."""
        if not self._config.balance:
            return 1.0
        paces = {n: _pace(w.report) for n, w in self.workers.items() if w.report is not None}
        there = sum(worker.is_there for worker in self.workers.values())
        if number not in paces or len(paces) < there:
            return 1.0
        return paces[number] / max(paces.values())

    def _take_report(self, number: int, report: Report) -> None:
        worker = self.workers[number]
        self._servers.heard(number, report.traffic["sent"])
        with self.lock:
            worker.report, worker.granted, worker.losses = report, 0, 0
            worker.spans += _shifted(report, time.perf_counter())
            self._episodes += [Episode(*episode) for episode in report.episodes]
            self.newest_s = time.monotonic()
            at_work = (w for w in self.workers.values() if w.handle is not None)
            if self.steady is None and all(w.report for w in at_work):
                self.steady = (self.newest_s, self.env_steps())
        for kind, (count, messages) in report.faults.items():
            for _ in range(count - self._told_faults[number, kind]):
                self._faults(kind, f"worker {number}: {messages[-1]}")
            self._told_faults[number, kind] = count

    def _forget_faults(self, number: int) -> None:
        for kind in [key for key in self._told_faults if key[0] == number]:
            del self._told_faults[kind]

    def _replace(self, number: int, loss: str) -> None:
        worker = self.workers[number]
        loss = loss.removesuffix(RUN_AGAIN)
        worker.restarts += 1
        worker.losses += 1
        room = "" if self._fits() else " when there is room"
        self._faults("worker", f"{loss}; another takes its place{room}")
        if worker.losses > MOST_LOSSES:
            raise ClusterError(f"worker {number} died {worker.losses} times in a row: {loss}")
        # It may only be cut off, and come back: the servers must not hear two of one number.
        self._dismiss(number, is_dead=True)
        if number < self._wanted:
            self._spawn(number)


def _shifted(report: Report, now_s: float) -> list[SpanRecord]:
    """A report's spans on this process's clock; the way here counts as no time."""
    shift_s = now_s - report.clock_s
    return [(stage, start + shift_s, end + shift_s) for stage, start, end in report.spans]


def _pace(report: Report) -> float:
    """Env steps per second of collecting and learning, without messages and waits."""
    spent = sum(report.seconds[stage] for stage in STAGES if KIND_OF[stage] == COMPUTING)
    return report.env_steps / max(spent, 1e-9)
