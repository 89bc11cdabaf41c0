"""Policies among workers of different speed, in simulated time: who waits, who does not."""

from __future__ import annotations

import pytest

from qfleet.engines.parameter_server.admission import (
    Admission,
    Async,
    BoundedStaleness,
    Hybrid,
    Sync,
)
from qfleet.engines.parameter_server.shard import Shard
from support.server_cases import assert_states_equal, make_shard, noise
from support.simulated_cluster import Bursts, Cluster

STRAGGLER = [1.0, 1.0, 1.0, 4.0]
"""Seconds that a gradient takes each worker; the last one is slow."""
UNTIL_S = 40.0


def run(
    admission: Admission, durations_s: list[float], tick_s: float = 0.0
) -> tuple[Shard, Cluster]:
    shard = make_shard(admission, noise(4, 0), "adam")
    cluster = Cluster(shard, durations_s, tick_s=tick_s)
    cluster.run(UNTIL_S)
    return shard, cluster


def test_sync_waits_for_the_straggler() -> None:
    shard, cluster = run(Sync(), STRAGGLER)
    assert cluster.pushes == [10, 10, 10, 10]
    assert cluster.waited_s == [30.0, 30.0, 30.0, 0.0]
    assert shard.stamp.version == 10
    assert shard.counters.staleness == {0: 40}


def test_async_goes_on_and_pays_with_staleness() -> None:
    shard, cluster = run(Async(), STRAGGLER)
    assert cluster.pushes == [40, 40, 40, 10]
    assert cluster.waited_s == [0.0, 0.0, 0.0, 0.0]
    assert shard.stamp.version == 130
    # The straggler's gradients are 12 updates of the others old.
    assert shard.counters.staleness[12] == 10


@pytest.mark.parametrize("bound", [0, 1, 2, 5])
def test_nobody_goes_on_further_ahead_than_the_bound(bound: int) -> None:
    shard, cluster = run(BoundedStaleness(bound), STRAGGLER)
    assert cluster.largest_lead == bound
    assert cluster.pushes == [10 + bound] * 3 + [10]
    del shard


def test_backups_do_not_wait_and_drop_what_is_late() -> None:
    shard, cluster = run(Sync(backup=1), STRAGGLER)
    assert cluster.pushes == [40, 40, 40, 10]
    assert shard.stamp.version == 40
    assert shard.counters.dropped == {"late": 10}
    assert shard.counters.applied == 120


def test_hybrids_lie_between() -> None:
    waited = {}
    for name, admission in {
        "async": Async(),
        "first": Hybrid(2),
        "window": Hybrid(window_s=0.5),
        "sync": Sync(),
    }.items():
        shard, cluster = run(admission, STRAGGLER, tick_s=0.5)
        waited[name] = sum(cluster.waited_s)
        assert not shard.counters.dropped
    assert waited["async"] == 0.0
    assert 0 < waited["first"] < waited["sync"]
    assert 0 < waited["window"] < waited["sync"]


def test_a_window_of_one_step_is_sync_where_all_are_equally_fast() -> None:
    equal = [1.0, 1.0, 1.0]
    sync, _ = run(Sync(), equal)
    window, cluster = run(Hybrid(window_s=1.0), equal, tick_s=1.0)
    assert cluster.pushes == [40, 40, 40]
    for part in ("weights", "optimiser", "version", "counters"):
        assert_states_equal(window.snapshot()[part], sync.snapshot()[part])


@pytest.mark.parametrize(
    ("begun", "collecting"),
    [([0, 0, 0], 1), ([0, 0, 2], 2), ([0, 1, 2], 3), ([0, 1, 2, 3, 0, 1], 4)],
    ids=str,
)
def test_bursts_that_begin_apart_make_all_collect_in_turns(
    begun: list[int], collecting: int
) -> None:
    """A barrier does not bring them together: who collects is waited for, in every burst anew.

    Four pushes of 1 s, and 4 s of collecting as often as bursts begin in different places.
    """
    period_s = 4 * 1.0 + collecting * 4.0
    rounds = []
    for periods in (5, 15):
        shard = make_shard(Sync(), noise(4, 0), "adam")
        cluster = Cluster(shard, [1.0] * len(begun), bursts=Bursts(4, 4.0, begun))
        cluster.run(periods * period_s)
        rounds.append(shard.stamp.version)
    assert rounds[1] - rounds[0] == 10 * 4
