"""The servers of one run, in order. In: calls of its supervisor to all of them; out: answers.

They are started on the node of the process that trains, so that the loss of a node costs workers,
but no server. A server that dies is replaced by one that goes on from its last snapshot, in a new
epoch; what was lost with it is counted (``ledger.py``).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qfleet.config.config import Config
from qfleet.core.errors import ClusterError, MemberLost, QfleetError
from qfleet.core.types import StateDict
from qfleet.engines.cluster.member_pool import Member, MemberPool
from qfleet.engines.cluster.ray_cluster import TIMEOUT_S, Cluster
from qfleet.engines.parameter_server.compression import unpack
from qfleet.engines.parameter_server.layout import cut
from qfleet.engines.parameter_server.ledger import Ledger
from qfleet.engines.parameter_server.server import (
    RemoteServer,
    calls_at_once,
    cut_state,
    join_states,
)
from qfleet.engines.parameter_server.wire import Join, Pull, Stamp, Welcome
from qfleet.telemetry.faults import FaultLog
from qfleet.telemetry.fleet import ServerAccount

LOOK_S = 0.1
"""Longest time between two checks of a thread for something else to do."""
ANSWER_S = 30.0
"""Deadline of a server's answer once it has started; a server that misses it counts as dead."""
KEPT_COUNTERS = ("received", "repeated", "bytes_in", "bytes_out", "processor_s")
"""Counters of what was done, not of what is in the weights: a restore does not undo it."""


@dataclass
class _Server(Member):
    part: slice = field(default_factory=lambda: slice(0))
    """Its slice of the weights."""
    begin: tuple[Any, ...] = ()
    """Arguments of the next process: weights, optimiser state, epoch, snapshot."""
    rate_factors: NDArray[Any] | None = None
    """Its weights' learning rates relative to the run's; None: all are alike."""
    snapshot: StateDict = field(default_factory=dict)
    account: dict[str, Any] = field(default_factory=dict)
    """Its newest account; empty until the first answer."""
    earlier: dict[str, Any] = field(default_factory=lambda: dict.fromkeys(KEPT_COUNTERS, 0))
    """What earlier lives counted after the snapshots that their successors started from."""
    ledger: Ledger = field(default_factory=Ledger)
    fetched: Stamp | None = None
    """Version of its weights that the run has."""


