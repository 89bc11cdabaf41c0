"""Servers and workers of one run, as its collector: episodes, weights and accounts.

``Fleet`` opens the cluster and starts servers (``servers.py``) and workers (``supervisor.py``).
While they train, it fetches weights, sets the run's clock, and checks whether to go on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from qfleet.agent.weights import FlatWeights
from qfleet.core.errors import CheckpointError, ClusterLost
from qfleet.core.types import Clock, Episode, StateDict
from qfleet.data.manifest import Dataset
from qfleet.engines.cluster.ray_cluster import STORE_BYTES, Cluster, open_cluster
from qfleet.engines.parameter_server import limits
from qfleet.engines.parameter_server.row_shares import RowShares
from qfleet.engines.parameter_server.servers import LOOK_S, ServerRow
from qfleet.engines.parameter_server.store import check_store, store_bytes
from qfleet.engines.parameter_server.supervisor import Supervisor
from qfleet.engines.parameter_server.wire import INLINE_VECTOR_BYTES
from qfleet.engines.parameter_server.worker import Report
from qfleet.engines.parts import Setup
from qfleet.telemetry.fleet import TRAFFIC, FleetAccount, ShareRow
from qfleet.telemetry.timers import STAGES, Timers
from qfleet.telemetry.trace import SpanRecord

FETCH_S = 0.5
"""Seconds between two fetches of the weights."""


class Fleet:
    def __init__(
        self,
        setup: Setup,
        clock: Clock,
        timers: Timers,
        weights: FlatWeights,
        check_more: Callable[[int], None],
    ) -> None:
        """``weights`` are those that the run evaluates and saves.

        ``check_more`` raises ConfigError if the machine has no room for this many more workers.
        """
        self._setup, self._config, self._wanted = setup, setup.config, setup.config.workers
        self._clock, self._timers, self._weights = clock, timers, weights.data
        self._rate_factors = weights.rate_factors(setup.config)
        self._check_more = check_more
        self._optimiser: StateDict | None = None
        """The optimiser state of all servers together, as last fetched or loaded."""
        self._dataset = Dataset(self._config.data) if self._config.data else None
        self._rows: RowShares | None = None
        self._rows_left: StateDict | None = None
        """Rows of the dataset that were not read at the time of the clock."""
        self._base_env_steps = self._base_updates = 0
        self._base_skipped = 0.0
        self._base_seconds: dict[str, float] = {}
        self._cluster: Cluster | None = None
        self._servers: ServerRow | None = None
        self._supervisor: Supervisor | None = None
        self._began_s = time.monotonic()
        self._processor_s = time.process_time()

    # --- the run ------------------------------------------------------------------------------

    def run(self, keep_going: Callable[[], bool], lr_scale: Callable[[], float]) -> None:
        """Train until ``keep_going`` returns False or all steps are taken."""
        config = self._config
        self._base_env_steps, self._base_updates = self._clock.env_steps, self._clock.updates
        self._base_seconds = dict(self._timers.seconds)
        if not keep_going():
            return
        needed = store_bytes(config, self._weights)
        address, store = config.address or None, max(STORE_BYTES, needed)
        with open_cluster(
            config.workers, address, store_bytes=store, inline_bytes=INLINE_VECTOR_BYTES
        ) as cluster:
            check_store(cluster, needed)
            self._cluster = cluster
            faults = self._setup.faults
            servers = ServerRow(
                config, cluster, faults, self._weights, self._optimiser, self._rate_factors
            )
            supervisor = Supervisor(
                self._setup, cluster, servers, self._base_env_steps, lr_scale, self._open_rows()
            )
            supervisor.resize(self._wanted)  # a request may have come before the start
            self._servers, self._supervisor = servers, supervisor
            has_started = False
            try:
                try:
                    has_started = supervisor.start(keep_going)
                    if not has_started:
                        return
                    self._watch(servers, supervisor, keep_going)
                finally:
                    supervisor.stop()
                supervisor.check()
                servers.take_snapshots()
                self._optimiser = servers.remember(servers.snapshots, self._weights)
                self._settle_clock(supervisor)
            except ClusterLost:
                if has_started:  # what the checkpoint is written from
                    self._optimiser = servers.remember(servers.snapshots, self._weights)
                raise
            finally:
                if has_started:
                    servers.ask_accounts()
                servers.stop()

    def _open_rows(self) -> RowShares | None:
        """Return the rows of the dataset that are left to read; None without a dataset."""
        config = self._config
        if self._dataset is None:
            return None
        transitions = self._dataset.manifest.transitions
        rows = RowShares(transitions, config.batch_size, config.steps, self._base_env_steps)
        if self._rows_left is not None:
            rows.load_state_dict(self._rows_left)
        self._rows = rows
        return rows

    def _watch(
        self, servers: ServerRow, supervisor: Supervisor, keep_going: Callable[[], bool]
    ) -> None:
        fetched_s = -FETCH_S
        while True:
            supervisor.check()
            if time.monotonic() - fetched_s >= FETCH_S:
                servers.fetch_into(self._weights)
                fetched_s = time.monotonic()
            self._settle_clock(supervisor)
            if self._clock.env_steps >= self._config.steps or not keep_going():
                return
            supervisor.news.wait(LOOK_S)
            supervisor.news.clear()

    def _settle_clock(self, supervisor: Supervisor) -> None:
        with supervisor.lock:
            self._rows_left = None if self._rows is None else self._rows.state_dict()
            heard = [worker.reports for worker in supervisor.workers.values() if worker.reports]
        reports = [report for lives in heard for report in lives]
        self._clock.env_steps = self._base_env_steps + sum(report.env_steps for report in reports)
        self._clock.updates = self._base_updates + sum(report.updates for report in reports)
        for stage in STAGES if reports else ():
            # The mean over workers; all lives of one number count as one worker.
            spent_s = sum(report.seconds[stage] for report in reports) / len(heard)
            self._timers.seconds[stage] = self._base_seconds[stage] + spent_s

    def resize(self, workers: int) -> None:
        """Change the number of workers: new ones join, or the last leave after their slice."""
        limits.check(self._config, workers)
        if workers > self._wanted:
            self._check_more(workers - self._wanted)
            if self._cluster is not None:
                many = self._config.replace(workers=workers)
                check_store(self._cluster, store_bytes(many, self._weights))
        self._wanted = workers
        if self._supervisor is not None:
            self._supervisor.resize(workers)

    # --- what a run reads ---------------------------------------------------------------------

    def take_episodes(self) -> list[Episode]:
        return [] if self._supervisor is None else self._supervisor.take_episodes()

    def exploration_rate(self) -> float:
        rates = [report.exploration_rate for report in self._reports()]
        return sum(rates) / len(rates) if rates else 1.0

    def metrics(self) -> dict[str, float]:
        """Return means of the workers' newest metrics; ``skipped`` is a sum, |Q| a maximum."""
        found = [report.metrics for report in self._reports() if report.metrics]
        if not found:
            return {}
        means = {name: sum(m[name] for m in found) / len(found) for name in found[0]}
        means["abs_q_max"] = max(m["abs_q_max"] for m in found)
        means["skipped"] = self._skipped()
        return means

    def _skipped(self) -> float:
        """Return the number of non-finite gradients of all workers since the run began."""
        counts = [report.metrics.get("skipped", 0.0) for report in self._reports(all_lives=True)]
        return self._base_skipped + sum(counts)

    def _reports(self, all_lives: bool = False) -> list[Report]:
        return [] if self._supervisor is None else self._supervisor.reports(all_lives)

    def pids(self) -> dict[str, int]:
        """Return pids by name (``worker 0``, ``server 1`` …) of processes that have reported."""
        if self._supervisor is None or self._servers is None:
            return {}
        with self._supervisor.lock:
            workers = {
                f"worker {number}": worker.report.pid
                for number, worker in self._supervisor.workers.items()
                if worker.report is not None
            }
        return workers | dict(self._servers.pids())

    def lanes(self) -> Iterator[tuple[str, list[SpanRecord]]]:
        """Return the spans of every worker, if a trace is recorded."""
        workers = {} if self._supervisor is None else self._supervisor.workers
        for number, worker in sorted(workers.items()):
            yield f"worker {number}", worker.spans

    def state_dict(self) -> StateDict:
        """Return the servers' state besides the weights; memories and envs are not saved."""
        servers, supervisor = self._servers, self._supervisor
        if servers is not None and supervisor is not None and not supervisor.is_over:
            snapshots = servers.peek()
            if snapshots is not None:
                self._optimiser = servers.remember(snapshots, self._weights)
        return {
            "envs": None,
            "update": self._config.update,
            "optimiser": self._optimiser or {},
            "skipped": self._skipped(),
            **({} if self._rows_left is None else {"rows": self._rows_left}),
            **({} if self._dataset is None else {"dataset": self._dataset.manifest.sha256}),
        }

    def load_state_dict(self, state: StateDict) -> bool:
        if state.get("update") != self._config.update:
            raise CheckpointError(
                f"the checkpoint is of update {state.get('update')}, not {self._config.update}; "
                "resume with the update that it had"
            )
        if self._dataset is not None and "dataset" in state:  # older checkpoints have none
            self._dataset.check_same(state["dataset"])
        self._optimiser = dict(state["optimiser"]) or None
        self._base_skipped = state.get("skipped", 0.0)  # older checkpoints have none
        self._rows_left = state.get("rows")
        return False

    # --- accounts -----------------------------------------------------------------------------

    def env_steps_per_s(self) -> float | None:
        return None if self._supervisor is None else self._supervisor.rate.env_steps_per_s()

    def counts(self) -> dict[str, Any]:
        return {}

    def communication(self) -> dict[str, int | None]:
        """Return what the workers sent and received."""
        account = self.account()
        return {name: account.total(name) if account else None for name in TRAFFIC}

    def rows(self) -> list[ShareRow]:
        if self._supervisor is None:
            return []
        with self._supervisor.lock:
            workers = [worker for _, worker in sorted(self._supervisor.workers.items())]
            return [worker.account().row("worker") for worker in workers]

    def account(self) -> FleetAccount | None:
        """Return the account of all processes; None before the first report."""
        servers, supervisor = self._servers, self._supervisor
        if servers is None or supervisor is None:
            return None
        with supervisor.lock:
            workers = [worker for _, worker in sorted(supervisor.workers.items())]
            accounts = [worker.account() for worker in workers]
            traffic = [report.traffic for worker in workers for report in worker.reports]
        if not traffic:
            return None
        if not supervisor.is_over:
            servers.ask_accounts()
        return FleetAccount(
            update=self._config.update,
            wall_s=supervisor.rate.newest[0] - self._began_s,
            driver_processor_s=time.process_time() - self._processor_s,
            workers=tuple(accounts),
            servers=tuple(servers.accounts()),
            uncompressed_bytes_sent=sum(t["plain_bytes_sent"] for t in traffic),
            uncompressed_bytes_received=sum(t["plain_bytes_received"] for t in traffic),
        )
