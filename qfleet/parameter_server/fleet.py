"""Servers and workers of one run, supervised. In: what a run wants; out: steps, episodes, weights.

The process that trains starts the servers, then the workers, calls each worker for one slice of
work after another, and replaces whoever dies: a worker by a new one of the same number, a server by
one that goes on from its last snapshot. That happens in a thread of its own, because an evaluation
must not keep workers waiting. Nothing is restarted behind its back, and nothing outlives the run.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from qfleet.cluster import RUN_AGAIN, TIMEOUT_S, Cluster, open_cluster
from qfleet.config import Config
from qfleet.core import Clock, Episode, StateDict
from qfleet.crew import Crew
from qfleet.errors import CheckpointError, ClusterError, MemberLost, QfleetError
from qfleet.parameter_server.compression import decode
from qfleet.parameter_server.layout import cut
from qfleet.parameter_server.server import RemoteServer, calls_at_once, cut_state, join_states
from qfleet.parameter_server.wire import INLINE_VECTOR_BYTES, from_wire
from qfleet.parameter_server.worker import RemoteWorker, Report, Told
from qfleet.telemetry.faults import FaultLog
from qfleet.telemetry.fleet import FleetAccount, ServerAccount, WorkerAccount
from qfleet.telemetry.timers import COMPUTING, KIND_OF, STAGES, Timers
from qfleet.telemetry.trace import SpanRecord

SLICE_S_PER_WORKER = 0.05
LEAST_SLICE_S, LONGEST_SLICE_S = 0.1, 1.0
"""How long a worker works before it reports: the more there are, the longer each."""
LOOK_S = 0.1
"""How often the run's own clockwork is asked, at least."""
FETCH_S = 0.5
"""How often the run fetches weights."""
END_S = 15.0
"""How long workers may take to finish when the run is over."""
MOST_LOSSES = 10
"""Times in a row that a worker or a server may die before it was heard of."""
ANSWER_S = 30.0
"""How long a server may take to answer, its start included, before it is as good as dead."""


@dataclass
class _WorkerState:
    handle: Any
    is_there: bool = False
    """It has started: a node had room for it, and it said so."""
    report: Report | None = None
    """Its newest, since it was started."""
    earlier: Counter[str] = field(default_factory=Counter)
    """Env steps, updates … of those that had this number before."""
    restarts: int = 0
    losses: int = 0
    """In a row, without a report in between."""
    granted: int = 0
    """Env steps that it may still take in the slice under way."""
    renewals: dict[int, int] = field(default_factory=dict)
    """By server: how often it had been started anew when this worker was last told."""
    spans: list[SpanRecord] = field(default_factory=list)

    def total(self, what: str) -> int:
        return self.earlier[what] + (getattr(self.report, what) if self.report else 0)


@dataclass
class _ServerState:
    handle: Any
    snapshot: StateDict
    version: int = 0
    """The newest that was seen."""
    restores: int = 0
    losses: int = 0
    lost_updates: int = 0
    account: dict[str, Any] = field(default_factory=dict)
    earlier: Counter[str] = field(default_factory=Counter)


