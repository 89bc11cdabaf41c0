"""Admission policies: who makes an update with whom, who waits, what is dropped."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from qfleet.config.config import Config
from qfleet.config.validation import validate
from qfleet.core.errors import ConfigError
from qfleet.engines.parameter_server.admission import (
    Admission,
    AgeLimit,
    Async,
    BoundedStaleness,
    Hybrid,
    Outliers,
    Sync,
)
from qfleet.engines.parameter_server.shard import Shard
from qfleet.engines.parameter_server.wire import Reply, Stamp
from support.messages import says
from support.server_cases import (
    Client,
    assert_states_equal,
    make_push,
    make_shard,
    noise,
    weights_of,
)

WORKERS = 4


def clients_of(shard: Shard, count: int) -> list[Client]:
    return [Client(shard, worker) for worker in range(count)]


# --- sync -------------------------------------------------------------------------------------


def test_sync_makes_one_update_of_all_present() -> None:
    shard = make_shard(Sync(), [10.0], workers=3)
    assert shard.push(make_push(2, 0, [1.0])) == Reply(0, 0, "kept", waits=True)
    assert shard.push(make_push(0, 0, [2.0])) == Reply(0, 0, "kept", waits=True)
    assert [shard.waits(worker) for worker in range(3)] == [True, False, True]
    assert shard.push(make_push(1, 0, [6.0])) == Reply(0, 1, "applied")
    assert [shard.waits(worker) for worker in range(3)] == [False, False, False]
    assert weights_of(shard).tolist() == [7.0]
    assert shard.counters.applied == 3


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)])
def test_who_came_first_does_not_matter_to_the_last_bit(order: tuple[int, ...]) -> None:
    # Sums in another order round otherwise: the large ones cancel before or after the small.
    gradients = [[1e8, 1.0], [1.0, 1e-8], [-1e8, -1.0], [1.0, 1e-8]]
    shards = [make_shard(Sync(), [0.0, 0.0], "adam", workers=4) for _ in range(2)]
    for shard, workers in zip(shards, (range(4), order), strict=True):
        for worker in workers:
            shard.push(make_push(worker, 0, gradients[worker], rate=0.1))
    states = [shard.snapshot() for shard in shards]
    assert_states_equal(states[0]["optimiser"], states[1]["optimiser"])
    assert_states_equal(states[0]["weights"], states[1]["weights"])


def test_backups_make_the_last_ones_superfluous() -> None:
    shard = make_shard(Sync(backup=1), [0.0], workers=3)
    shard.push(make_push(2, 0, [2.0]))
    assert shard.push(make_push(0, 0, [4.0])) == Reply(0, 1, "applied")
    assert weights_of(shard).tolist() == [-3.0]
    # The last of round 0 is dropped and need not wait: it goes on with new weights.
    assert shard.push(make_push(1, 0, [100.0])) == Reply(0, 1, "dropped", "late")
    assert weights_of(shard).tolist() == [-3.0]
    assert shard.counters.dropped == {"late": 1}
    shard.push(make_push(1, 1, [1.0], based_on=1))
    assert shard.push(make_push(2, 1, [1.0], based_on=1)) == Reply(0, 2, "applied")
    assert weights_of(shard).tolist() == [-4.0]


def test_more_backups_than_workers_leave_one() -> None:
    shard = make_shard(Sync(backup=5), [0.0], workers=2)
    assert shard.push(make_push(0, 0, [1.0])).outcome == "applied"


# --- bounded staleness ------------------------------------------------------------------------


def test_a_worker_leads_the_slowest_by_the_bound_and_then_waits() -> None:
    shard = make_shard(BoundedStaleness(2), [0.0])
    fast, slow = clients_of(shard, 2)
    for version in (1, 2):
        assert fast.push([1.0]) == Reply(0, version, "applied")
        fast.pull()
    assert fast.push([1.0]) == Reply(0, 2, "kept", waits=True)
    # The slowest's step lets it go, and both are one update: −(1 + 3) / 2.
    assert slow.push([3.0]) == Reply(0, 3, "applied")
    assert not shard.waits(0)
    assert weights_of(shard).tolist() == [-4.0]
    assert shard.counters.staleness == {0: 3, 2: 1}


def test_a_new_worker_begins_beside_the_slowest() -> None:
    shard = make_shard(BoundedStaleness(1), [0.0])
    first, second = clients_of(shard, 2)
    for _ in range(5):
        for client in (first, second):
            client.pull()
            assert not client.push([1.0]).waits
    third = Client(shard, 2)
    assert not first.push([1.0]).waits, "as if the new one had made five steps too"
    assert first.push([1.0]).waits, "two ahead of both others"
    assert not second.push([1.0]).waits
    assert shard.waits(0)
    assert not third.push([1.0]).waits
    assert not shard.waits(0)


def test_a_bound_that_nobody_reaches_is_async_bit_for_bit() -> None:
    shards = [make_shard(policy, noise(6, 0), "adam") for policy in (Async(), BoundedStaleness(99))]
    for shard in shards:
        clients = clients_of(shard, 3)
        for turn in range(40):
            client = clients[turn * turn % 3]
            client.push(client.weights + noise(6, turn), 0.1)
            client.pull()
    assert shards[0].stamp == shards[1].stamp == Stamp(0, 40)
    assert_states_equal(*(shard.snapshot()["optimiser"] for shard in shards))
    assert_states_equal(*(shard.snapshot()["weights"] for shard in shards))


# --- hybrid -----------------------------------------------------------------------------------


def test_the_first_k_make_an_update_and_late_ones_are_in_the_next() -> None:
    shard = make_shard(Hybrid(2), [0.0], workers=3)
    shard.push(make_push(1, 0, [2.0]))
    assert shard.push(make_push(2, 0, [4.0])) == Reply(0, 1, "applied")
    assert weights_of(shard).tolist() == [-3.0]
    assert shard.push(make_push(0, 0, [6.0])) == Reply(0, 1, "kept", waits=True)
    assert shard.push(make_push(2, 1, [8.0], based_on=1)) == Reply(0, 2, "applied")
    assert weights_of(shard).tolist() == [-10.0]
    assert shard.counters.staleness == {0: 3, 1: 1}


def test_one_of_k_is_async_bit_for_bit() -> None:
    shards = [make_shard(policy, noise(6, 0), "adam") for policy in (Async(), Hybrid(1))]
    for shard in shards:
        clients = clients_of(shard, 3)
        for turn in range(20):
            assert not clients[turn * turn % 3].push(noise(6, turn), 0.1).waits
    assert_states_equal(*(shard.snapshot()["weights"] for shard in shards))
    assert shards[0].stamp == shards[1].stamp == Stamp(0, 20)


def test_a_window_takes_what_came_within_it() -> None:
    shard = make_shard(Hybrid(window_s=5.0), [0.0], workers=3)
    shard.tick(90.0)  # nothing is there: nothing begins
    shard.push(make_push(0, 0, [2.0]), now_s=100.0)
    shard.push(make_push(1, 0, [4.0]), now_s=104.0)
    shard.tick(104.9)
    assert shard.waits(0)
    shard.tick(105.0)
    assert not shard.waits(0)
    assert not shard.waits(1)
    assert weights_of(shard).tolist() == [-3.0]
    # The next window begins with the next arrival, which may be stale.
    shard.push(make_push(2, 0, [1.0]), now_s=106.0)
    shard.tick(110.9)
    assert shard.waits(2)
    shard.tick(111.0)
    assert weights_of(shard).tolist() == [-4.0]


def test_an_arrival_after_the_windows_end_closes_it() -> None:
    shard = make_shard(Hybrid(window_s=5.0), [0.0], workers=3)
    shard.push(make_push(0, 0, [2.0]), now_s=0.0)
    assert shard.push(make_push(1, 0, [4.0]), now_s=7.0).outcome == "applied"
    assert weights_of(shard).tolist() == [-3.0]


def test_a_window_ends_early_when_all_have_come() -> None:
    shard = make_shard(Hybrid(window_s=5.0), [0.0], workers=2)
    shard.push(make_push(0, 0, [2.0]), now_s=0.0)
    assert shard.push(make_push(1, 0, [4.0]), now_s=1.0).outcome == "applied"
    shard.push(make_push(0, 1, [2.0], based_on=1), now_s=4.0)
    shard.tick(5.0)  # the end of the first window, not of this one
    assert shard.waits(0)


def test_a_restored_window_begins_anew_by_the_clock_of_its_process() -> None:
    shard = make_shard(Hybrid(window_s=5.0), [0.0], workers=2)
    shard.push(make_push(0, 0, [2.0]), now_s=1e6)
    snapshot = shard.snapshot()
    for restored in (shard, make_shard(Hybrid(window_s=5.0), [0.0])):
        restored.restore(snapshot)
        restored.tick(10.0)
        assert restored.waits(0)
        restored.tick(15.0)
        assert not restored.waits(0)
        assert weights_of(restored).tolist() == [-2.0]


# --- guards -----------------------------------------------------------------------------------


def test_gradients_beyond_the_age_limit_are_dropped() -> None:
    guard = AgeLimit(Async(), limit=1)
    shard = make_shard(guard, [0.0], workers=2)
    for version in range(2):
        shard.push(make_push(0, version, [1.0], based_on=version))
    assert shard.push(make_push(1, 0, [1.0], based_on=1)).outcome == "applied"
    assert shard.push(make_push(1, 1, [1.0], based_on=1)) == Reply(0, 3, "dropped", "too-old")
    assert guard.dropped == shard.counters.dropped["too-old"] == 1
    assert weights_of(shard).tolist() == [-3.0]


def test_an_outlier_in_loss_is_dropped_by_mean_and_spread() -> None:
    guard = Outliers(Async(), window=4, sigmas=3.0)
    shard = make_shard(guard, [0.0])
    client = Client(shard, 0)
    losses = [1.0, 3.0, 1.0, 3.0]  # mean 2, σ 1: the limit is 5
    for loss in losses:
        assert client.push([1.0], loss=loss).outcome == "applied"
    assert client.push([1.0], loss=5.01) == Reply(0, 4, "dropped", "outlier")
    # It stands in the window as 5: of 3, 1, 3, 5 the mean is 3, σ is √2, the limit 7.24.
    assert client.push([1.0], loss=7.25).outcome == "dropped"
    # Of 1, 3, 5, 7.24: mean 4.06, σ 2.32, the limit 11.02.
    assert client.push([1.0], loss=11.0).outcome == "applied"
    assert guard.dropped == 2
    assert weights_of(shard).tolist() == [-5.0]


def test_before_the_window_is_full_nothing_is_an_outlier() -> None:
    shard = make_shard(Outliers(Async(), window=4, sigmas=3.0), [0.0])
    client = Client(shard, 0)
    for loss in (1.0, 1.1, 1e9):
        assert client.push([1.0], loss=loss).outcome == "applied"


def test_a_gradient_that_is_far_too_large_is_dropped_whatever_its_loss() -> None:
    """Fault 5: one worker's gradients are a million times too large."""
    guard = Outliers(Async(), window=4, sigmas=3.0)
    shard = make_shard(guard, [0.0])
    client = Client(shard, 0)
    for gradient in (1.0, 1.1, 0.9, 1.0):
        assert client.push([gradient], loss=1.0).outcome == "applied"
    client.pull()
    before = client.weights.clone()
    assert client.push([1e6], loss=1.0).reason == "outlier"
    client.pull()
    assert torch.equal(client.weights, before)
    assert client.push([1.05], loss=1.0).outcome == "applied"
    assert (guard.dropped, shard.counters.dropped["outlier"]) == (1, 1)


