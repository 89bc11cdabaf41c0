"""What actors and shards cost: figures by hand, actors' own slices, and the lanes of a trace."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from qfleet.engines.actors import remote_actor
from qfleet.engines.actors.account import Account
from qfleet.engines.actors.block_messages import encode
from qfleet.engines.actors.messages import Order, PriorityUpdate, Report, Tally
from qfleet.engines.actors.remote_actor import RemoteActor
from qfleet.engines.actors.shard import ReplayShard
from qfleet.lab.speedup import Case, sweep
from qfleet.telemetry.fleet import FleetAccount, ShardAccount
from qfleet.telemetry.timers import STAGES, Timers
from qfleet.telemetry.trace import Trace
from support.in_process_cluster import FRAMES, SPEC, random_block, small

COLLECTED = dict.fromkeys(STAGES, 0.0) | {"env": 1.0, "act": 0.5, "communicate": 0.5}


def report(idle_s: float = 0.0, **changes: Any) -> Report:
    """Of a slice of 2 s and the wait before it."""
    fields: dict[str, Any] = {
        "rows": 5,
        "version": 0,
        "block_bytes": 100,
        "plain_bytes": 400,
        "weight_bytes": 0,
        "messages": 2,
        "host": "here",
        "began_s": 0.0,
        "wall_s": 2.0 + idle_s,
        "processor_s": 0.25,
        "seconds": COLLECTED | {"idle": idle_s},
    }
    return Report(**fields | changes)


def made(account: Account) -> FleetAccount:
    found = account.account()
    assert found is not None
    return found


def test_a_rate_is_that_of_actors_at_work() -> None:
    account = Account(workers=2, servers=1)
    account.record(0, report(), 10, 0, 5.0)
    account.record(0, report(), 10, 0, 6.0)
    assert account.env_steps_per_s() is None
    account.record(1, report(), 10, 0, 7.0)
    assert account.env_steps_per_s() is None
    account.record(0, report(), 30, 0, 9.0)
    account.record(1, report(), 10, 0, 11.0)
    assert account.env_steps_per_s() == 40 / 4


def test_slices_of_all_lives_add_up_to_an_actors_account() -> None:
    timers = Timers()
    account = Account(2, 1, timers, began_s=1.0)
    assert account.account() is None
    timers.seconds["idle"] = 100.0  # before the first block came; or in an earlier sitting
    account.record(0, report(weight_bytes=64, messages=3), 10, 0, 5.0)
    timers.seconds.update(idle=101.0, learn=4.0, communicate=1.0)
    account.record(0, report(idle_s=3.0), 10, 7, 9.0)
    timers.seconds.update(idle=102.0, learn=6.0)
    account.count_restart(0)
    account.record(0, report(idle_s=1.0), 10, 7, 15.0)
    found = made(account)
    (actor,) = found.workers  # the other one never reported
    assert (actor.number, actor.host, actor.env_steps, actor.updates) == (0, "here", 30, None)
    assert (actor.wall_s, actor.processor_s, actor.restarts) == (10.0, 0.75, 1)
    assert (actor.bytes_sent, actor.bytes_received, actor.messages) == (300, 64, 7)
    assert actor.shares == pytest.approx(
        {"computing": 0.45, "communicating": 0.15, "waiting": 0.4, "other": 0.0}
    )
    assert actor.own_pace == 30 / 6
    assert found.staleness.counts == {0: 1, 7: 2}
    assert found.wall_s == 14.0
    assert found.saved("sent") == 0.75
    # From the first block to the newest, 10 s: what came before is not in it.
    assert found.learner == pytest.approx(
        {"computing": 0.6, "communicating": 0.1, "waiting": 0.2, "other": 0.1}
    )


def test_a_shards_lives_add_up_and_what_was_lost_is_told() -> None:
    account = Account(workers=1, servers=2)
    account.record(0, report(), 10, 0, 5.0)
    account.set_tally(1, Tally(10, 8, 100, 900, 0.5))
    account.set_tally(1, Tally(20, 16, 200, 1800, 1.0))  # since it was started, not since the last
    account.add_loss(1, 18)
    account.set_tally(1, Tally(5, 4, 50, 450, 0.25))
    idle, busy = made(account).shards
    assert idle == ShardAccount(0, 0.0, 0, 0, 0, 0, restarts=0, lost=0)
    assert busy == ShardAccount(1, 1.25, 25, 20, 250, 2250, restarts=1, lost=18)
    counts = account.counts()
    assert (counts["shards_replaced"], counts["transitions_lost"]) == (1, 18)


def test_the_lab_reads_shares_and_staleness_of_actors() -> None:
    account = Account(workers=1, servers=1)
    for second in (5.0, 7.0):
        account.record(0, report(idle_s=2.0), 20, 3, second)
    told = made(account).as_dict() | {"env_steps_per_s": account.env_steps_per_s()}
    (point,) = sweep([Case("async", 1.0, 1)], 40, 1, lambda _: told)
    assert (point.env_steps, point.env_steps_per_s) == (40, 10.0)
    assert (point.computing, point.communicating, point.waiting) == (0.375, 0.125, 0.5)
    assert point.staleness == 3.0
    assert point.processor_s is not None
    assert point.processor_s >= 0.5


# --- actors and shards say what they did --------------------------------------------------------


def test_an_actor_says_how_long_it_waited_for_its_order(monkeypatch: pytest.MonkeyPatch) -> None:
    actor = RemoteActor(small(prioritized_replay=True), 1, traced=True)
    weights = actor._weights.data.numpy().copy()
    first, letter = actor.work(Order(5, 0, 0), weights)
    assert first.seconds["idle"] == 0.0
    assert (first.weight_bytes, first.messages) == (weights.nbytes, 3)
    ended_s = first.began_s + first.wall_s
    now = remote_actor.time.perf_counter
    monkeypatch.setattr(remote_actor.time, "perf_counter", lambda: now() + 1000.0)
    second, _ = actor.work(Order(5, 0, 0), None)
    assert second.seconds["idle"] == pytest.approx(second.began_s - ended_s)
    assert second.seconds["idle"] > 1000.0
    assert (second.weight_bytes, second.messages) == (0, 2)
    for slice_ in (first, second):
        # Errors of new transitions are computed; packing them is communication.
        assert slice_.seconds["learn"] > 0
        assert slice_.seconds["communicate"] > 0
        assert sum(slice_.seconds.values()) <= slice_.wall_s
        assert slice_.processor_s >= 0
    assert second.spans[0] == ("idle", pytest.approx(ended_s), second.began_s)
    assert {stage for stage, _, _ in first.spans} == {"env", "act", "learn", "communicate"}
    starts = [start_s for _, start_s, _ in first.spans + second.spans]
    assert starts == sorted(starts)
    assert first.plain_bytes == first.block_bytes == letter.nbytes


def test_without_a_trace_no_span_travels() -> None:
    assert RemoteActor(small(), 0).work(Order(5, 0, 0), None)[0].spans == []


def test_a_shard_counts_what_it_received_and_gave() -> None:
    config = small(workers=1, buffer_size=100, prioritized_replay=True)
    shard = ReplayShard(config, SPEC, [0])
    letter = encode(random_block(10, 2, 4), 0, 0, 0, 3, None, "none")
    tally = shard.insert(letter).tally
    assert tally[:4] == (20, 0, letter.nbytes, 0)
    news = PriorityUpdate(0, np.array([3, 4]), np.ones(2, np.float32))
    drawn = shard.exchange([news], {0: 6})
    assert drawn.tally[:4] == (20, 6, letter.nbytes + 24, drawn.nbytes)
    # Two observations of two floats, action, reward, discount; index, ring and probability.
    assert drawn.nbytes == 6 * (16 + 8 + 4 + 4 + 24)
    assert drawn.tally.processor_s >= tally.processor_s > 0


def test_what_compression_saved_is_known_from_the_letter() -> None:
    block = random_block(7, 2, 1, FRAMES)
    block.obs.zero_()
    plain, packed = encode(block, 0, 0, 0, 3, None, "none"), encode(block, 0, 0, 0, 3, None, "lz4")
    assert packed.nbytes < plain.nbytes
    assert packed.plain_nbytes == plain.plain_nbytes == plain.nbytes


# --- the trace ----------------------------------------------------------------------------------


def test_lanes_are_put_on_the_learners_clock_by_the_quickest_order() -> None:
    lane = Trace().lane("learner")
    lane.add("learn", 50.0, 51.0)
    account = Account(2, 1, lane=lane)
    # Its clock is 90 s ahead; it was starting when the first order came, the others took 1 and 2 s.
    for ordered_s, began_s in ((10.0, 150.0), (70.0, 161.0), (80.0, 172.0)):
        spans = [("env", began_s, began_s + 1.0)]
        account.add_spans(0, 0, report(began_s=began_s, spans=spans), ordered_s)
    account.add_spans(0, 1, report(began_s=5.0, spans=[("act", 5.0, 6.0)]), 100.0)
    assert dict(account.lanes()) == {
        "learner": [("learn", 50.0, 51.0)],
        "actor 0": [
            ("env", 59.0, 60.0),
            ("env", 70.0, 71.0),
            ("env", 81.0, 82.0),
            ("act", 100.0, 101.0),
        ],
        "actor 1": [],
    }
    assert dict(Account(2, 1).lanes()) == {}