class ServerRow:
    """All servers of a run; each holds one slice of the weights."""

    def __init__(
        self,
        config: Config,
        cluster: Cluster,
        faults: FaultLog,
        weights: Tensor,
        optimiser: StateDict | None,
        rate_factors: Tensor | None = None,
    ) -> None:
        """Start all servers; ``await_start`` waits until they answer.

        ``optimiser`` is the state of an optimiser of all weights. ``rate_factors``: each weight's
        learning rate relative to the run's.
        """
        self._config, self._cluster, self._faults = config, cluster, faults
        host = weights.cpu()
        self._servers: list[_Server] = []
        for number, part in enumerate(cut(host.numel(), config.servers)):
            own = optimiser and cut_state(optimiser, host.numel(), part)
            begin = (host[part].numpy(), own, 0, None)
            factors = None if rate_factors is None else rate_factors[part].numpy()
            server = _Server(number, part=part, begin=begin, rate_factors=factors)
            self._servers.append(server)
        self._pool = MemberPool(cluster, "server", self._spawn, self._servers)

    def _spawn(self, server: _Server) -> Any:
        begin, server.begin = server.begin, ()
        at_once = calls_at_once(self._config)
        return self._cluster.spawn(
            RemoteServer, self._config, *begin, server.rate_factors,
            processors=0, at_once=at_once, is_here=True,
        )  # fmt: skip

    def await_start(self, keep_going: Callable[[], bool]) -> bool:
        """Wait until all servers answer; return False if ``keep_going`` does before."""
        calls = [server.handle.snapshot.remote() for server in self._servers]
        until_s = time.monotonic() + TIMEOUT_S
        for server, call in zip(self._servers, calls, strict=True):
            while not self._cluster.ready([call], LOOK_S):
                if not keep_going():
                    return False
                if time.monotonic() > until_s:
                    raise ClusterError(
                        f"server {server.number} of {len(calls)} did not start within "
                        f"{TIMEOUT_S:g} s; lower --servers"
                    )
            server.snapshot = self._pool.get(server, call)
        self.ask_accounts()
        return True

    @property
    def handles(self) -> list[Any]:
        return [server.handle for server in self._servers]

    @property
    def renewals(self) -> dict[int, int]:
        """Number of restarts of each server."""
        return {server.number: server.life for server in self._servers}

    def renewed_since(self, known: Mapping[int, int]) -> tuple[tuple[int, Any], ...]:
        """Return number and handle of each server that was replaced since ``known`` renewals."""
        return tuple(
            (server.number, server.handle)
            for server in self._servers
            if known.get(server.number, 0) != server.life
        )

    def _ask(self, method: str, *arguments: Any) -> Iterator[tuple[_Server, Any]]:
        """Call all servers at once; yield each answer, None of a server that is lost."""
        calls = [getattr(server.handle, method).remote(*arguments) for server in self._servers]
        for server, call in zip(self._servers, calls, strict=True):
            yield server, self._answer(server, call)

    def _answer(self, server: _Server, call: Any, wait_s: float = ANSWER_S) -> Any:
        try:
            answer = self._pool.get(server, call, wait_s + server.grace_s)
        except MemberLost:
            return None
        server.is_ready = True
        return answer

    # --- workers ------------------------------------------------------------------------------

    def join(self, workers: list[int]) -> None:
        """Let these workers take part from now on, on every server."""
        calls = [
            (s, s.handle.join.remote(Join(worker))) for s in self._servers for worker in workers
        ]
        for server, call in calls:
            self._pool.get(server, call)

    def leave(self, lives: Mapping[int, int], died_with: Mapping[int, int] | None = None) -> None:
        """Stop waiting for these workers, and refuse lives of them that are older than these.

        ``died_with``: they died, and knew these renewals of the servers. A server that does not
        answer, or replaced one that they had sent to, does not know all that they sent.
        """
        calls = [
            (server, worker, server.handle.leave.remote(worker, life))
            for server in self._servers
            for worker, life in lives.items()
        ]
        until_s = time.monotonic() + ANSWER_S
        for server, worker, call in calls:
            answer = self._answer(server, call, max(0.0, until_s - time.monotonic()))
            if answer is not None:
                epoch, count = Welcome(*answer)
                server.ledger.record_sent(worker, {epoch: count})
            if died_with is not None:
                is_known = answer is not None and died_with.get(server.number, 0) == server.life
                server.ledger.unknown += not is_known

    def record_sent(self, worker: int, sent: list[dict[int, int]]) -> None:
        """Record how many messages a worker reports to have sent, by server and epoch."""
        for server, counts in zip(self._servers, sent, strict=True):
            server.ledger.record_sent(worker, counts)

    # --- what they hold -----------------------------------------------------------------------

    def fetch_into(self, weights: Tensor) -> None:
        """Copy the weights of all servers that answer; the supervisor replaces the others."""
        for server in self._servers:
            answer = self._answer(server, server.handle.pull.remote(Pull(server.fetched)))
            if answer is not None and answer.weights is not None:
                part, newest = weights[server.part], unpack(answer.weights)
                if part.device.type == "cpu":
                    # torch's copy wakes a thread per core, and they do not sleep for a while.
                    np.copyto(part.numpy(), newest.numpy())
                else:
                    part.copy_(newest)
                server.fetched = answer.stamp

    def take_snapshots(self) -> None:
        """Take a snapshot of every server; replace those that died."""
        for server, snapshot in self._ask("snapshot"):
            if snapshot is None:
                self.replace(server.number)
            else:
                server.snapshot, server.failures = snapshot, 0
        self.ask_accounts()

    def peek(self) -> list[StateDict] | None:
        """Return a snapshot of every server for a checkpoint; None if one does not answer."""
        found = [snapshot for _, snapshot in self._ask("snapshot")]
        return None if any(snapshot is None for snapshot in found) else found

    @property
    def snapshots(self) -> list[StateDict]:
        return [server.snapshot for server in self._servers]

    def remember(self, snapshots: list[StateDict], weights: Tensor) -> StateDict:
        """Copy the snapshots' weights; return the state of all their optimisers as that of one."""
        for server, snapshot in zip(self._servers, snapshots, strict=True):
            weights[server.part].copy_(torch.as_tensor(snapshot["weights"]))
            server.fetched = None
        sizes = [server.part.stop - server.part.start for server in self._servers]
        return join_states([snapshot["optimiser"] for snapshot in snapshots], sizes)

    # --- losses -------------------------------------------------------------------------------

    def is_lost(self, number: int, renewals: int) -> bool:
        """Return whether the server that had this many renewals is dead and not replaced yet.

        A worker that is cut off reports servers as lost that are alive.
        """
        server = self._servers[number]
        is_same = server.life == renewals
        return is_same and self._answer(server, server.handle.ping.remote()) is None

    def replace(self, number: int) -> None:
        """Replace a server by one that goes on from its last snapshot."""
        server, snapshot = self._servers[number], self._servers[number].snapshot
        self._pool.count_failure(server, "no snapshot in between")
        self._faults(
            "server",
            f"server {number} died; another goes on from version {snapshot['version']}, "
            "what came after it is lost and will be counted",
        )
        for name in KEPT_COUNTERS:
            before = snapshot["counters"].get(name, 0)
            # Either may be the newer of the two: the server died somewhere in between.
            server.earlier[name] += max(0, server.account.get(name, before) - before)
        records: dict[str, StateDict] = snapshot["records"]
        kept = {int(worker): record["sequence"] for worker, record in records.items()}
        server.ledger.restored(server.life, kept)
        server.begin = (snapshot["weights"], None, server.life, snapshot)
        self._pool.replace(server)  # if it was only silent, it is stopped: there are never two
        server.account = {}

    def stop(self) -> None:
        self._pool.stop()

    # --- accounts -----------------------------------------------------------------------------

    def ask_accounts(self) -> None:
        for server in self._servers:
            with contextlib.suppress(QfleetError):
                newest = self._answer(server, server.handle.account.remote())
                server.account = newest or server.account

    def pids(self) -> Iterator[tuple[str, int]]:
        for server in self._servers:
            if account := server.account:  # the supervisor's thread may replace it
                yield f"server {server.number}", account["pid"]

    def accounts(self) -> list[ServerAccount]:
        return [_account(server) for server in self._servers]


def _account(server: _Server) -> ServerAccount:
    found = {"version": server.snapshot["version"], **server.snapshot["counters"], **server.account}
    return ServerAccount(
        number=server.number,
        version=found["version"],
        applied=found["applied"],
        dropped=dict(found["dropped"]),
        staleness={int(age): count for age, count in found["staleness"].items()},
        restores=server.life,
        lost=server.ledger.lost,
        unknown=server.ledger.unknown,
        **{name: found.get(name, 0.0) + server.earlier[name] for name in KEPT_COUNTERS},
    )