def test_equal_losses_and_pushes_without_one_are_no_outliers() -> None:
    shard = make_shard(Outliers(Async(), window=2, sigmas=3.0), [0.0])
    client = Client(shard, 0)
    for loss in (1.0, 1.0, 1.0 + 1e-9, None):
        assert client.push([1.0], loss=loss).outcome == "applied"


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_is_an_outlier_and_spoils_no_window(loss: float) -> None:
    shard = make_shard(Outliers(Async(), window=2, sigmas=3.0), [0.0])
    client = Client(shard, 0)
    for known in (1.0, 2.0):
        client.push([1.0], loss=known)
    assert client.push([1.0], loss=loss).reason == "outlier"
    assert client.push([1.0], loss=1.5).outcome == "applied"
    assert client.push([1.0], loss=50.0).reason == "outlier"


def test_who_is_dropped_has_arrived_at_the_barrier() -> None:
    shard = make_shard(AgeLimit(Hybrid(3), limit=0), [0.0], workers=3)
    for worker in range(3):
        shard.push(make_push(worker, 0, [3.0]))
    old = shard.push(make_push(0, 1, [90.0], based_on=0))
    assert old == Reply(0, 1, "dropped", "too-old", waits=True)
    shard.push(make_push(1, 1, [1.0], based_on=1))
    shard.push(make_push(2, 1, [3.0], based_on=1))
    assert weights_of(shard).tolist() == [-5.0]
    assert not shard.waits(0)