class Fleet:
    """What a run sees of its workers; it stands where other engines have a collector."""

    def __init__(
        self,
        config: Config,
        clock: Clock,
        timers: Timers,
        faults: FaultLog,
        weights: Tensor,
        restarted_at: int,
        traced: bool,
    ) -> None:
        """``weights`` are the run's own: what it evaluates and saves."""
        self._config, self._clock, self._timers, self._faults = config, clock, timers, faults
        self._weights, self._restarted_at, self._traced = weights, restarted_at, traced
        self._slices = cut(weights.numel(), config.servers)
        self._optimiser: StateDict | None = None
        """Of all servers together, as it was last seen or loaded."""
        self._base_env_steps = self._base_updates = 0
        self._cluster: Cluster
        self._crew: Crew
        self._workers: dict[int, _WorkerState] = {}
        self._servers: list[_ServerState] = []
        self._episodes: list[Episode] = []
        self._told_faults: Counter[tuple[int, str]] = Counter()
        self._lock = threading.Lock()
        self._news = threading.Event()
        self._stopping = threading.Event()
        self._failure: BaseException | None = None
        self._lr_scale: Callable[[], float] = lambda: 1.0
        self._steady: tuple[float, int] | None = None
        """When every worker had reported once: time, and env steps by then."""
        self._newest_s = 0.0
        self._began_s = time.monotonic()
        self._processor_s = time.process_time()
        slice_s = SLICE_S_PER_WORKER * config.workers
        self._slice_s = min(LONGEST_SLICE_S, max(LEAST_SLICE_S, slice_s))

    # --- the run ------------------------------------------------------------------------------

    def run(self, keep_going: Callable[[], bool], lr_scale: Callable[[], float]) -> None:
        """Train until ``keep_going`` says no, or all steps are taken."""
        config = self._config
        self._lr_scale = lr_scale
        self._base_env_steps, self._base_updates = self._clock.env_steps, self._clock.updates
        if not keep_going():
            return
        address = config.address or None
        with open_cluster(config.workers, address, inline_bytes=INLINE_VECTOR_BYTES) as cluster:
            self._cluster = cluster
            self._crew = Crew(cluster, "worker", config.worker_timeout_s)
            try:
                self._start()
                supervisor = threading.Thread(target=self._supervise, name="supervisor")
                supervisor.start()
                try:
                    self._watch(keep_going)
                finally:
                    self._stopping.set()
                    supervisor.join()
                self._check()
                self._remember(self._snapshots())
                self._settle_clock()
            finally:
                self._account_servers()
                handles = [worker.handle for worker in self._workers.values()]
                for handle in [*handles, *(server.handle for server in self._servers)]:
                    with contextlib.suppress(Exception):
                        cluster.stop(handle)

    def _watch(self, keep_going: Callable[[], bool]) -> None:
        fetched_s = -FETCH_S
        while True:
            self._check()
            if time.monotonic() - fetched_s >= FETCH_S:
                self._fetch()
                fetched_s = time.monotonic()
            self._settle_clock()
            if self._clock.env_steps >= self._config.steps:
                return
            if not keep_going():
                return
            self._news.wait(LOOK_S)
            self._news.clear()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _settle_clock(self) -> None:
        with self._lock:
            workers = list(self._workers.values())
            self._clock.env_steps = self._base_env_steps + self._env_steps()
            updates = sum(worker.total("updates") for worker in workers)
            self._clock.updates = self._base_updates + updates
            reports = [worker.report for worker in workers if worker.report is not None]
            for stage in STAGES if reports else ():
                spent = sum(report.seconds[stage] for report in reports)
                self._timers.seconds[stage] = spent / len(reports)

    def _env_steps(self) -> int:
        return sum(worker.total("env_steps") for worker in self._workers.values())

    def _fetch(self) -> None:
        """The servers' weights, where they answer, into the run's own."""
        for part, server in zip(self._slices, self._servers, strict=True):
            try:
                answer = self._cluster.get(server.handle.pull.remote(None), "a server", ANSWER_S)
            except MemberLost:
                continue  # the supervisor sees to it
            self._weights[part].copy_(decode(from_wire(answer.weights)))

    # --- starting -----------------------------------------------------------------------------

    def _start(self) -> None:
        host = self._weights.cpu()
        for part in self._slices:
            state = self._optimiser and cut_state(self._optimiser, host.numel(), part)
            handle = self._spawn_server(host[part].numpy(), state, 0, None)
            self._servers.append(_ServerState(handle, {}))
        for number, server in enumerate(self._servers):
            who = f"server {number}"
            server.snapshot = self._cluster.get(server.handle.snapshot.remote(), who)
        self._account_servers()
        for number in range(self._config.workers):
            self._workers[number] = _WorkerState(self._spawn_worker(number))
        # All of them before anybody begins: else the first would make rounds on its own, and the
        # others would collect while it learns, and the other way round, from then on.
        joining = [s.handle.join.remote(n) for s in self._servers for n in self._workers]
        for call in joining:
            self._cluster.get(call, "a server")
        for number in self._workers:
            self._set_to_work(number)

    def _spawn_server(
        self, weights: Any, optimiser: StateDict | None, epoch: int, snapshot: StateDict | None
    ) -> Any:
        return self._cluster.spawn(
            RemoteServer,
            self._config,
            weights,
            optimiser,
            epoch,
            snapshot,
            processors=0,
            at_once=calls_at_once(self._config),
            # Where a node that is lost takes workers along, but no server.
            is_here=True,
        )

    def _spawn_worker(self, number: int) -> Any:
        handles = [server.handle for server in self._servers]
        life = self._workers[number].restarts if number in self._workers else 0
        return self._cluster.spawn(
            RemoteWorker,
            self._config,
            number,
            handles,
            # One that takes another's place must not play its first episodes again.
            self._restarted_at + life,
            self._traced,
            life,
            at_once=2,  # so that it can say that it is there while it works
        )

    # --- supervising --------------------------------------------------------------------------

    def _supervise(self) -> None:
        """In a thread of its own."""
        try:
            snapshot_s = time.monotonic()
            while not self._stopping.is_set():
                self._come(LOOK_S)
                if time.monotonic() - snapshot_s >= self._config.snapshot_s:
                    self._snapshots()
                    snapshot_s = time.monotonic()
            self._end()
        except BaseException as error:  # the run's own thread raises it
            self._failure = error
        self._news.set()

    def _come(self, wait_s: float) -> None:
        came = self._crew.come(wait_s)
        for number, report, loss in came:
            worker = self._workers[number]
            if report is None:
                if worker.is_there or self._has_room():
                    self._replace_worker(number, loss)
                else:
                    with contextlib.suppress(Exception):
                        self._cluster.stop(worker.handle)
                    worker.handle = self._spawn_worker(number)
            elif not worker.is_there:
                worker.is_there = True
            else:
                self._take_report(number, report)
                for server in report.lost_servers:
                    known = worker.renewals.get(server, 0)
                    if known == self._servers[server].restores and self._is_lost(server):
                        self._replace_server(server)
            self._set_to_work(number)
            self._news.set()
        if any(report is None for _, report, _ in came):
            # What the lost ones were to do is to be done by those that had nothing left to do.
            for number in set(self._workers) - self._crew.busy:
                self._set_to_work(number)

    def _has_room(self) -> bool:
        """Or is a worker only waiting for a node to come? Not for ever, if all of them are."""
        there = self._cluster.processors()
        if there >= self._config.workers:
            return True
        if not any(worker.is_there for worker in self._workers.values()):
            raise ClusterError(
                f"no worker is left, and cluster {self._cluster.address} has {there} processors; "
                "add nodes and resume the run, perhaps with fewer workers"
            )
        return False

    def _is_lost(self, number: int) -> bool:
        """A worker that is cut off says so of servers that are well."""
        try:
            call = self._servers[number].handle.ping.remote()
            self._cluster.get(call, f"server {number}", ANSWER_S)
        except MemberLost:
            return True
        return False

    def _end(self) -> None:
        """Nobody is called again; who has reported is waited for by nobody."""
        until_s = time.monotonic() + END_S
        for number in [n for n, worker in self._workers.items() if not worker.is_there]:
            self._crew.drop(number)
        idle = set(self._workers) - self._crew.busy
        while True:
            for number in idle:
                self._leave(number, self._workers[number].restarts)
            if not self._crew.busy or time.monotonic() > until_s:
                return
            idle = set()
            for number, report, _ in self._crew.come(LOOK_S):
                if report is not None:
                    self._take_report(number, report)
                idle.add(number)

    def _set_to_work(self, number: int) -> None:
        worker = self._workers[number]
        if not worker.is_there:
            # It is granted nothing yet: where no node has room for it, others do its part.
            ask = worker.handle.ping.remote
            self._crew.called(number, ask(), ask, grace_s=TIMEOUT_S)
            return
        with self._lock:
            granted = sum(other.granted for other in self._workers.values())
            done = self._base_env_steps + self._env_steps()
            left = self._config.steps - done - granted
            over = left <= 0 or self._stopping.is_set()
            grant = 0 if over else -(-left // len(self._workers))
            worker.granted = grant
        if grant == 0:
            self._leave(number, worker.restarts)
            return
        own = worker.report.env_steps if worker.report else 0
        renewed = tuple(
            (shard, server.handle)
            for shard, server in enumerate(self._servers)
            if worker.renewals.get(shard, 0) != server.restores
        )
        worker.renewals = {shard: s.restores for shard, s in enumerate(self._servers)}
        told = Told(
            done - own, own + grant, self._slice_s, self._lr_scale(), self._share(number), renewed
        )
        self._crew.called(number, worker.handle.work.remote(told), worker.handle.ping.remote)

    def _share(self, number: int) -> float:
        """A worker's pace in its own working time, as a share of the quickest one's."""
        if not self._config.balance:
            return 1.0
        paces = {n: _pace(w.report) for n, w in self._workers.items() if w.report is not None}
        if number not in paces or len(paces) < len(self._workers):
            return 1.0
        return paces[number] / max(paces.values())

    def _leave(self, number: int, life: int) -> None:
        """Servers wait for it no more, and listen to no life of it before this one."""
        calls = [server.handle.leave.remote(number, life) for server in self._servers]
        for call in calls:
            with contextlib.suppress(MemberLost):
                self._cluster.get(call, "a server", ANSWER_S)

    def _take_report(self, number: int, report: Report) -> None:
        worker = self._workers[number]
        with self._lock:
            worker.report, worker.granted, worker.losses = report, 0, 0
            worker.spans += _shifted(report, time.perf_counter())
            self._episodes += [Episode(*episode) for episode in report.episodes]
            self._newest_s = time.monotonic()
            if self._steady is None and all(w.report for w in self._workers.values()):
                self._steady = (self._newest_s, self._env_steps())
        for kind, (count, messages) in report.faults.items():
            for _ in range(count - self._told_faults[number, kind]):
                self._faults(kind, f"worker {number}: {messages[-1]}")
            self._told_faults[number, kind] = count

    def _replace_worker(self, number: int, loss: str) -> None:
        worker = self._workers[number]
        loss = loss.removesuffix(RUN_AGAIN)
        worker.restarts += 1
        worker.losses += 1
        room = "" if self._cluster.processors() >= self._config.workers else " when there is room"
        self._faults("worker", f"{loss}; another takes its place{room}")
        if worker.losses > MOST_LOSSES:
            raise ClusterError(f"worker {number} died {worker.losses} times in a row: {loss}")
        with contextlib.suppress(Exception):
            self._cluster.stop(worker.handle)
        # It may only be cut off, and come back: the servers must not hear two of one number.
        self._leave(number, worker.restarts)
        with self._lock:
            if worker.report is not None:
                worker.earlier["env_steps"] += worker.report.env_steps
                worker.earlier["updates"] += worker.report.updates
            worker.report, worker.granted, worker.is_there = None, 0, False
        for kind in [key for key in self._told_faults if key[0] == number]:
            del self._told_faults[kind]
        worker.renewals = {shard: s.restores for shard, s in enumerate(self._servers)}
        worker.handle = self._spawn_worker(number)

    def _replace_server(self, number: int) -> None:
        server = self._servers[number]
        server.losses += 1
        if server.losses > MOST_LOSSES:
            raise ClusterError(f"server {number} died {server.losses} times in a row")
        lost = max(0, server.version - server.snapshot["version"])
        self._faults(
            "server",
            f"server {number} died; another goes on from version {server.snapshot['version']}, "
            f"at least {lost} updates of its part are lost",
        )
        for name in ("received", "applied", "repeated", "bytes_in", "bytes_out"):
            before = server.snapshot["counters"][name]
            # Either may be the newer of the two: the server died somewhere in between.
            server.earlier[name] += max(0, server.account.get(name, before) - before)
        server.lost_updates += lost
        with contextlib.suppress(Exception):
            self._cluster.stop(server.handle)  # if it was only silent: there are never two
        part = self._slices[number]
        weights = self._weights[part].cpu().numpy()
        server.handle = self._spawn_server(weights, None, server.restores, server.snapshot)
        server.restores += 1
        server.version = server.snapshot["version"]
        server.account = {}

    def _snapshots(self) -> list[StateDict]:
        """One of every server, now; those that died go on from their last."""
        calls = [server.handle.snapshot.remote() for server in self._servers]
        for number, (server, call) in enumerate(zip(self._servers, calls, strict=True)):
            try:
                server.snapshot = self._cluster.get(call, f"server {number}", ANSWER_S)
                server.version, server.losses = server.snapshot["version"], 0
            except MemberLost:
                self._replace_server(number)
        self._account_servers()
        return [server.snapshot for server in self._servers]

    def _remember(self, snapshots: list[StateDict]) -> None:
        """Take over weights and optimiser as the servers have them."""
        for part, snapshot in zip(self._slices, snapshots, strict=True):
            self._weights[part].copy_(torch.as_tensor(snapshot["weights"]))
        sizes = [part.stop - part.start for part in self._slices]
        self._optimiser = join_states([snapshot["optimiser"] for snapshot in snapshots], sizes)

    def _account_servers(self) -> None:
        for number, server in enumerate(self._servers):
            with contextlib.suppress(QfleetError):
                call = server.handle.account.remote()
                found = self._cluster.get(call, f"server {number}", ANSWER_S)
                server.account, server.version = found, found["version"]

    # --- what a run asks a collector ----------------------------------------------------------

    def take_episodes(self) -> list[Episode]:
        with self._lock:
            episodes, self._episodes = self._episodes, []
        return episodes

    def exploration_rate(self) -> float:
        reports = self._reports()
        return sum(r.exploration_rate for r in reports) / len(reports) if reports else 1.0

    def metrics(self) -> dict[str, float]:
        """Of the workers' newest updates: means, but the largest value and all skipped ones."""
        found = [report.metrics for report in self._reports() if report.metrics]
        if not found:
            return {}
        means = {name: sum(m[name] for m in found) / len(found) for name in found[0]}
        means["abs_q_max"] = max(m["abs_q_max"] for m in found)
        means["skipped"] = sum(m["skipped"] for m in found)
        return means

    def _reports(self) -> list[Report]:
        with self._lock:
            return [w.report for w in self._workers.values() if w.report is not None]

    def pids(self) -> dict[str, int]:
        """Processes that were heard of, by name: ``worker 0``, ``server 1`` …"""
        with self._lock:
            workers = {n: w.report.pid for n, w in self._workers.items() if w.report is not None}
        servers = {n: s.account["pid"] for n, s in enumerate(self._servers) if s.account}
        return {f"worker {n}": pid for n, pid in workers.items()} | {
            f"server {n}": pid for n, pid in servers.items()
        }

    def lanes(self) -> Iterator[tuple[str, list[SpanRecord]]]:
        """What every worker did when, where a trace is wanted."""
        for number, worker in sorted(self._workers.items()):
            yield f"worker {number}", worker.spans

    def land(self) -> None:
        """Nothing stays in flight: the run is over when this is asked."""

    def close(self) -> None:
        """Nothing runs outside ``run``."""

    def state_dict(self) -> StateDict:
        """What the servers know besides the weights. Workers' memories and envs are not kept."""
        if self._servers and not self._stopping.is_set():
            with contextlib.suppress(MemberLost):
                calls = [server.handle.snapshot.remote() for server in self._servers]
                found = [self._cluster.get(call, "a server", ANSWER_S) for call in calls]
                self._remember(found)
        return {"envs": None, "update": self._config.update, "optimiser": self._optimiser or {}}

    def load_state_dict(self, state: StateDict, env_steps: int) -> bool:
        del env_steps
        if state.get("update") != self._config.update:
            raise CheckpointError(
                f"the checkpoint is of update {state.get('update')}, not {self._config.update}; "
                "resume with the update that it had"
            )
        self._optimiser = dict(state["optimiser"]) or None
        return False

    # --- accounts -----------------------------------------------------------------------------

    def env_steps_per_s(self) -> float | None:
        """From when every worker had reported once until the newest report."""
        if self._steady is None or self._newest_s <= self._steady[0]:
            return None
        with self._lock:
            since_s, before = self._steady
            return (self._env_steps() - before) / (self._newest_s - since_s)

    def account(self) -> FleetAccount | None:
        """What everybody did and cost; None before anybody has reported."""
        if not self._reports():
            return None
        if not self._stopping.is_set():
            self._account_servers()
        with self._lock:
            workers = [self._worker_account(n, w) for n, w in sorted(self._workers.items())]
            plain = [w.report.traffic for w in self._workers.values() if w.report]
        servers = [_server_account(n, server) for n, server in enumerate(self._servers)]
        return FleetAccount(
            update=self._config.update,
            wall_s=self._newest_s - self._began_s,
            driver_processor_s=time.process_time() - self._processor_s,
            workers=tuple(w for w in workers if w is not None),
            servers=tuple(servers),
            uncompressed_bytes_sent=sum(t["plain_bytes_sent"] for t in plain),
            uncompressed_bytes_received=sum(t["plain_bytes_received"] for t in plain),
        )

    def _worker_account(self, number: int, worker: _WorkerState) -> WorkerAccount | None:
        report = worker.report
        if report is None:
            return None
        traffic = report.traffic
        return WorkerAccount(
            number=number,
            host=report.host,
            env_steps=worker.total("env_steps"),
            updates=worker.total("updates"),
            wall_s=report.wall_s,
            processor_s=report.processor_s,
            seconds=report.seconds,
            bytes_sent=traffic["bytes_sent"],
            bytes_received=traffic["bytes_received"],
            messages=traffic["messages"],
            calls=tuple(traffic["calls"]),
            restarts=worker.restarts,
        )


def _server_account(number: int, server: _ServerState) -> ServerAccount:
    found = {**server.snapshot["counters"], **server.account}
    return ServerAccount(
        number=number,
        version=server.version,
        processor_s=found.get("processor_s", 0.0),
        received=found["received"] + server.earlier["received"],
        applied=found["applied"],
        repeated=found["repeated"],
        dropped=dict(found["dropped"]),
        bytes_in=found["bytes_in"] + server.earlier["bytes_in"],
        bytes_out=found["bytes_out"] + server.earlier["bytes_out"],
        staleness={int(age): count for age, count in found["staleness"].items()},
        restores=server.restores,
        lost_updates=server.lost_updates,
    )


def _shifted(report: Report, now_s: float) -> list[SpanRecord]:
    """A report's spans on this process's clock; the way here counts as no time."""
    shift_s = now_s - report.clock_s
    return [(stage, start + shift_s, end + shift_s) for stage, start, end in report.spans]


def _pace(report: Report) -> float:
    """Env steps per second of collecting and learning, without messages and waits."""
    spent = sum(report.seconds[stage] for stage in STAGES if KIND_OF[stage] == COMPUTING)
    return report.env_steps / max(spent, 1e-9)
