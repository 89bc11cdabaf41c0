"""What a fleet comes to, checked by hand."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest

from qfleet.telemetry.fleet import (
    LEARNER,
    MOST_LOGGED,
    TRAFFIC,
    FleetAccount,
    ShardAccount,
    Staleness,
    fit_cost,
    share_scalars,
)
from qfleet.telemetry.fleet_table import fleet_lines
from qfleet.telemetry.timers import COMMUNICATING, COMPUTING, KIND_OF, KINDS, STAGES, WAITING
from support.fleets import QUICK, SLOW, fleet, server, worker

EMPTY = FleetAccount("async", 0.0, 0.0, ())


def test_every_stage_is_of_a_kind() -> None:
    assert set(KIND_OF) == set(STAGES)
    assert set(KIND_OF.values()) == set(KINDS)
    assert [stage for stage in STAGES if KIND_OF[stage] == COMPUTING] == [
        "env",
        "act",
        "copy",
        "learn",
        "evaluate",
        "save",
    ]


def test_rates_and_processor_time_are_of_all_processes() -> None:
    account = fleet()
    assert account.total("env_steps") == 900
    # Over the 10 s that workers worked, not the 12 s of the run.
    assert account.env_steps_per_s == 90.0
    assert account.processor_s == 1.5 + 3 * 3.0 + 2 * 2.0
    longer = fleet(workers=(worker(0, 100, SLOW), worker(1, 400, QUICK, wall_s=12.5)))
    assert longer.env_steps_per_s == 500 / 12.5


def test_time_is_computing_communicating_waiting_or_other() -> None:
    account = fleet()
    assert account.workers[0].shares == pytest.approx(
        {COMPUTING: 0.8, COMMUNICATING: 0.1, WAITING: 0.0, "other": 0.1}
    )
    assert account.workers[1].shares == pytest.approx(
        {COMPUTING: 0.4, COMMUNICATING: 0.1, WAITING: 0.5, "other": 0.0}
    )
    assert account.shares == pytest.approx(
        {COMPUTING: 1.6 / 3, COMMUNICATING: 0.1, WAITING: 1.0 / 3, "other": 0.1 / 3}
    )


def test_shares_of_each_worker_are_scalars_for_the_log() -> None:
    scalars = share_scalars(fleet().rows)
    assert len(scalars) == len(KINDS) * len(fleet().workers)
    assert scalars["worker_1/time/share_waiting"] == pytest.approx(0.5)
    many = fleet(workers=[worker(k, 1, SLOW) for k in range(3 * MOST_LOGGED)])
    assert len(share_scalars(many.rows)) == len(KINDS) * MOST_LOGGED
    learning = [*many.rows, (LEARNER, None, fleet().shares)]
    assert "learner/time/share_waiting" in share_scalars(learning)
    assert len(share_scalars(learning)) == len(KINDS) * (MOST_LOGGED + 1)


def test_a_worker_that_never_worked_does_not_count_in_the_mean() -> None:
    unborn = worker(3, 0, dict.fromkeys(SLOW, 0.0), wall_s=0.0)
    account = fleet(workers=(*fleet().workers, unborn))
    assert account.shares == fleet().shares
    assert set(unborn.shares.values()) == {0.0}
    assert account.straggler_ratio == fleet().straggler_ratio


def test_the_straggler_is_named_by_what_it_does_alone() -> None:
    account = fleet()
    # 10, 80 and 80 steps per second that they did not wait; 10, 40 and 40 on the wall clock.
    assert account.straggler_ratio == pytest.approx(8.0)
    assert account.as_dict()["straggler"]["rate_ratio"] == pytest.approx(4.0)
    assert account.straggler == 0


def test_a_barrier_does_not_hide_the_straggler() -> None:
    quick = {**QUICK, "idle": 7.5}
    account = fleet(workers=(worker(5, 100, SLOW), worker(6, 100, quick), worker(7, 100, quick)))
    assert account.as_dict()["straggler"]["rate_ratio"] == 1.0
    assert account.straggler_ratio == pytest.approx(4.0)
    assert account.straggler == 5


def test_a_little_slower_is_no_straggler() -> None:
    def two_and(steps: int) -> FleetAccount:
        workers = (worker(0, 300, SLOW), worker(1, 300, SLOW), worker(2, steps, SLOW))
        return fleet(workers=workers)

    assert two_and(200).straggler_ratio == pytest.approx(1.5)
    assert two_and(200).straggler is None
    assert two_and(199).straggler == 2


def test_a_worker_without_a_step_is_named_without_a_ratio() -> None:
    account = fleet(workers=(worker(0, 100, SLOW), worker(1, 100, SLOW), worker(2, 0, SLOW)))
    assert account.straggler == 2
    assert account.straggler_ratio is None
    assert "straggler     worker 2 made no step" in fleet_lines(account)


def test_one_worker_has_no_straggler() -> None:
    account = fleet(workers=(worker(0, 100, SLOW),))
    found = account.as_dict()["straggler"]
    assert found == {"worker": None, "ratio": None, "rate_ratio": None}


def test_staleness_of_all_servers_together() -> None:
    ages = fleet().staleness
    assert ages.counts == {0: 11, 1: 5, 2: 3, 9: 1}
    assert ages.mean == (5 + 6 + 9) / 20
    assert ages.percentile(95) == 2  # 19 of 20
    assert ages.percentile(100) == 9


@pytest.mark.parametrize(
    ("counts", "p95", "largest"),
    [
        ({0: 95, 7: 5}, 0, 7),
        ({0: 94, 7: 6}, 7, 7),
        ({3: 1}, 3, 3),
        ({0: 10, 4: 0}, 0, 0),
        ({}, None, None),
    ],
)
def test_the_tail_of_staleness(
    counts: dict[int, int], p95: int | None, largest: int | None
) -> None:
    ages = Staleness(counts)
    assert (ages.percentile(95), ages.percentile(100)) == (p95, largest)


def test_traffic_and_what_compression_saved() -> None:
    account = fleet(uncompressed_bytes_sent=12_000)
    assert [account.total(name) for name in TRAFFIC] == [3000, 9000, 60]
    assert (account.saved("sent"), account.saved("received")) == (0.75, None)
    assert "dropped       too-old ×6" in fleet_lines(account)


# --- what a message costs -----------------------------------------------------------------------


def test_latency_and_bandwidth_are_found_again() -> None:
    calls = [(size, 0.002 + size / 1e6) for size in (100, 1000, 50_000, 1000)]
    cost = fit_cost(calls)
    assert cost is not None
    assert cost.latency_s == pytest.approx(0.002)
    assert cost.bandwidth_bytes_per_s == pytest.approx(1e6)
    assert cost.explained == pytest.approx(1.0)
    assert cost.messages == 4


def test_the_line_is_that_of_least_squares() -> None:
    # Through (0, 1), (1, 2), (2, 5): slope 2, intercept 2/3; residuals 1/3, -2/3, 1/3.
    cost = fit_cost([(0, 1.0), (1, 2.0), (2, 5.0)])
    assert cost is not None
    assert cost.latency_s == pytest.approx(2 / 3)
    assert cost.bandwidth_bytes_per_s == pytest.approx(0.5)
    assert cost.explained == pytest.approx(1 - (6 / 9) / (26 / 3))


@pytest.mark.parametrize(
    "calls",
    [
        [],
        [(10, 1.0), (20, 2.0)],
        [(10, 1.0)] * 50,
        [(0, 1.0)] * 50,
        [(1000, 1.0), (1001, 2.0), (1999, 3.0)],
    ],
)
def test_what_does_not_tell_is_not_fitted(calls: list[tuple[int, float]]) -> None:
    assert fit_cost(calls) is None


def test_no_latency_is_below_zero() -> None:
    # The free line through these is 2·bytes − 1/3: the best through the origin is taken.
    cost = fit_cost([(0, 0.0), (1, 1.0), (2, 4.0)])
    assert cost is not None
    assert cost.latency_s == 0.0
    assert cost.bandwidth_bytes_per_s == pytest.approx(5 / 9)


def test_larger_messages_that_took_no_longer_have_no_bandwidth() -> None:
    cost = fit_cost([(1, 3.0), (10, 2.0), (100, 1.0)])
    assert cost is not None
    assert (cost.latency_s, cost.bandwidth_bytes_per_s) == (2.0, None)
    assert cost.explained == pytest.approx(0.0)
    equal = fit_cost([(1, 2.0), (10, 2.0), (100, 2.0)])
    assert equal is not None
    assert (equal.latency_s, equal.bandwidth_bytes_per_s, equal.explained) == (2.0, None, None)


def test_all_workers_messages_are_fitted_together() -> None:
    workers = (
        worker(0, 100, SLOW, calls=((1000, 0.003), (1000, 0.003))),
        worker(1, 400, QUICK, calls=((5000, 0.007),)),
    )
    cost = fleet(workers=workers).message_cost
    assert cost is not None
    assert cost.latency_s == pytest.approx(0.002)
    assert cost.bandwidth_bytes_per_s == pytest.approx(1e6)


# --- JSON, the table ----------------------------------------------------------------------------


def test_the_dictionary_is_plain_json() -> None:
    counted = server(0, Counter({3: 4, 0: 1}), dropped=Counter({"late": 2}))
    account = fleet(
        workers=(worker(0, 100, SLOW, calls=((1, 1.0), (9, 2.0), (5, 2.0))),), servers=(counted,)
    )
    found = json.loads(json.dumps(account.as_dict(), allow_nan=False))
    assert found == account.as_dict()
    assert found["env_steps_per_s"] == 10.0
    assert found["staleness"] == {"counts": {"0": 1, "3": 4}, "mean": 2.4, "p95": 3, "max": 3}
    assert found["servers"][0]["dropped"] == {"late": 2}
    assert found["servers"][0]["staleness"] == {"0": 1, "3": 4}
    assert found["workers"][0]["shares"][COMPUTING] == pytest.approx(0.8)
    assert "calls" not in found["workers"][0]
    assert found["message_cost"]["messages"] == 3
    assert found["traffic"]["bytes_sent"] == 1000


def test_an_empty_fleet_is_all_null() -> None:
    found = json.loads(json.dumps(EMPTY.as_dict(), allow_nan=False))
    assert found["env_steps_per_s"] is found["message_cost"] is None
    assert found["shares"] == dict.fromkeys((*KINDS, "other"))
    assert len(fleet_lines(EMPTY)) == 3


def test_the_table() -> None:
    calls = tuple((size, 0.002 + size / 1e6) for size in (1000, 2000, 4000))
    workers = (
        worker(0, 100, SLOW, calls=calls, restarts=2, packing_s=0.25),
        worker(1, 400, QUICK, host="there", packing_s=0.5),
        worker(2, 400, QUICK),
    )
    servers = (
        server(0, {0: 19}, restores=1, lost=7),
        server(1, {5: 1}, dropped={}),
    )
    account = fleet(workers=workers, servers=servers, uncompressed_bytes_sent=12_000)
    account = replace(account, uncompressed_bytes_received=9000)  # nothing was saved
    assert fleet_lines(account) == [
        "fleet         async, 3 workers, 2 servers, 2 hosts",
        "processors    14.5 s in 12.0 s of wall time, 1.21 at a time",
        "                      steps/s      computing  communicating        waiting",
        "worker 0                   10            80%            10%             0%",
        "worker 1                   40            40%            10%            50%",
        "worker 2                   40            40%            10%            50%",
        "all                        90            53%            10%            33%",
        "straggler     worker 0 takes 8.00 times the median's time for a step",
        "restarts      worker 0 ×2, server 0 ×1 (7 gradients lost)",
        "staleness     0.25 updates in the mean, 95 % up to 0, at most 5",
        "dropped       too-old ×3",
        "sent          3,000 bytes, 75% saved by compression in 0.75 s of packing",
        "received      9,000 bytes",
        "messages      60; one to each of 2 servers takes 2 ms + bytes at 1 MB/s "
        "(3 messages measured, 100% explained)",
    ]


def actors() -> FleetAccount:
    workers = (
        worker(0, 100, SLOW, updates=None, staleness={0: 1, 30: 2}),
        worker(1, 400, QUICK, updates=None, staleness={30: 1}, restarts=1),
    )
    shards = (
        ShardAccount(0, 1.5, 300, 2400, 9000, 80_000, restarts=0, lost=0),
        ShardAccount(1, 0.5, 200, 1600, 6000, 50_000, restarts=2, lost=1234),
    )
    shares = {COMPUTING: 0.7, COMMUNICATING: 0.2, WAITING: 0.05, "other": 0.05}
    return FleetAccount(None, 12.0, 1.5, workers, shards=shards, learner=shares)


def test_the_table_of_actors() -> None:
    assert fleet_lines(actors()) == [
        "fleet         2 actors, 2 shards, 1 host",
        "processors    9.5 s in 12.0 s of wall time, 0.79 at a time",
        "                      steps/s      computing  communicating        waiting",
        "actor 0                    10            80%            10%             0%",
        "actor 1                    40            40%            10%            50%",
        "all                        50            60%            10%            25%",
        "learner                     –            70%            20%             5%",
        "shard 0       300 steps in (9,000 bytes), 2,400 samples out (80,000 bytes)",
        "shard 1       200 steps in (6,000 bytes), 1,600 samples out (50,000 bytes)",
        "straggler     actor 0 takes 4.50 times the median's time for a step",
        "restarts      actor 1 ×1, shard 1 ×2 (1,234 transitions lost)",
        "staleness     22.50 updates in the mean, 95 % up to 30, at most 30",
        "sent          2,000 bytes",
        "received      6,000 bytes",
        "messages      40",
    ]


def test_what_means_nothing_to_actors_is_null() -> None:
    found = json.loads(json.dumps(actors().as_dict(), allow_nan=False))
    assert found["update"] is found["workers"][0]["updates"] is None
    assert found["servers"] == []
    assert found["shards"][1]["lost"] == 1234
    assert found["learner"]["shares"][COMPUTING] == 0.7
    assert found["staleness"]["counts"] == {"0": 1, "30": 3}
    assert found["workers"][0]["staleness"] == {"0": 1, "30": 2}
    # And what means nothing to workers and servers.
    found = fleet().as_dict()
    assert found["learner"] is found["workers"][0]["staleness"] is None
    assert found["shards"] == []


def test_what_does_not_apply_is_no_line() -> None:
    calm = fleet(workers=(worker(0, 100, SLOW, bytes_received=0),), servers=())
    assert [line.split()[0] for line in fleet_lines(calm)] == [
        "fleet",
        "processors",
        "steps/s",
        "worker",
        "sent",
        "messages",
    ]