# --- what holds for all -----------------------------------------------------------------------


@pytest.mark.parametrize("admission", [Sync(), BoundedStaleness(0), Hybrid(2)])
def test_who_leaves_while_waiting_and_returns_is_not_asked_twice(admission: Admission) -> None:
    shard = make_shard(admission, [0.0], workers=2)
    shard.push(make_push(0, 0, [2.0]))
    shard.remove_worker(0)
    shard.add_worker(0)
    assert shard.waits(0)
    assert shard.push(make_push(1, 0, [4.0])) == Reply(0, 1, "applied")
    assert not shard.waits(0)
    assert weights_of(shard).tolist() == [-3.0]


@pytest.mark.parametrize(
    ("update", "name", "value"),
    [
        ("sync", "backup_workers", -1),
        ("hybrid", "hybrid_workers", -1),
        ("hybrid", "hybrid_window_s", -1.0),
        ("hybrid", "hybrid_window_s", math.nan),
        ("ssp", "staleness", -1),
        ("sync", "outlier_sigmas", -1.0),
        ("async", "max_gradient_age", -1),
    ],
)
def test_settings_that_cannot_work_are_refused(update: str, name: str, value: float) -> None:
    config = Config(engine="parameter-server").replace(update=update, **{name: value})
    with pytest.raises(ConfigError, match=says(name, "must be", repr(value))):
        validate(config)


