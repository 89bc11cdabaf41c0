"""Gradient descent on a real cluster is that of one process, and every byte is counted."""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from qfleet.core.errors import ClusterError, ConfigError, DivergedError
from qfleet.engines.cluster.ray_cluster import Cluster, open_cluster
from qfleet.lab import mapreduce_ray
from qfleet.lab.mapreduce import Slowness, broadcast_bytes, gradient_bytes, make_problem
from qfleet.lab.mapreduce_ray import Descent, descend_on
from qfleet.telemetry.timers import COMPUTING
from support.clusters import RAY_MARKS
from support.descents import descend
from support.messages import says
from support.waiting import deadline

pytestmark = RAY_MARKS

WORKERS, STEPS, RATE = 2, 12, 0.2
PROBLEM = make_problem(300, 5, noise=0.1, seed=0)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """One for all tests: starting it takes seconds."""
    with open_cluster(WORKERS, timeout_s=deadline(60.0)) as opened:
        yield opened


def check_account(descent: Descent, steps: int = STEPS) -> None:
    """Sent as often as answered, and no worker does two things at once."""
    traffic = descent.traffic
    assert traffic.messages_sent == traffic.messages_received == steps * WORKERS
    assert traffic.bytes_sent == steps * broadcast_bytes(WORKERS, 5)
    assert sum(descent.staleness.values()) == steps * WORKERS
    assert len(descent.weights) == len(descent.times_s) == steps + 1
    assert descent.times_s == sorted(descent.times_s)
    for spans in descent.spans:
        assert spans == sorted(spans, key=lambda span: span.start_s)
        for span, after in pairwise(spans):
            assert span.end_s == pytest.approx(after.start_s, abs=1e-9)
        assert spans[-1].end_s <= descent.wall_s
    for k in range(WORKERS):
        assert sum(descent.time_share(k).values()) == pytest.approx(1.0, abs=0.05)


def test_workers_do_not_wait_for_torch() -> None:
    code = "import sys, qfleet.lab.mapreduce_ray; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("local_reduction", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_sync_is_one_process(cluster: Cluster, local_reduction: bool) -> None:
    found = descend_on(
        cluster, PROBLEM, WORKERS, STEPS, RATE, "sync", local_reduction=local_reduction
    )
    expected = descend(PROBLEM, 1, STEPS, RATE, local_reduction=local_reduction)
    if local_reduction:
        assert np.stack(found.weights) == pytest.approx(expected, rel=1e-12, abs=1e-13)
    else:
        assert np.array_equal(found.weights, expected)
    check_account(found)
    assert found.staleness == {0: STEPS * WORKERS}
    vectors = STEPS * (WORKERS if local_reduction else PROBLEM.samples)
    assert found.traffic.vectors_received == vectors
    assert found.traffic.bytes_received == STEPS * gradient_bytes(
        WORKERS, PROBLEM.samples, 5, local_reduction=local_reduction
    )


@pytest.mark.slow
def test_async_counts_staleness_and_descends(cluster: Cluster) -> None:
    steps = 2 * STEPS  # enough for any order in which gradients arrive
    found = descend_on(cluster, PROBLEM, WORKERS, steps, RATE, "async")
    check_account(found, steps)
    # The second gradient to arrive was computed before the first was applied.
    assert max(found.staleness) >= 1
    assert PROBLEM.distance(found.weights[-1]) < 0.1


@pytest.mark.slow
def test_a_straggler_holds_up_sync_but_not_async(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = mapreduce_ray._Server._clock_difference

    def checked(server: Any, k: int) -> float:
        """Return the true difference on one machine: an error could clip a span to nothing."""
        began_s = time.monotonic()
        assert abs(measure(server, k)) <= time.monotonic() - began_s
        return 0.0

    monkeypatch.setattr(mapreduce_ray._Server, "_clock_difference", checked)
    late = Slowness(latency_s=0.05)
    sync = descend_on(cluster, PROBLEM, WORKERS, STEPS, RATE, "sync", straggler=late)
    free = descend_on(cluster, PROBLEM, WORKERS, STEPS, RATE, "async", straggler=late)

    def gradients(descent: Descent) -> list[int]:
        return [sum(span.kind == COMPUTING for span in own) for own in descent.spans]

    assert gradients(sync) == [STEPS, STEPS]
    assert sync.wall_s >= STEPS * late.latency_s
    assert sync.spent_s(1, COMPUTING) >= STEPS * late.latency_s * 0.99
    # How the gradients are shared out without a barrier is a matter of time; their number is not.
    assert sum(gradients(free)) == 2 * STEPS


def test_a_rate_too_large_is_told(cluster: Cluster) -> None:
    with pytest.raises(DivergedError, match=says("learning_rate", "1e+200")):
        descend_on(cluster, PROBLEM, WORKERS, STEPS, 1e200, "sync")


@pytest.mark.parametrize(("steps", "rate", "named"), [(0, 0.1, "steps"), (1, 0.0, "learning_rate")])
def test_bad_numbers_are_refused(cluster: Cluster, steps: int, rate: float, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        descend_on(cluster, PROBLEM, WORKERS, steps, rate, "sync")


def test_what_a_member_raises_is_one_line_with_its_traceback_behind_it(cluster: Cluster) -> None:
    class Member:  # in here: it travels as a whole
        def fail(self) -> None:
            raise KeyError("no such thing")

    member = cluster.spawn(Member, processors=0)
    with pytest.raises(ClusterError, match=says("member 7", "KeyError", "no such thing")) as caught:
        cluster.get(member.fail.remote(), "member 7")
    assert ", in fail" in "".join(traceback.format_exception(caught.value))
    cluster.stop(member)


class Killer(Cluster):
    """Kills the last worker, as the kernel might, before the third broadcast."""

    def spawn(self, kind: type, *args: Any) -> Any:
        # Made here, so that it travels as it is: no worker can import this file.
        known = type("Known", (kind,), {"pid": lambda _: os.getpid()})
        spawned.append(super().spawn(known, *args))
        return spawned[-1]

    def put(self, value: Any) -> Any:
        puts.append(value)
        if len(puts) == 3:
            os.kill(self.get(spawned[-1].pid.remote(), "the last"), signal.SIGKILL)
        return super().put(value)


spawned: list[Any] = []
puts: list[Any] = []


def test_a_killed_worker_is_one_line(cluster: Cluster) -> None:
    spawned.clear()
    puts.clear()
    killer = Killer(cluster.ray, cluster.address, cluster.folder, cluster.timeout_s)
    with pytest.raises(ClusterError, match=says("worker 1 of 2", "died")):
        descend_on(killer, PROBLEM, WORKERS, STEPS, RATE, "sync")
    assert len(puts) == 3


def test_a_silent_worker_is_one_line(cluster: Cluster) -> None:
    hasty = dataclasses.replace(cluster, timeout_s=0.2)
    with pytest.raises(ClusterError, match=says("0.2 s")):
        descend_on(hasty, PROBLEM, WORKERS, STEPS, RATE, "sync", straggler=Slowness(latency_s=60.0))


@pytest.mark.usefixtures("cluster")
def test_only_loopback_is_served() -> None:
    import psutil

    served = set()
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):  # Ray's helpers may end meanwhile
            served |= {
                connection.laddr.ip.removeprefix("::ffff:")
                for connection in process.net_connections("inet")
                if connection.status == psutil.CONN_LISTEN
            }
    assert served
    assert [ip for ip in served if not ipaddress.ip_address(ip).is_loopback] == []
