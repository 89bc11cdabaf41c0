"""The servers of a run as its supervisor sees them, in one process: who left, what was lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from qfleet.config.config import Config
from qfleet.core.errors import ClusterError, MemberLost
from qfleet.engines.parameter_server import servers
from qfleet.engines.parameter_server.server import Server
from qfleet.engines.parameter_server.servers import ServerRow
from qfleet.engines.parameter_server.wire import Pull, Push
from qfleet.telemetry.faults import FaultLog
from support.messages import says
from support.server_runs import first_weights, make_config


class Handle:
    """Stands for a server as Ray's handles do: every method has a ``remote``."""

    def __init__(self, server: Server) -> None:
        self.server, self.is_dead = server, False

    def __getattr__(self, name: str) -> Any:
        class Method:
            @staticmethod
            def remote(*arguments: Any) -> Callable[[], Any]:
                def answer() -> Any:
                    if self.is_dead:
                        raise MemberLost("it died")
                    return getattr(self.server, name)(*arguments)

                return answer

        return Method


class OneProcess:
    def spawn(self, kind: type, *arguments: Any, **options: Any) -> Handle:
        del kind, options
        return Handle(Server(*arguments))

    def __init__(self) -> None:
        self.waits_s: list[float | None] = []

    def get(self, call: Callable[[], Any], who: str, wait_s: float | None = None) -> Any:
        del who
        self.waits_s.append(wait_s)
        return call()

    def ready(self, pending: list[Any], wait_s: float) -> list[Any]:
        del wait_s
        return pending if self.has_room else []

    has_room = True

    def stop(self, handle: Handle) -> None:
        handle.is_dead = True


def make_row() -> tuple[ServerRow, Config]:
    config = make_config(workers=2, update="async", servers=2)
    row = ServerRow(config, OneProcess(), FaultLog(), first_weights(config), None)  # type: ignore[arg-type]
    assert row.await_start(lambda: True)
    row.join([0, 1])
    return row, config


def push(row: ServerRow, worker: int, count: int) -> None:
    for handle in row.handles:
        server: Server = handle.server
        for _ in range(count):
            _, sequence = server._shard.next_message(worker)
            gradient = np.ones(server._shard.size, dtype=np.float32)
            stamp = server.pull(Pull()).stamp
            server.push(Push(worker, sequence, *stamp, gradient, 1e-3, patience_s=1.0))


def lost_and_unknown(row: ServerRow) -> list[tuple[int, int]]:
    return [(account.lost, account.unknown) for account in row.accounts()]


def test_servers_that_do_not_start_are_waited_for_until_somebody_has_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = make_config(workers=2, update="async", servers=2)
    cluster = OneProcess()
    cluster.has_room = False
    row = ServerRow(config, cluster, FaultLog(), first_weights(config), None)  # type: ignore[arg-type]
    asked = iter([True, True, False])
    assert not row.await_start(lambda: next(asked))
    monkeypatch.setattr(servers, "TIMEOUT_S", -1.0)
    with pytest.raises(ClusterError, match=says("server 0 of 2", "--servers")):
        row.await_start(lambda: True)


def test_only_a_server_that_has_to_start_is_given_the_time_for_it() -> None:
    config, cluster = make_config(workers=2, update="async", servers=2), OneProcess()
    row = ServerRow(config, cluster, FaultLog(), first_weights(config), None)  # type: ignore[arg-type]
    assert row.await_start(lambda: True)
    row.replace(1)
    cluster.waits_s.clear()
    row.ask_accounts()
    row.ask_accounts()
    answered = servers.ANSWER_S
    assert cluster.waits_s == [answered, answered + servers.TIMEOUT_S, answered, answered]


def test_what_came_after_the_snapshot_is_counted_when_workers_tell() -> None:
    row, _ = make_row()
    push(row, 0, 5)
    row.take_snapshots()
    push(row, 0, 3)
    row.handles[1].is_dead = True
    row.replace(1)
    row.record_sent(0, [{0: 8}, {0: 8}])
    assert lost_and_unknown(row) == [(0, 0), (3, 0)]
    row.ask_accounts()
    assert [account.applied for account in row.accounts()] == [8, 5]


def test_of_a_dead_worker_the_servers_tell() -> None:
    row, _ = make_row()
    row.take_snapshots()
    push(row, 1, 4)  # of which it never told
    row.leave({1: 1}, died_with=row.renewals)
    row.handles[0].is_dead = True
    row.replace(0)
    assert lost_and_unknown(row) == [(4, 0), (0, 0)]


def test_where_both_died_somebody_says_that_it_is_not_known() -> None:
    row, _ = make_row()
    push(row, 1, 4)
    before = row.renewals
    row.handles[0].is_dead = True
    row.leave({1: 1}, died_with=before)  # nobody answers
    assert lost_and_unknown(row) == [(0, 1), (0, 0)]
    row.replace(0)
    row.leave({0: 1}, died_with=before)  # another answers, who never heard of what it sent
    assert lost_and_unknown(row) == [(0, 2), (0, 0)]


def test_workers_that_only_leave_have_told_everything() -> None:
    row, _ = make_row()
    row.handles[0].is_dead = True
    row.leave({0: 0, 1: 0})
    assert lost_and_unknown(row) == [(0, 0), (0, 0)]
    assert row.handles[1].server.account()["present"] == []


def test_weights_travel_to_the_run_only_where_they_changed() -> None:
    row, config = make_row()
    mine = torch.zeros_like(first_weights(config))
    row.fetch_into(mine)
    assert torch.equal(mine, first_weights(config))
    sent = [account.bytes_out for account in row.accounts()]
    row.fetch_into(mine)
    row.ask_accounts()
    out = [account.bytes_out for account in row.accounts()]
    row.fetch_into(mine)
    row.ask_accounts()
    assert [account.bytes_out for account in row.accounts()] == out
    assert sum(out) > sum(sent)
    push(row, 0, 1)
    row.fetch_into(mine)
    assert not torch.equal(mine, first_weights(config))