events = st.lists(
    st.tuples(
        st.sampled_from(["push"] * 3 + ["bad", "leave", "join"]), st.integers(0, WORKERS - 1)
    ),
    max_size=60,
)
steady = settings(derandomize=True, deadline=None, max_examples=100)


class Play:
    """The same story for any policy; a worker pulls right before it pushes, or once, at first."""

    def __init__(self, admission: Admission, fresh: bool) -> None:
        self.shard = make_shard(admission, noise(3, 0), "adam")
        self._clients = clients_of(self.shard, WORKERS)
        self._fresh = fresh
        self._pushes = 0

    def play(self, event: str, worker: int) -> Reply | None:
        shard, client = self.shard, self._clients[worker]
        if event == "leave":
            shard.remove_worker(worker)
        elif event == "join":
            client.join()
        elif worker in shard.present and not shard.waits(worker):
            if self._fresh:
                client.pull()
            gradient = client.weights + noise(3, 1, self._pushes)
            self._pushes += 1
            return client.push(gradient * (float("nan") if event == "bad" else 1.0), 0.1)
        return None

    def waiting(self) -> set[int]:
        return {worker for worker in self.shard.present if self.shard.waits(worker)}


@steady
@given(events)
def test_bound_0_and_k_of_all_are_sync_bit_for_bit(story: list[tuple[str, int]]) -> None:
    """With workers that come, go, and send bad gradients, in any order."""
    plays = [Play(policy, True) for policy in (Sync(), BoundedStaleness(0), Hybrid(WORKERS))]
    for event, worker in story:
        receipts = [play.play(event, worker) for play in plays]
        assert receipts[1:] == receipts[:1] * 2
        assert [play.waiting() for play in plays[1:]] == [plays[0].waiting()] * 2
    states = [play.shard.snapshot() for play in plays]
    for state in states[1:]:
        for part in ("weights", "optimiser", "version", "counters"):
            assert_states_equal(state[part], states[0][part])


