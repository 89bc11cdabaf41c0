"""Turns: several shards that make workers wait stay in step when a gradient misses one of them."""

from __future__ import annotations

import functools
import random
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from qfleet.config.config import Config
from qfleet.core.errors import MemberLost
from qfleet.engines.parameter_server.admission import BoundedStaleness, Sync
from qfleet.engines.parameter_server.client import Servers, ServersLost
from qfleet.engines.parameter_server.server import Server
from qfleet.engines.parameter_server.shard import Shard
from qfleet.engines.parameter_server.wire import Join, Request, Stamp
from qfleet.telemetry.timers import Timers
from support.server_cases import DirectLine, make_push, make_shard, weights_of
from support.waiting import PHASE_S, deadline, wait_until

PUSHES = 40
BACKUP = functools.partial(Sync, 1)


class Mortal(DirectLine):
    """Calls of several servers are under way at once, as they are between processes."""

    dead: set[Any]
    threads = ThreadPoolExecutor(8)

    def start(self, request: Request) -> Any:
        return self.threads.submit(self._call, request)

    def _call(self, request: Request) -> Any:
        if self._server in self.dead:
            raise MemberLost("dead")
        return super().start(request)

    def finish(self, started: Any) -> Any:
        return started.result()


@pytest.mark.parametrize("fields", [{"update": "sync"}, {"update": "ssp", "staleness": 0}], ids=str)
def test_workers_that_come_back_apart_to_a_restored_server_fall_in_step(
    fields: dict[str, Any],
) -> None:
    """Two servers, of which one dies. One worker is back before the other, and alone with it."""
    config = Config(engine="parameter-server", workers=2, servers=2, optimizer="sgd", **fields)
    first, second = (Server(config, np.zeros(1, dtype=np.float32)) for _ in range(2))
    restored: list[Server] = []
    began: list[int] = []
    Mortal.dead = set()
    apart: list[float] = []
    failures: list[BaseException] = []
    over = threading.Event()

    def come_back(servers: Servers, into: torch.Tensor, is_late: bool) -> None:
        if is_late:
            wait_until(lambda: restored[0].account()["version"] > began[0], "the other's round")
        servers.replace(0, Mortal(restored[0]))
        servers.join(into)

    def work(worker: int) -> None:
        servers, into = Servers(worker, 2, [Mortal(first), Mortal(second)], Timers()), torch.ones(2)
        servers.join(into)
        for count in range(PUSHES if worker == 0 else 10**9):
            if over.is_set():
                break
            if worker == 0 and count == 5:
                snapshot = first.snapshot()
                restored.append(Server(config, snapshot["weights"], None, 0, snapshot))
                began.append(restored[0].account()["version"])
                Mortal.dead = {first}
            try:
                # The same to both, and each time another.
                servers.push(torch.full((2,), float(count)), 0.01, None, 1.0, into)
            except ServersLost:
                come_back(servers, into, is_late=worker == 1)
            if worker == 0:
                apart.append(float(into[0] - into[1]))

    def go(worker: int) -> None:
        try:
            work(worker)
        except BaseException as error:
            failures.append(error)
        over.set()
        for server in (*restored, second):
            server.leave(worker)

    for worker in range(2):
        for server in (first, second):
            server.join(Join(worker))
    threads = [threading.Thread(target=go, args=(worker,), daemon=True) for worker in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(deadline(PHASE_S))
        assert not thread.is_alive(), "they wait for each other"
    assert failures == []
    # Where both servers make the same rounds, what is between them stays as it is.
    settled = apart[PUSHES // 2 :]
    assert settled == pytest.approx([settled[0]] * len(settled), abs=1e-4)
    assert restored[0].account()["version"] > began[0]


def send(shard: Shard, worker: int, sequence: int, value: float, turn: int) -> str:
    push = make_push(worker, sequence, [value], based_on=shard.stamp.version)
    return shard.push(push._replace(turn=turn)).outcome


def test_who_comes_for_a_later_round_is_not_waited_for_in_this_one() -> None:
    shard = make_shard(Sync(), [0.0], workers=3)
    assert send(shard, 0, 0, 3.0, 0) == "kept"
    assert send(shard, 1, 0, 1.0, 0) == "kept"
    # It was let in between two rounds of another shard, and has nothing to send for this one.
    assert send(shard, 2, 0, 100.0, 1) == "kept"
    assert float(weights_of(shard)) == -2.0
    assert [shard.waits(worker) for worker in range(3)] == [False, False, True]
    assert shard.turn(0) == 1
    send(shard, 0, 1, 0.0, 1)
    send(shard, 1, 1, 20.0, 1)
    assert float(weights_of(shard)) == -2.0 - 40.0
    assert not any(shard.waits(worker) for worker in range(3))


def test_rounds_that_nobody_comes_for_are_left_out_and_late_ones_are_dropped() -> None:
    shard = make_shard(Sync(), [0.0], workers=2)
    send(shard, 0, 0, 1.0, 50)
    send(shard, 1, 0, 3.0, 50)
    assert (float(weights_of(shard)), shard.turn(0), shard.stamp) == (-2.0, 51, Stamp(0, 1))
    assert send(shard, 0, 1, 1.0, 50) == "dropped"
    assert shard.counters.dropped == {"late": 1}


def test_who_joins_is_waited_for_from_the_turn_that_it_says() -> None:
    shard = make_shard(Sync(), [0.0], workers=2)
    shard.add_worker(1, turn=3)  # what it sent for the turns before this was lost on its way
    assert send(shard, 0, 0, 1.0, 2) == "applied"
    assert send(shard, 0, 1, 1.0, 3) == "kept"
    shard.remove_worker(1)
    shard.add_worker(1)  # another of its number, which knows of no turn
    assert send(shard, 0, 2, 1.0, 4) == "kept"
    send(shard, 1, 0, 3.0, 4)
    assert float(weights_of(shard)) == -1.0 - 1.0 - 2.0


def test_when_all_leave_nothing_stays_behind_whatever_it_is_for() -> None:
    shard = make_shard(Sync(), [0.0], workers=3)
    send(shard, 0, 0, 1.0, 5)
    send(shard, 1, 0, 3.0, 7)
    for worker in range(3):
        shard.remove_worker(worker)
    assert shard.counters.applied == 2


def test_clocks_go_on_from_those_of_other_shards_and_the_bound_holds() -> None:
    shard = make_shard(BoundedStaleness(2), [0.0], workers=3)
    # A restored shard begins at 0; elsewhere these stand at 10, 17 and 11.
    assert send(shard, 0, 0, 1.0, 10) == "kept"
    assert send(shard, 1, 0, 1.0, 17) == "kept"
    assert send(shard, 2, 0, 1.0, 11) == "applied"
    assert [shard.turn(worker) for worker in range(3)] == [11, 18, 12]
    assert [shard.waits(worker) for worker in range(3)] == [False, True, False]
    assert shard.counters.applied == 2


def test_rounds_and_who_came_for_which_are_in_a_snapshot() -> None:
    shard, other = make_shard(Sync(), [0.0], workers=2), make_shard(Sync(), [0.0])
    send(shard, 0, 0, 1.0, 4)
    send(shard, 1, 0, 1.0, 4)
    send(shard, 0, 1, 1.0, 6)
    other.restore(shard.snapshot())
    assert (other.turn(0), other.waits(0), other.waits(1)) == (5, True, False)
    push = make_push(1, 1, [3.0])
    other.push(push._replace(epoch=1, version=other.stamp.version, turn=6))
    assert (float(weights_of(other)), other.turn(0)) == (-1.0 - 2.0, 7)


class Story:
    """Workers on several shards, a message at a time, in an order that is drawn; shards die."""

    def __init__(self, make_policy: Callable[[], Any], shards: int, seed: int) -> None:
        self.random, self.make_policy = random.Random(seed), make_policy
        self.shards = [make_shard(make_policy(), [0.0]) for _ in range(shards)]
        self.snapshots = [shard.snapshot() for shard in self.shards]
        self.to_send: dict[int, list[int]] = {}
        """By worker: shards that its gradient has not reached yet."""
        self.known: dict[int, dict[int, tuple[Stamp, int]]] = {}
        """By worker and shard: the weights it has, and the number of its next message."""
        self.turn: dict[int, int] = {}
        self.sent: Counter[int] = Counter()

    def step(self, worker: int) -> None:
        """Send one message, or, when all have come, take up what there is and compute."""
        numbers = range(len(self.shards))
        if left := self.to_send.get(worker, []):
            number = left.pop(self.random.randrange(len(left)))
            known = self.known.get(worker, {}).get(number)
            if known is not None and known[0].epoch == self.shards[number].stamp.epoch:
                stamp, sequence = known
                push = make_push(worker, sequence, [1.0], stamp.version, stamp.epoch)
                self.shards[number].push(push._replace(turn=self.turn[worker]))
            return
        # Where it is not present any more, it joins, shard after shard.
        away = [n for n in numbers if worker not in self.shards[n].present]
        if away:
            shard = self.shards[self.random.choice(away)]
            shard.add_worker(worker, self.turn.get(worker, -1) + 1)
            return
        if any(self.shards[n].waits(worker) for n in numbers):
            for shard in self.shards:
                shard.tick(0.0)  # as servers do while somebody waits
            return
        turns = [self.shards[n].turn(worker) for n in numbers]
        self.turn[worker] = max(self.turn.get(worker, -1) + 1, *turns)
        self.known[worker] = {
            n: (self.shards[n].stamp, self.shards[n].add_worker(worker).sequence) for n in numbers
        }
        self.to_send[worker] = list(numbers)
        self.sent[worker] += 1

    def restore(self) -> None:
        number = self.random.randrange(len(self.shards))
        shard = make_shard(self.make_policy(), [0.0])
        shard._epoch = self.shards[number].stamp.epoch
        shard.restore(self.snapshots[number])
        for worker in shard.present:
            shard.remove_worker(worker)
        self.shards[number] = shard

    def remember(self) -> None:
        number = self.random.randrange(len(self.shards))
        self.snapshots[number] = self.shards[number].snapshot()

    def leave(self, worker: int) -> None:
        for shard in self.shards:
            shard.remove_worker(worker)
        for memory in (self.to_send, self.known, self.turn):
            memory.pop(worker, None)


@pytest.mark.parametrize(
    "make_policy",
    [Sync, BACKUP, lambda: BoundedStaleness(0), lambda: BoundedStaleness(2)],
    ids=["sync", "backup", "ssp 0", "ssp 2"],
)
@pytest.mark.parametrize("seed", range(8))
def test_whatever_died_all_go_on_and_shards_agree_on_the_turn(
    make_policy: Callable[[], Any], seed: int
) -> None:
    story = Story(make_policy, shards=2 + seed % 2, seed=seed)
    workers = range(4)
    for _ in range(600):
        chance = story.random.random()
        if chance < 0.02:
            story.restore()
        elif chance < 0.05:
            story.remember()
        elif chance < 0.06:
            story.leave(story.random.choice(workers))
        else:
            story.step(story.random.choice(workers))
    before = Counter(story.sent)
    # From now on nobody dies, and nobody waits for ever.
    for _ in range(1000):
        story.step(story.random.choice(workers))
    made = [story.sent[worker] - before[worker] for worker in workers]
    assert min(made) > 15, made
    updates = [shard.counters.applied for shard in story.shards]
    for _ in range(1000):
        story.step(story.random.choice(workers))
    # What comes to one shard comes to all, but for a round under way at either end.
    gained = [s.counters.applied - u for s, u in zip(story.shards, updates, strict=True)]
    if make_policy is not BACKUP:  # of which every shard has its own
        assert max(gained) - min(gained) <= 2 * len(workers), gained
    turns = [shard.turn(0) for shard in story.shards]
    assert max(turns) - min(turns) <= 1, turns
