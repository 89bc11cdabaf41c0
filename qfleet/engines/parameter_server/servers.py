"""The servers of one run, in order. In: what its supervisor wants of them all; out: their answers.

They are started on the node of the process that trains, so that a node that is lost takes workers
along, but no server. One that dies is replaced by one that goes on from its last snapshot, in a new
epoch; what was lost with it is counted (``ledger.py``).
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from qfleet.config.config import Config
from qfleet.core.errors import ClusterError, MemberLost, QfleetError
from qfleet.core.types import StateDict
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
"""How often a thread looks up from its work, at least."""
ANSWER_S = 30.0
"""How long a server may take to answer, its start included, before it is as good as dead."""
MOST_LOSSES = 10
"""Times in a row that a server may die before it was heard of."""
CARRIED_ON = ("received", "repeated", "bytes_in", "bytes_out")
"""Counters of what was done, not of what is in the weights: a restore does not undo it."""


@dataclass
class _State:
    handle: Any
    snapshot: StateDict
    restores: int = 0
    losses: int = 0
    """In a row, without a snapshot in between."""
    account: dict[str, Any] = field(default_factory=dict)
    """Its newest; empty until it was asked."""
    earlier: Counter[str] = field(default_factory=Counter)
    """What those before it counted after the snapshots that were gone back to."""
    earlier_processor_s: float = 0.0
    """Of those before it, as far as they were asked."""
    ledger: Ledger = field(default_factory=Ledger)
    fetched: Stamp | None = None
    """Which of its weights the run has."""


class ServerRow:
    def __init__(
        self,
        config: Config,
        cluster: Cluster,
        faults: FaultLog,
        weights: Tensor,
        optimiser: StateDict | None,
    ) -> None:
        """Starts them, with these weights and perhaps the state of an optimiser for all of them.

        They are there when ``await_start`` says so.
        """
        self._config, self._cluster, self._faults = config, cluster, faults
        self._slices = cut(weights.numel(), config.servers)
        self._states: list[_State] = []
        host = weights.cpu()
        for part in self._slices:
            own = optimiser and cut_state(optimiser, host.numel(), part)
            self._states.append(_State(self._spawn(host[part].numpy(), own, 0, None), {}))

    def await_start(self, keep_going: Callable[[], bool]) -> bool:
        """Wait until all of them are there; False where ``keep_going`` says no before."""
        calls = [state.handle.snapshot.remote() for state in self._states]
        until_s = time.monotonic() + TIMEOUT_S
        for number, (state, call) in enumerate(zip(self._states, calls, strict=True)):
            while not self._cluster.ready([call], LOOK_S):
                if not keep_going():
                    return False
                if time.monotonic() > until_s:
                    raise ClusterError(
                        f"server {number} of {len(calls)} did not start within {TIMEOUT_S:g} s; "
                        "ask for fewer --servers"
                    )
            state.snapshot = self._cluster.get(call, f"server {number}")
        self.ask_accounts()
        return True

    @property
    def handles(self) -> list[Any]:
        return [state.handle for state in self._states]

    @property
    def renewals(self) -> dict[int, int]:
        """By server: how often it was started anew."""
        return {number: state.restores for number, state in enumerate(self._states)}

    def renewed_since(self, known: Mapping[int, int]) -> tuple[tuple[int, Any], ...]:
        """Servers that stand in for others since then, and their handles."""
        return tuple(
            (number, state.handle)
            for number, state in enumerate(self._states)
            if known.get(number, 0) != state.restores
        )

    # --- workers ------------------------------------------------------------------------------

    def join(self, workers: list[int]) -> None:
        """These take part from now on, everywhere."""
        calls = [s.handle.join.remote(Join(worker)) for s in self._states for worker in workers]
        for call in calls:
            self._cluster.get(call, "a server")

    def leave(self, lives: Mapping[int, int], died_with: Mapping[int, int] | None = None) -> None:
        """Nobody waits for these workers any more, nor listens to a life of them before this one.

        ``died_with``: they died, and knew of so many renewals of each server. Who cannot be asked
        about them, or stands in for one that they had sent to, does not know all that they sent.
        """
        calls = [
            (number, worker, state.handle.leave.remote(worker, life))
            for number, state in enumerate(self._states)
            for worker, life in lives.items()
        ]
        until_s = time.monotonic() + ANSWER_S
        for number, worker, call in calls:
            state = self._states[number]
            is_known = died_with is None or died_with.get(number, 0) == state.restores
            try:
                left_s = max(0.0, until_s - time.monotonic())
                epoch, count = Welcome(*self._cluster.get(call, "a server", left_s))
                state.ledger.heard(worker, {epoch: count})
            except MemberLost:
                is_known = died_with is None
            state.ledger.unknown += not is_known

    def heard(self, worker: int, sent: list[dict[int, int]]) -> None:
        """By server and epoch: so many messages this worker says it has sent."""
        for state, counts in zip(self._states, sent, strict=True):
            state.ledger.heard(worker, counts)

    # --- what they hold -----------------------------------------------------------------------

    def fetch_into(self, weights: Tensor) -> None:
        """Their weights, where they answer."""
        for part, state in zip(self._slices, self._states, strict=True):
            try:
                call = state.handle.pull.remote(Pull(state.fetched))
                answer = self._cluster.get(call, "a server", ANSWER_S)
            except MemberLost:
                continue  # the supervisor sees to it
            if answer.weights is not None:
                weights[part].copy_(unpack(answer.weights))
                state.fetched = answer.stamp

    def take_snapshots(self) -> None:
        """One of every server, now; those that died go on from their last."""
        calls = [state.handle.snapshot.remote() for state in self._states]
        for number, (state, call) in enumerate(zip(self._states, calls, strict=True)):
            try:
                state.snapshot = self._cluster.get(call, f"server {number}", ANSWER_S)
                state.losses = 0
            except MemberLost:
                self.replace(number)
        self.ask_accounts()

    def peek(self) -> list[StateDict] | None:
        """Snapshots for somebody else; None where one does not answer."""
        calls = [state.handle.snapshot.remote() for state in self._states]
        try:
            return [self._cluster.get(call, "a server", ANSWER_S) for call in calls]
        except MemberLost:
            return None

    @property
    def snapshots(self) -> list[StateDict]:
        return [state.snapshot for state in self._states]

    def remember(self, snapshots: list[StateDict], weights: Tensor) -> StateDict:
        """Take over the weights of these; the state of all their optimisers as that of one."""
        for part, state, snapshot in zip(self._slices, self._states, snapshots, strict=True):
            weights[part].copy_(torch.as_tensor(snapshot["weights"]))
            state.fetched = None
        sizes = [part.stop - part.start for part in self._slices]
        return join_states([snapshot["optimiser"] for snapshot in snapshots], sizes)

    # --- death --------------------------------------------------------------------------------

    def is_lost(self, number: int, renewals: int) -> bool:
        """Whether the server that was there after so many renewals is gone, and nobody stands in.

        A worker that is cut off says so of servers that are well.
        """
        state = self._states[number]
        if state.restores != renewals:
            return False
        try:
            self._cluster.get(state.handle.ping.remote(), f"server {number}", ANSWER_S)
        except MemberLost:
            return True
        return False

    def replace(self, number: int) -> None:
        state, snapshot = self._states[number], self._states[number].snapshot
        state.losses += 1
        if state.losses > MOST_LOSSES:
            raise ClusterError(f"server {number} died {state.losses} times in a row")
        self._faults(
            "server",
            f"server {number} died; another goes on from version {snapshot['version']}, "
            "what came after it is lost and will be counted",
        )
        for name in CARRIED_ON:
            before = snapshot["counters"][name]
            # Either may be the newer of the two: the server died somewhere in between.
            state.earlier[name] += max(0, state.account.get(name, before) - before)
        state.earlier_processor_s += state.account.get("processor_s", 0.0)
        records: dict[str, StateDict] = snapshot["records"]
        kept = {int(worker): record["sequence"] for worker, record in records.items()}
        state.ledger.restored(state.restores, kept)
        with contextlib.suppress(Exception):
            self._cluster.stop(state.handle)  # if it was only silent: there are never two
        weights = snapshot["weights"]
        state.handle = self._spawn(weights, None, state.restores, snapshot)
        state.restores += 1
        state.account = {}

    def stop(self) -> None:
        for state in self._states:
            with contextlib.suppress(Exception):
                self._cluster.stop(state.handle)

    def _spawn(
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
            is_here=True,
        )

    # --- accounts -----------------------------------------------------------------------------

    def ask_accounts(self) -> None:
        for number, state in enumerate(self._states):
            with contextlib.suppress(QfleetError):
                call = state.handle.account.remote()
                state.account = self._cluster.get(call, f"server {number}", ANSWER_S)

    def pids(self) -> Iterator[tuple[str, int]]:
        for number, state in enumerate(self._states):
            account = state.account  # which the supervisor's thread may replace
            if account:
                yield f"server {number}", account["pid"]

    def accounts(self) -> list[ServerAccount]:
        return [_account(number, state) for number, state in enumerate(self._states)]


def _account(number: int, state: _State) -> ServerAccount:
    found = {"version": state.snapshot["version"], **state.snapshot["counters"], **state.account}
    return ServerAccount(
        number=number,
        version=found["version"],
        processor_s=found.get("processor_s", 0.0) + state.earlier_processor_s,
        received=found["received"] + state.earlier["received"],
        applied=found["applied"],
        repeated=found["repeated"] + state.earlier["repeated"],
        dropped=dict(found["dropped"]),
        bytes_in=found["bytes_in"] + state.earlier["bytes_in"],
        bytes_out=found["bytes_out"] + state.earlier["bytes_out"],
        staleness={int(age): count for age, count in found["staleness"].items()},
        restores=state.restores,
        lost=state.ledger.lost,
        unknown=state.ledger.unknown,
    )