@steady
@given(
    events,
    st.sampled_from(
        [
            lambda: Sync(),
            lambda: Sync(backup=2),
            lambda: Hybrid(2),
            lambda: BoundedStaleness(1),
            lambda: Hybrid(window_s=1.0),
            lambda: AgeLimit(Hybrid(3), limit=1),
            lambda: AgeLimit(BoundedStaleness(0), limit=0),
        ]
    ),
    st.booleans(),
)
def test_nobody_is_forgotten_and_somebody_may_always_go_on(
    story: list[tuple[str, int]], policy: Callable[[], Admission], fresh: bool
) -> None:
    play = Play(policy(), fresh)
    shard = play.shard
    for event, worker in story:
        play.play(event, worker)
        assert not shard.present or play.waiting() < shard.present
    for worker in range(WORKERS):
        shard.remove_worker(worker)
    # With nobody left nothing is kept: every gradient was applied or dropped for a reason.
    counters = shard.counters
    assert counters.received == counters.applied + sum(counters.dropped.values())


def test_several_shards_may_each_keep_somebody_and_a_window_ends_that() -> None:
    """Three shards, k = 3 of 4: each has another worker left over, and the fourth joins them."""
    shards = [make_shard(Hybrid(3, window_s=5.0), [0.0], workers=4) for _ in range(3)]
    for shard, last in zip(shards, (0, 1, 3), strict=True):
        for worker in [w for w in range(4) if w != last] + [last]:
            shard.push(make_push(worker, 0, [1.0]), now_s=0.0)
        shard.push(make_push(2, 1, [1.0], based_on=1), now_s=1.0)
    stuck = [any(shard.waits(worker) for shard in shards) for worker in range(4)]
    assert stuck == [True, True, True, True]
    for shard in shards:
        shard.tick(5.0)
    assert not any(shard.waits(worker) for shard in shards for worker in range(4))


@given(
    st.integers(2, 5),
    st.integers(0, 4),
    st.integers(2, 3),
    st.lists(st.integers(0, 99), max_size=60),
)
def test_backups_keep_nobody_on_several_shards_for_ever(
    workers: int, backup: int, count: int, choices: list[int]
) -> None:
    """Whatever order messages come in, once all have come somebody may go on.

    An update takes m − b workers along, so at most b are late for the next: the rest ends it.
    """
    assume(backup < workers)
    shards = [make_shard(Sync(backup), [0.0], workers=workers) for _ in range(count)]
    sequences, based_on = [0] * workers, [[0] * count for _ in range(workers)]
    under_way = [(worker, number) for worker in range(workers) for number in range(count)]
    for choice in choices:
        worker, number = under_way.pop(choice % len(under_way))
        push = make_push(worker, sequences[worker], [1.0], based_on[worker][number])
        shards[number].push(push)
        for free in range(workers):
            has_come = all(who != free for who, _ in under_way)
            if has_come and not any(shard.waits(free) for shard in shards):
                sequences[free] += 1
                based_on[free] = [shard.stamp.version for shard in shards]
                under_way += [(free, number) for number in range(count)]
        assert under_way
