"""A shard: exactly once, versions and epochs, bad gradients, coming and going, what it counts."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qfleet.agent.updaters.optimisers import make_optimiser
from qfleet.core.errors import CheckpointError, ProtocolError
from qfleet.core.types import StateDict
from qfleet.engines.parameter_server.admission import (
    Admission,
    AgeLimit,
    Async,
    BoundedStaleness,
    Hybrid,
    Outliers,
    Sync,
)
from qfleet.engines.parameter_server.compression import Cast, TopK, unpack
from qfleet.engines.parameter_server.shard import Shard
from qfleet.engines.parameter_server.wire import Exchange, Reply, Stamp
from qfleet.storage.snapshot import read_snapshot, write_snapshot
from support.messages import says
from support.server_cases import (
    EPS,
    NAMES,
    Client,
    assert_states_equal,
    make_push,
    make_shard,
    noise,
    weights_of,
)

# --- pushes and pulls -------------------------------------------------------------------------


def test_a_push_moves_the_weights_and_the_version() -> None:
    shard = make_shard(Async(), [1.0, 2.0], workers=1)
    reply = shard.push(make_push(0, 0, [1.0, -2.0], rate=0.5))
    assert reply == Reply(0, 1, "applied")
    assert weights_of(shard).tolist() == [0.5, 3.0]


def test_a_pull_brings_weights_only_when_they_are_new() -> None:
    shard = make_shard(Async(), [1.0, 2.0], workers=1)
    first = shard.pull()
    assert first.stamp == Stamp(0, 0)
    again = shard.pull(first.stamp)
    assert again.stamp == first.stamp
    assert again.weights is None
    assert shard.counters.bytes_out == 8
    shard.push(make_push(0, 0, [1.0, 1.0]))
    newer = shard.pull(first.stamp)
    assert newer.stamp == Stamp(0, 1)
    assert newer.weights is not None
    assert unpack(newer.weights).tolist() == [0.0, 1.0]
    assert shard.counters.bytes_out == 16


def test_what_was_pulled_does_not_change_afterwards() -> None:
    shard = make_shard(Async(), [1.0], workers=1)
    pulled = weights_of(shard)
    shard.push(make_push(0, 0, [1.0]))
    assert pulled.tolist() == [1.0]


def test_what_is_lent_is_the_shards_own() -> None:
    shard = make_shard(Async(), [1.0], workers=1)
    lent = shard.pull(lend=True).weights
    assert lent is not None
    assert shard.counters.bytes_out == 4
    shard.push(make_push(0, 0, [1.0]))
    assert unpack(lent).tolist() == [0.0]


def test_what_is_kept_does_not_change_with_the_senders_buffer() -> None:
    shard = make_shard(Sync(), [0.0], workers=2)
    buffer = torch.tensor([2.0])
    shard.push(make_push(0, 0, buffer))
    buffer.fill_(100.0)
    shard.push(make_push(1, 0, [4.0]))
    assert weights_of(shard).tolist() == [-3.0]


def test_an_update_takes_the_smallest_learning_rate() -> None:
    shard = make_shard(Sync(), [0.0], workers=2)
    shard.push(make_push(0, 0, [2.0], rate=1.0))
    shard.push(make_push(1, 0, [4.0], rate=0.5))
    assert weights_of(shard).tolist() == [-1.5]


def test_a_mean_by_weights() -> None:
    shard = make_shard(Sync(), [0.0], workers=2)
    shard.push(make_push(0, 0, [2.0], weight=3.0))
    shard.push(make_push(1, 0, [6.0], weight=1.0))
    assert weights_of(shard).tolist() == [-3.0]


# --- exactly once -----------------------------------------------------------------------------


@pytest.mark.parametrize("admission", [Async(), Sync(), Hybrid(2), BoundedStaleness(0)])
def test_a_repeated_push_gets_the_first_answer_and_changes_nothing(admission: Admission) -> None:
    shard = make_shard(admission, [1.0], "adam", workers=3)
    push = make_push(1, 0, [1.0])
    first = shard.push(push)
    shard.push(make_push(0, 0, [2.0]))  # others go on meanwhile
    before = shard.snapshot()
    assert shard.push(push) == first
    after = shard.snapshot()
    assert after["counters"].pop("repeated") == before["counters"].pop("repeated") + 1 == 1
    assert after["counters"].pop("received") == before["counters"].pop("received") + 1
    assert after["counters"].pop("bytes_in") == before["counters"].pop("bytes_in") + 4
    assert_states_equal(after, before)


def test_a_repetition_that_nobody_waits_for_changes_nothing() -> None:
    shard = make_shard(Async(), [0.0], workers=1)
    for sequence in range(3):
        shard.push(make_push(0, sequence, [1.0], sequence))
    assert shard.push(make_push(0, 0, [1.0])).outcome == "past"
    assert weights_of(shard).tolist() == [-3.0]


def test_a_gap_is_an_error_that_says_so() -> None:
    shard = make_shard(Async(), [0.0], workers=1)
    shard.push(make_push(0, 0, [1.0]))
    with pytest.raises(ProtocolError, match=says("worker 0", "message 2", "1")):
        shard.push(make_push(0, 2, [1.0]))
    assert weights_of(shard).tolist() == [-1.0]
    assert shard.push(make_push(0, 1, [1.0])).outcome == "applied"


@settings(derandomize=True, deadline=None, max_examples=80)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(-8, 8)), max_size=24),
    st.lists(st.tuples(st.integers(0, 23), st.integers(0, 23)), max_size=24),
    st.integers(1, 3),
)
def test_every_push_counts_once_whatever_is_repeated(
    pushes: list[tuple[int, int]], repetitions: list[tuple[int, int]], k: int
) -> None:
    """Pushes of three workers in any order; after some of them, any earlier one comes again."""
    policies: list[Admission] = [Async(), Hybrid(k)]
    for admission in policies:
        shard = make_shard(admission, [0.0], workers=3)
        sent = []
        sequences, newest, repeated = [0, 0, 0], {}, 0
        for at, (worker, gradient) in enumerate(pushes):
            if not shard.waits(worker):
                version = shard.stamp.version
                push = make_push(worker, sequences[worker], [float(gradient)], version)
                newest[worker] = push, shard.push(push)
                sent.append(push)
                sequences[worker] += 1
            for after, which in repetitions:
                if after == at and sent:
                    push = sent[which % len(sent)]
                    reply = shard.push(push)
                    repeated += 1
                    if push is newest[push.worker][0]:
                        assert reply == newest[push.worker][1]
        # Let go whoever still waits, so that nothing is kept.
        for worker in range(3):
            shard.remove_worker(worker)
        counters = shard.counters
        assert counters.applied == len(sent)
        assert counters.repeated == repeated
        assert counters.received == len(sent) + repeated
        assert sum(counters.staleness.values()) == len(sent)
        if isinstance(admission, Async):
            total = sum(int(unpack(push.gradient)) for push in sent)
            assert weights_of(shard).tolist() == [-total]
            assert shard.stamp.version == len(sent)


# --- bad gradients and bad messages -----------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", NAMES)
def test_a_gradient_that_is_not_finite_changes_nothing_and_is_counted(
    name: str, bad: float
) -> None:
    shard = make_shard(Async(), [1.0, 2.0], name, workers=1)
    shard.push(make_push(0, 0, [1.0, 1.0]))
    before = shard.snapshot()
    reply = shard.push(make_push(0, 1, [1.0, bad], based_on=1))
    assert reply == Reply(0, 1, "dropped", "not-finite")
    after = shard.snapshot()
    for part in ("weights", "optimiser", "version"):
        assert_states_equal(after[part], before[part])
    assert shard.counters.dropped == {"not-finite": 1}
    assert shard.push(make_push(0, 2, [1.0, 1.0], based_on=1)).outcome == "applied"


def test_infinities_of_both_signs_are_refused() -> None:
    shard = make_shard(Async(), [0.0, 0.0], workers=1)
    assert shard.push(make_push(0, 0, [math.inf, -math.inf])).reason == "not-finite"


def test_large_numbers_whose_sum_is_infinite_are_finite() -> None:
    shard = make_shard(Async(), [0.0, 0.0], workers=1)
    assert shard.push(make_push(0, 0, [3e38, 3e38])).outcome == "applied"
    assert weights_of(shard).tolist() == pytest.approx([-3e38, -3e38])


def test_a_bad_gradient_does_not_hold_up_the_barrier() -> None:
    shard = make_shard(Sync(), [0.0], workers=3)
    assert shard.push(make_push(0, 0, [math.nan])) == Reply(
        0, 0, "dropped", "not-finite", waits=True
    )
    shard.push(make_push(1, 0, [2.0]))
    shard.push(make_push(2, 0, [4.0]))
    assert weights_of(shard).tolist() == [-3.0]
    assert not shard.waits(0)


def test_a_round_of_bad_gradients_ends_without_an_update() -> None:
    shard = make_shard(Sync(), [0.0], workers=2)
    shard.push(make_push(0, 0, [math.nan]))
    shard.push(make_push(1, 0, [math.inf]))
    assert shard.stamp == Stamp(0, 0)
    assert not shard.waits(0)
    assert not shard.waits(1)


def test_messages_that_cannot_be_right_are_refused_and_change_nothing() -> None:
    shard = make_shard(Sync(), [0.0, 0.0], workers=2)
    shard.push(make_push(0, 0, [1.0, 1.0]))
    bad = {
        "7": make_push(7, 0, [1.0, 1.0]),
        "shape": make_push(1, 0, [1.0]),
        "float64": make_push(1, 0, [1.0, 1.0])._replace(gradient=torch.zeros(2).double()),
        "version 3": make_push(1, 0, [1.0, 1.0], based_on=3),
        "epoch 2": make_push(1, 0, [1.0, 1.0], epoch=2),
        "wait": make_push(0, 1, [1.0, 1.0]),
        "nan": make_push(1, 0, [1.0, 1.0], rate=math.nan),
        "weight": make_push(1, 0, [1.0, 1.0], weight=0.0),
    }
    before = shard.snapshot()
    for message, push in bad.items():
        with pytest.raises(ProtocolError, match=says(*message.split())):
            shard.push(push)
    after = shard.snapshot()
    del before["counters"], after["counters"]
    assert_states_equal(after, before)
    assert shard.counters.received == 1 + len(bad)


# --- coming and going -------------------------------------------------------------------------


def test_who_leaves_lets_the_others_go() -> None:
    shard = make_shard(Sync(), [0.0], workers=3)
    shard.push(make_push(0, 0, [2.0]))
    shard.push(make_push(1, 0, [4.0]))
    assert shard.waits(0)
    shard.remove_worker(2)
    assert not shard.waits(0)
    assert weights_of(shard).tolist() == [-3.0]
    shard.remove_worker(2)  # a second time is nothing
    assert shard.stamp == Stamp(0, 1)


def test_who_comes_is_waited_for() -> None:
    shard = make_shard(Sync(), [0.0], workers=1)
    shard.add_worker(1)
    assert shard.push(make_push(0, 0, [2.0])).waits
    shard.push(make_push(1, 0, [4.0]))
    assert weights_of(shard).tolist() == [-3.0]


def test_what_a_worker_sent_before_it_left_counts() -> None:
    shard = make_shard(Sync(), [0.0], workers=2)
    shard.push(make_push(0, 0, [2.0]))
    shard.remove_worker(0)
    assert shard.stamp == Stamp(0, 0)
    shard.push(make_push(1, 0, [4.0]))
    assert weights_of(shard).tolist() == [-3.0]


def test_who_returns_goes_on_counting() -> None:
    shard = make_shard(Async(), [0.0], workers=1)
    push = make_push(0, 0, [1.0])
    first = shard.push(push)
    shard.remove_worker(0)
    assert shard.push(push) == first  # its answer was lost, and it gave up
    with pytest.raises(ProtocolError, match="add_worker"):
        shard.waits(0)
    assert shard.add_worker(0) == (0, 1)
    assert shard.push(make_push(0, 1, [1.0], based_on=1)).outcome == "applied"
    assert weights_of(shard).tolist() == [-2.0]


# --- snapshots and epochs ---------------------------------------------------------------------

POLICIES = {
    "async": lambda: Async(),
    "sync": lambda: Sync(),
    "backup": lambda: Sync(backup=1),
    "ssp": lambda: BoundedStaleness(1),
    "first": lambda: Hybrid(2),
    "guards": lambda: AgeLimit(Outliers(Hybrid(2), window=4, sigmas=2.0), limit=1),
}


def work(shard: Shard, turns: range, size: int = 5) -> list[Reply]:
    """Three workers that push in turns what depends on the turn alone, unless they have to wait."""
    clients = [Client(shard, worker) for worker in range(3)]
    replies = []
    for turn in turns:
        client = clients[turn * 7 // 2 % 3]
        if not shard.waits(client.worker):
            gradient = noise(size, turn)
            replies.append(client.push(gradient, 0.1, loss=float(gradient[0]), now_s=float(turn)))
            client.pull()
    return replies


@pytest.mark.parametrize("optimiser", NAMES)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("until", [8, 9])
def test_a_restored_shard_goes_on_bit_for_bit_in_a_new_epoch(
    policy: str, optimiser: str, until: int, tmp_path: Path
) -> None:
    shard = make_shard(POLICIES[policy](), noise(5, 1), optimiser)
    work(shard, range(until))
    write_snapshot(tmp_path, {"shard": shard.snapshot()}, {})
    _, parts = read_snapshot(tmp_path)
    other = make_shard(POLICIES[policy](), noise(5, 2), optimiser)
    work(other, range(3))  # what it did before must not matter
    other.restore(parts["shard"])
    assert other.stamp == Stamp(1, shard.stamp.version)
    assert other.present == shard.present
    goes_on, restored = work(shard, range(until, 30)), work(other, range(until, 30))
    assert len(goes_on) > 5
    for left, right in zip(goes_on, restored, strict=True):
        assert right == left._replace(epoch=1)
    left_state, right_state = shard.snapshot(), other.snapshot()
    for part in ("weights", "optimiser", "version", "present", "counters"):
        assert_states_equal(right_state[part], left_state[part])


def test_a_snapshot_is_not_changed_by_what_follows() -> None:
    shard = make_shard(Sync(), [1.0], "adam", workers=2)
    shard.push(make_push(0, 0, [1.0]))
    shard.push(make_push(1, 0, [1.0]))
    shard.push(make_push(0, 1, [1.0], based_on=1))
    snapshot = shard.snapshot()
    copied = make_shard(Sync(), [0.0], "adam")
    copied.restore(snapshot)
    shard.push(make_push(1, 1, [5.0], based_on=1))
    again = make_shard(Sync(), [0.0], "adam")
    again.restore(snapshot)
    assert_states_equal(again.snapshot(), copied.snapshot())


def test_a_version_that_was_lost_is_seen() -> None:
    """Two updates are lost; nobody takes version 3 of afterwards for the one of before."""
    shard = make_shard(Async(), [0.0], workers=1)
    shard.push(make_push(0, 0, [1.0], 0))
    saved = shard.snapshot()
    shard.push(make_push(0, 1, [1.0], 1))
    last = make_push(0, 2, [1.0], 2)
    shard.push(last)
    known = shard.stamp
    shard.restore(saved)
    assert shard.stamp == Stamp(1, 1)
    assert shard.stamp > known  # newer, though its version is smaller

    # The worker's message, sent again because its answer was lost, is of weights that never were.
    reply = shard.push(last)
    assert reply == Reply(1, 1, "dropped", "other-epoch")
    assert shard.counters.dropped == {"other-epoch": 1}
    assert weights_of(shard).tolist() == [-1.0]

    # It pulls and asks for its number anew: 1 and 2 were lost.
    pulled = shard.pull(Stamp(0, 1))
    assert pulled.weights is not None, "the same version of another epoch"
    assert shard.add_worker(0) == (1, 1)
    reply = shard.push(make_push(0, 1, [4.0], 1, epoch=1))
    assert reply == Reply(1, 2, "applied")
    assert weights_of(shard).tolist() == [-5.0]


def test_each_replacement_has_an_epoch_of_its_own() -> None:
    saved = make_shard(Async(), [0.0], workers=1).snapshot()
    stamps = []
    for replacements in range(3):  # each restored from the same old snapshot
        weights = torch.zeros(1)
        shard = Shard(weights, make_optimiser("sgd", weights, EPS), Async(), epoch=replacements)
        shard.restore(saved)
        stamps.append(shard.stamp)
    assert stamps == [Stamp(1, 0), Stamp(2, 0), Stamp(3, 0)]


def test_a_snapshot_of_something_else_is_refused_and_changes_nothing() -> None:
    shard = make_shard(Sync(), [1.0, 2.0], workers=1)
    before = shard.snapshot()
    others: dict[str, StateDict] = {
        "3 weights": make_shard(Sync(), [0.0, 0.0, 0.0]).snapshot(),
        "Async": make_shard(Async(), [0.0, 0.0]).snapshot(),
    }
    for message, snapshot in others.items():
        with pytest.raises(CheckpointError, match=says(message)):
            shard.restore(snapshot)
    assert_states_equal(shard.snapshot(), before)


# --- counters, packed vectors, exchanges ------------------------------------------------------


def test_staleness_is_counted_on_arrival() -> None:
    shard = make_shard(Async(), [0.0], workers=2)
    shard.push(make_push(0, 0, [1.0], based_on=0))
    shard.push(make_push(0, 1, [1.0], based_on=1))
    shard.push(make_push(1, 0, [1.0], based_on=0))
    assert shard.counters.staleness == {0: 2, 2: 1}


def test_bytes_are_those_on_the_wire() -> None:
    weights = torch.zeros(100)
    optimiser = make_optimiser("sgd", weights, EPS)
    shard = Shard(weights, optimiser, Async(), cast=Cast(torch.bfloat16))
    shard.add_worker(0)
    packed = TopK(0.05).pack(noise(100, 3))
    shard.push(make_push(0, 0, [0.0])._replace(gradient=packed))
    assert shard.counters.bytes_in == 5 * (4 + 4)
    pulled = shard.pull().weights
    assert shard.counters.bytes_out == 200
    assert pulled is not None
    assert torch.equal(unpack(pulled), (-unpack(packed)).to(torch.bfloat16).float())
    assert int((unpack(pulled) != 0).sum()) == 5


def test_an_exchange_moves_both_sides_once() -> None:
    shard = make_shard(Async(), [0.0, 4.0], workers=2)
    exchange = Exchange(0, 0, 0, torch.tensor([8.0, 0.0]), alpha=0.25)
    first = shard.exchange(exchange)
    assert first._replace(weights=None) == Reply(0, 1, "applied")
    assert first.weights is not None
    assert first.weights.tolist() == [2.0, -1.0]
    assert weights_of(shard).tolist() == [2.0, 3.0]
    shard.exchange(Exchange(1, 0, 0, torch.tensor([2.0, 7.0]), alpha=0.25))
    assert weights_of(shard).tolist() == [2.0, 4.0]
    again = shard.exchange(exchange)
    assert again._replace(weights=None) == first._replace(weights=None)
    assert again.weights is not None
    assert again.weights.tolist() == [2.0, -1.0]
    assert weights_of(shard).tolist() == [2.0, 4.0]
    assert shard.counters.applied == 2


def test_an_exchanged_answer_survives_a_snapshot() -> None:
    shard = make_shard(Async(), [0.0], workers=1)
    shard.exchange(Exchange(0, 0, 0, torch.tensor([8.0]), alpha=0.5))
    snapshot = shard.snapshot()
    shard.restore(snapshot)
    again = shard.exchange(Exchange(0, 0, 1, torch.tensor([8.0]), alpha=0.5))
    assert again.weights is not None
    assert again.weights.tolist() == [4.0]
    assert weights_of(shard).tolist() == [4.0]


@pytest.mark.parametrize("alpha", [0.0, 1.5, math.nan])
def test_an_exchange_beyond_the_distance_is_refused(alpha: float) -> None:
    shard = make_shard(Async(), [1.0], workers=1)
    with pytest.raises(ProtocolError, match="alpha"):
        shard.exchange(Exchange(0, 0, 0, torch.tensor([2.0]), alpha))
    assert weights_of(shard).tolist() == [1.0]
    assert shard.add_worker(0).sequence == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_an_exchange_of_what_is_not_finite_changes_nothing(bad: float) -> None:
    shard = make_shard(Async(), [1.0], workers=1)
    answer = shard.exchange(Exchange(0, 0, 0, torch.tensor([bad]), alpha=0.5))
    assert answer == Reply(0, 0, "dropped", "not-finite")
    assert weights_of(shard).tolist() == [1.0]
    assert shard.counters.dropped == {"not-finite": 1}
