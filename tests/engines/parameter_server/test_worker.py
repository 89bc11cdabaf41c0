"""Workers on servers in one process: what they compute is what the serial engine computes."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from qfleet.algorithms.exploration import epsilon_ladder
from qfleet.config.config import Config
from qfleet.core.errors import MemberSilent
from qfleet.engines import serial
from qfleet.engines.parameter_server.client import TRIES, ServersLost
from qfleet.engines.parameter_server.layout import cut
from qfleet.engines.parameter_server.ledger import Ledger
from qfleet.engines.parameter_server.server import Server
from qfleet.engines.parameter_server.wire import Join, Pull, Push, Reply, Request, Wait
from qfleet.engines.parameter_server.worker import Worker, WorkOrder, without_overlap, worker_config
from qfleet.engines.registry import build
from qfleet.telemetry.faults import FaultLog
from support.server_cases import DirectLine
from support.server_runs import STEPS, first_weights, make_config

LONG_S = 600.0


def make_servers(config: Config) -> list[Server]:
    weights = first_weights(config)
    return [Server(config, weights[part].numpy()) for part in cut(len(weights), config.servers)]


def held(servers: list[Server]) -> Tensor:
    return torch.cat([torch.tensor(server.snapshot()["weights"]) for server in servers])


def make_worker(config: Config, servers: list[Server], number: int = 0, **more: Any) -> Worker:
    return Worker(config, number, [DirectLine(server) for server in servers], **more)


def run_together(config: Config, steps: int) -> list[Server]:
    """All workers at once, each in a thread, so many steps each; they leave when they are done."""
    servers = make_servers(config)
    workers = [make_worker(config, servers, number) for number in range(config.workers)]
    for number in range(config.workers):
        for server in servers:
            server.join(Join(number))
    failures: list[BaseException] = []

    def go(number: int) -> None:
        try:
            workers[number].work(WorkOrder(0, steps, LONG_S))
        except BaseException as error:
            failures.append(error)
        finally:
            for server in servers:
                server.leave(number)
            workers[number].close()

    threads = [threading.Thread(target=go, args=(number,)) for number in range(config.workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    return servers


def serial_weights(config: Config, steps: int) -> Tensor:
    parts = build(config.replace(engine="serial"), FaultLog())
    try:
        serial.run(parts, lambda: parts.clock.env_steps < steps)
    finally:
        parts.close()
    return parts.learner.weights.data.clone()


@pytest.mark.parametrize("servers", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"update": "async"},
        {"update": "ssp", "staleness": 0},
        {"update": "hybrid", "hybrid_workers": 1},
        {"optimizer": "rmsprop"},
        {"weight_decay": 0.1},
        {"optimizer": "adamw", "weight_decay": 0.1},
        {"gradient_compression": "top-k", "top_k_share": 1.0},
    ],
    ids=str,
)
def test_one_worker_computes_what_serial_does(servers: int, fields: dict[str, Any]) -> None:
    config = make_config(servers=servers, **fields)
    shards = make_servers(config)
    worker = make_worker(config, shards)
    worker.work(WorkOrder(0, STEPS, LONG_S))
    worker.close()
    assert torch.equal(held(shards), serial_weights(config, STEPS))


def test_slices_change_nothing() -> None:
    config = make_config()
    whole, sliced = make_servers(config), make_servers(config)
    make_worker(config, whole).work(WorkOrder(0, STEPS, LONG_S))
    worker = make_worker(config, sliced)
    for until in range(0, STEPS + 1, 100):
        report = worker.work(WorkOrder(0, until, LONG_S))
    assert report.env_steps == STEPS
    assert torch.equal(held(whole), held(sliced))


def test_a_slice_ends_with_its_time() -> None:
    config = make_config()
    ticks = iter(range(10**9))
    worker = make_worker(config, make_servers(config), clock=lambda: float(next(ticks)))
    report = worker.work(WorkOrder(0, STEPS, slice_s=5.0))
    assert 0 < report.env_steps < STEPS


@pytest.mark.parametrize(
    "fields",
    [
        {"update": "ssp", "staleness": 0},
        {"update": "hybrid", "hybrid_workers": 3, "hybrid_window_s": 1e6},
    ],
)
def test_three_workers_without_slack_are_sync(fields: dict[str, Any]) -> None:
    """A window that nobody reaches: k = m, and a bound of 0, make the very updates of sync."""
    sync = run_together(make_config(workers=3), 400)
    other = run_together(make_config(workers=3, **fields), 400)
    assert torch.equal(held(sync), held(other))


def test_sync_does_not_depend_on_who_comes_first() -> None:
    assert torch.equal(
        held(run_together(make_config(workers=3, servers=2), 400)),
        held(run_together(make_config(workers=3), 400)),
    )


def test_local_steps_of_one_with_outer_rate_one_are_sync_descent() -> None:
    plain = {"optimizer": "sgd", "workers": 2, "max_grad_norm": 0.0}
    sync = run_together(make_config(**plain), 400)
    local = {"local_steps": 1, "outer_learning_rate": 1.0, "outer_momentum": 0.0}
    outer = run_together(make_config(update="local-sgd", **local, **plain), 400)
    assert torch.allclose(held(sync), held(outer), atol=1e-6)


@pytest.mark.parametrize("update", ["easgd", "local-sgd", "admm"])
def test_schemes_move_the_servers_weights(update: str) -> None:
    config = make_config(update=update, workers=2, local_steps=5)
    servers = run_together(config, 400)
    assert not torch.equal(held(servers), first_weights(config))
    assert all(server.account()["applied"] > 0 for server in servers)


def test_a_worker_knows_what_others_did() -> None:
    """Schedules follow the whole run: ε after 400 of 800 steps elsewhere is what it ends at."""
    config = make_config(workers=2, update="async", exploration_fraction=0.5)
    worker = make_worker(config, make_servers(config))
    near, far = (worker.work(WorkOrder(e, u, LONG_S)) for e, u in ((0, 8), (STEPS // 2, 16)))
    assert near.exploration_rate > 0.9
    assert far.exploration_rate == config.exploration_final_eps


def test_shares_of_a_worker() -> None:
    config = make_config(
        workers=4, learning_starts=200, buffer_size=1000, straggler=3.0, step_latency_s=0.5
    )
    first, other = worker_config(config, 0), worker_config(config, 1)
    assert (first.learning_starts, first.buffer_size, first.engine) == (50, 250, "serial")
    assert first.seed == config.seed != other.seed
    assert (first.step_latency_s, other.step_latency_s) == (1.5, 0.5)


def test_a_slower_worker_takes_its_share() -> None:
    """Half the share: updates come after half the steps, of half the samples, and weigh half."""
    config = make_config(workers=2, update="async", balance=False, train_freq=8, batch_size=16)
    seen: list[tuple[int, float]] = []

    class Watched(DirectLine):
        def start(self, request: Request) -> Any:
            if isinstance(request, Push):
                seen.append((worker._parts.clock.env_steps, request.weight))
            return super().start(request)

    worker = Worker(config, 0, [Watched(make_servers(config)[0])])
    worker.work(WorkOrder(0, 240, LONG_S))
    worker.work(WorkOrder(0, 480, LONG_S, share=0.5))
    whole = [at for at, weight in seen if weight == 16.0]
    half = [at for at, weight in seen if weight == 8.0]
    assert len(whole) + len(half) == len(seen)
    assert [b - a for a, b in itertools.pairwise(sorted(set(whole)))] == [8] * (len(set(whole)) - 1)
    assert [b - a for a, b in itertools.pairwise(sorted(set(half)))] == [4] * (len(set(half)) - 1)
    assert min(half) >= max(whole)  # 4 steps behind the last whole burst were left


class Dying(DirectLine):
    """A server that dies after so many calls."""

    def __init__(self, server: Server, calls: int) -> None:
        super().__init__(server)
        self.left = calls

    def finish(self, started: Any) -> Any:
        self.left -= 1
        if self.left < 0:
            raise ServersLost([1])
        return super().finish(started)


def test_a_lost_server_ends_the_slice_and_another_goes_on() -> None:
    config = make_config(servers=2)
    servers = make_servers(config)
    dying = Dying(servers[1], calls=20)
    worker = Worker(config, 0, [DirectLine(servers[0]), dying])
    report = worker.work(WorkOrder(0, STEPS, LONG_S))
    assert report.lost_servers == (1,)
    assert report.env_steps < STEPS
    assert report.traffic["outcomes"]["unanswered"] == 1
    snapshot = servers[1].snapshot()
    other = Server(config, snapshot["weights"], snapshot=snapshot)
    report = worker.work(WorkOrder(0, STEPS, LONG_S, renewed=((1, DirectLine(other)),)))
    assert (report.lost_servers, report.env_steps) == ((), STEPS)
    assert other.account()["epoch"] == 1
    assert other.account()["applied"] > snapshot["counters"]["applied"]
    # It had come before the snapshot was taken: only its answer was lost.
    assert (report.traffic["outcomes"]["heard"], report.traffic["outcomes"]["unanswered"]) == (1, 0)


def test_a_late_worker_that_loses_a_server_in_its_first_burst_waits_as_it_has_to() -> None:
    """Its first gradient is kept at a barrier, and its first update is not over yet."""
    config = make_config(workers=2, servers=2, gradient_steps=4)
    servers = make_servers(config)
    for server in servers:
        server.join(Join(1))

    class Leaving(DirectLine):
        """The other worker leaves when this one has asked whether it may go on."""

        is_over = False

        def start(self, request: Request) -> Any:
            if self.is_over and isinstance(request, Wait):
                for server in servers:
                    server.leave(1)
            return super().start(request)

    class DyingAtAPush(DirectLine):
        def start(self, request: Request) -> Any:
            return "nobody" if isinstance(request, Push) else super().start(request)

        def finish(self, started: Any) -> Any:
            if started == "nobody":
                raise ServersLost([1])
            return super().finish(started)

    line = Leaving(servers[0])
    late = Worker(config, 0, [line, DyingAtAPush(servers[1])], is_late=True)
    report = late.work(WorkOrder(0, STEPS, LONG_S))
    assert (report.lost_servers, report.updates) == ((1,), 1)
    assert servers[0]._shard.waits(0)
    snapshot = servers[1].snapshot()
    servers[1] = Server(config, snapshot["weights"], snapshot=snapshot)
    line.is_over = True
    report = late.work(WorkOrder(0, STEPS, LONG_S, renewed=((1, DirectLine(servers[1])),)))
    assert (report.lost_servers, report.env_steps) == ((), STEPS)


@pytest.mark.parametrize("update", ["async", "easgd"])
def test_what_a_burst_came_to_before_a_server_was_lost_is_counted(update: str) -> None:
    fields = {"local_steps": 1} if update == "easgd" else {}
    config = make_config(update=update, gradient_steps=8, **fields)
    (server,) = make_servers(config)
    sent = itertools.count()

    class DyingNowAndThen(DirectLine):
        def finish(self, started: Any) -> Any:
            is_receipt = isinstance(started, Reply) and started.outcome != ""
            if is_receipt and next(sent) in (5, 29, 60):
                raise ServersLost([0])
            return super().finish(started)

    worker = Worker(config, 0, [DyingNowAndThen(server)])
    for _ in range(4):
        report = worker.work(WorkOrder(0, STEPS, LONG_S))
    assert report.updates == server.account()["applied"] == (STEPS - 200) // 8 * 8


def test_what_a_worker_sent_tells_what_died_with_a_server() -> None:
    config = make_config(servers=2)
    servers = make_servers(config)
    dying = Dying(servers[1], calls=10**6)
    worker = Worker(config, 0, [DirectLine(servers[0]), dying])
    worker.work(WorkOrder(0, 400, LONG_S))
    snapshot = servers[1].snapshot()
    dying.left = 10
    assert worker.work(WorkOrder(0, STEPS, LONG_S)).lost_servers == (1,)
    other = Server(config, snapshot["weights"], snapshot=snapshot)
    report = worker.work(WorkOrder(0, STEPS, LONG_S, renewed=((1, DirectLine(other)),)))
    assert report.traffic["outcomes"]["server-lost"] == 1
    ledger = Ledger()
    ledger.record_sent(0, report.traffic["sent"][1])
    ledger.restored(0, {0: snapshot["records"]["0"]["sequence"]})
    # What the dead server could have told: all of it was applied there, the last one unheard.
    assert ledger.lost == servers[1].account()["applied"] - snapshot["counters"]["applied"]
    assert ledger.lost > 1
    applied = servers[0].account()["applied"] + other.account()["applied"]
    assert applied + ledger.lost == sum(report.traffic["outcomes"].values())
    assert set(report.traffic["sent"][1]) == {0, 1}


def test_a_late_worker_takes_part_from_its_first_gradient_on() -> None:
    config = make_config(workers=2, gradient_steps=1)
    servers = make_servers(config)
    early = make_worker(config, servers)
    early.work(WorkOrder(0, 400, LONG_S))
    late = make_worker(config, servers, 1, is_late=True)
    report = late.work(WorkOrder(0, 48, LONG_S))  # its memory is not full enough to learn from yet
    assert report.updates == 0
    assert servers[0].account()["present"] == [0]
    assert torch.equal(late._parts.learner.weights.data, held(servers))
    early.work(WorkOrder(0, STEPS, LONG_S))  # and nobody waits for it
    servers[0].leave(0)
    report = late.work(WorkOrder(0, 400, LONG_S))
    assert servers[0].account()["present"] == [1]
    # It had looked again before it began.
    assert report.traffic["outcomes"] == {"applied": report.updates}


def test_a_late_workers_first_gradient_is_as_old_as_it_is() -> None:
    """Others make an update between its last look and its joining: a round that it has missed."""
    config = make_config(workers=2, gradient_steps=4)
    (server,) = make_servers(config)
    server.join(Join(1))
    gradient = first_weights(config).numpy()
    bursts: Counter[int] = Counter()

    class Meanwhile(DirectLine):
        def start(self, request: Request) -> Any:
            if isinstance(request, Join):
                stamp = server.pull(Pull()).stamp
                server.push(Push(1, 0, *stamp, gradient, 1e-3, patience_s=LONG_S))
                server.leave(1)
            if isinstance(request, Push):
                bursts[worker._parts.clock.env_steps] += 1
            return super().start(request)

    worker = Worker(config, 0, [Meanwhile(server)], is_late=True)
    report = worker.work(WorkOrder(0, 148, LONG_S))
    assert report.traffic["outcomes"] == {"late": 1, "applied": report.updates - 1}
    # Rounds 1, 2, 3 with its first burst, as the others' first has them: it is in step already.
    assert list(bursts.values())[:3] == [4, 4, 4]


@pytest.mark.parametrize(
    ("fields", "oldest", "pulls"),
    [
        ({"update": "async"}, 0, True),
        ({"update": "ssp", "staleness": 100}, 0, True),
        ({"update": "hybrid", "hybrid_workers": 1}, 0, True),
        ({"update": "async", "pull": "with-push"}, 3, False),
        ({"update": "async", "algo": "n-step-q", "train_freq": 32, "batch_size": 32}, 3, False),
    ],
    ids=str,
)
def test_a_gradient_is_of_the_newest_weights_unless_they_must_be_older(
    fields: dict[str, Any], oldest: int, pulls: bool
) -> None:
    """Others make three updates after each burst: while this worker collects."""
    config = make_config(workers=2, gradient_steps=1 if "algo" in fields else 2, **fields)
    (server,) = make_servers(config)
    server.join(Join(1))
    gradient = 1e-3 * first_weights(config).numpy()
    sequence, ages, asked = itertools.count(), list[int](), Counter[str]()

    class Line(DirectLine):
        def start(self, request: Request) -> Any:
            asked[type(request).__name__] += 1
            if not isinstance(request, Push):
                return super().start(request)
            ages.append(server.pull(Pull()).stamp.version - request.version)
            reply = super().start(request)
            if len(ages) % config.gradient_steps == 0:
                for _ in range(3):
                    stamp = server.pull(Pull()).stamp
                    server.push(Push(1, next(sequence), *stamp, gradient, 1e-3))
            return reply

    worker = Worker(config, 0, [Line(server)])
    report = worker.work(WorkOrder(0, 400, LONG_S))
    assert report.updates == len(ages) > 8
    # The first burst is of weights that were fetched at its start; within a burst none are older.
    assert set(ages[config.gradient_steps :: config.gradient_steps]) == {oldest}
    assert asked["Pull"] == (report.updates // config.gradient_steps if pulls else 0)
    worker.close()


def test_messages_outside_of_learning_are_not_taken_from_it() -> None:
    worker = make_worker(make_config(), make_servers(make_config()))
    for _ in range(3):
        report = worker.work(WorkOrder(0, 0, LONG_S))
    assert report.seconds["communicate"] > 0
    assert report.seconds["learn"] == 0


def test_all_workers_stand_on_one_ladder() -> None:
    config = make_config(workers=2, envs=2, exploration_ladder=True, exploration_final_eps=0.4)
    servers = make_servers(config)
    rates = [
        make_worker(config, servers, number).work(WorkOrder(0, 0, LONG_S)).exploration_rate
        for number in range(3)
    ]
    first, second = epsilon_ladder(4, 0.4).view(2, 2).mean(1).tolist()
    assert rates == pytest.approx([first, second, first])


def test_a_worker_that_was_given_up_comes_back() -> None:
    config = make_config(workers=2, update="async")
    servers = make_servers(config)
    worker = make_worker(config, servers)
    worker.work(WorkOrder(0, 240, LONG_S))
    before = servers[0].account()["applied"]
    servers[0].leave(0)
    report = worker.work(WorkOrder(0, STEPS, LONG_S))
    assert report.traffic["outcomes"]["not-present"] == 1
    assert servers[0].account()["applied"] > before


@pytest.mark.parametrize(
    ("fields", "sizes"),
    [
        ({}, [4, 2, 4, 4]),
        ({"update": "async"}, [4, 4, 4, 4]),
        ({"replay": False, "double": False, "train_freq": 64, "learning_starts": 0}, [4, 4]),
    ],
    ids=str,
)
def test_a_worker_that_comes_in_the_middle_of_a_burst_ends_it_with_the_others(
    fields: dict[str, Any], sizes: list[int]
) -> None:
    """Bursts of 4, and two updates of the one under way are made: its own ends two rounds after
    that one, and its next with the others' next."""
    config = make_config(workers=2, gradient_steps=4, **fields)
    (server,) = make_servers(config)
    server.join(Join(1))
    gradient = first_weights(config).numpy()
    for sequence in range(6):
        stamp = server.pull(Pull()).stamp
        server.push(Push(1, sequence, *stamp, gradient, 1e-3, patience_s=LONG_S))
    server.leave(1)
    bursts: Counter[int] = Counter()

    class Watched(DirectLine):
        def start(self, request: Request) -> Any:
            if isinstance(request, Push):
                bursts[worker._parts.clock.env_steps] += 1
            return super().start(request)

    worker = Worker(config, 0, [Watched(server)], life=1, is_late=True)
    worker.work(WorkOrder(0, 148, LONG_S))
    assert list(bursts.values())[: len(sizes)] == sizes
    assert server.account()["version"] == 6 + sum(bursts.values())


def test_spans_inside_others_are_cut_out() -> None:
    spans = [("env", 0.0, 1.0), ("communicate", 3.0, 4.0), ("idle", 4.0, 5.0), ("learn", 2.0, 6.0)]
    assert without_overlap(spans) == [
        ("env", 0.0, 1.0), ("learn", 2.0, 3.0), ("communicate", 3.0, 4.0), ("idle", 4.0, 5.0),
        ("learn", 5.0, 6.0),
    ]  # fmt: skip


class Cut(DirectLine):
    """A server that cannot be reached for so many answers in a row; it hears everything."""

    def __init__(self, server: Server, calls: int, lost: int) -> None:
        super().__init__(server)
        self.left, self.lost = calls, lost

    def finish(self, started: Any) -> Any:
        self.left -= 1
        if -self.lost <= self.left < 0:
            raise MemberSilent("server 1 cannot be reached")
        return super().finish(started)


@pytest.mark.parametrize("lost", [1, TRIES])
def test_a_server_that_could_not_be_reached_has_heard_everything_once(lost: int) -> None:
    config = make_config(servers=2)
    servers = make_servers(config)
    worker = Worker(config, 0, [DirectLine(servers[0]), Cut(servers[1], 20, lost)])
    report = worker.work(WorkOrder(0, STEPS, LONG_S))
    assert report.lost_servers == ((1,) if lost == TRIES else ())
    if report.lost_servers:  # the supervisor finds it well: nothing was renewed
        report = worker.work(WorkOrder(0, STEPS, LONG_S))
    assert (report.lost_servers, report.env_steps) == ((), STEPS)
    near, far = (server.account() for server in servers)
    assert far["repeated"] == lost - (lost == TRIES)
    assert near["repeated"] == 0
    assert near["applied"] == far["applied"] == far["received"] - far["repeated"]


@pytest.mark.parametrize("pull", ["before-gradient", "with-push"])
@pytest.mark.parametrize(
    ("overlap", "bursts", "expected"), [(False, 2, {0}), (True, 1, {0}), (True, 2, {0, 1})]
)
def test_a_gradient_under_way_is_applied_once_and_the_next_of_its_burst_is_older(
    overlap: bool, bursts: int, expected: set[int], pull: str
) -> None:
    config = make_config(update="async", overlap=overlap, gradient_steps=bursts, pull=pull)
    servers = make_servers(config)
    worker = make_worker(config, servers)
    for until in range(100, STEPS + 1, 100):  # nothing is under way between two slices
        report = worker.work(WorkOrder(0, until, LONG_S))
        account = servers[0].account()
        assert account["version"] == report.updates
        assert sum(report.traffic["outcomes"].values()) == report.updates
    assert {int(age) for age in account["staleness"]} == expected
    worker.close()


def test_a_gradient_that_is_sent_again_is_the_same_although_the_next_one_was_computed() -> None:
    """The buffer of gradients is used again while a message may have to be sent again."""

    class Forgetful(DirectLine):
        """Loses the first reply to a push; the server has not heard the push either."""

        silent = True

        def start(self, request: Request) -> Any:
            if isinstance(request, Push):
                return request
            return super().start(request)

        def finish(self, started: Any) -> Any:
            if isinstance(started, Push):
                if self.silent:
                    self.silent = False
                    raise MemberSilent("no reply")
                self.silent = True
                return super().start(started)
            return started

    config = make_config(update="async", overlap=True)
    plain, forgetful = make_servers(config), make_servers(config)
    make_worker(config, plain).work(WorkOrder(0, STEPS, LONG_S))
    Worker(config, 0, [Forgetful(server) for server in forgetful]).work(WorkOrder(0, STEPS, LONG_S))
    assert torch.equal(held(plain), held(forgetful))


@pytest.mark.parametrize("calls", range(20, 26))
def test_a_gradient_that_was_not_sent_is_no_update(calls: int) -> None:
    """Its server is lost while the reply to the gradient before it is waited for."""
    config = make_config(servers=2, update="async", overlap=True, gradient_steps=2)
    servers = make_servers(config)
    worker = Worker(config, 0, [DirectLine(servers[0]), Dying(servers[1], calls)])
    report = worker.work(WorkOrder(0, STEPS, LONG_S))
    assert report.lost_servers == (1,)
    assert sum(report.traffic["outcomes"].values()) == 2 * report.updates


@pytest.mark.parametrize(
    "fields",
    [{"target_update_interval": 0, "tau": 0.1}, {"target_update_interval": 100}, {"overlap": True}],
    ids=str,
)
def test_waiting_for_messages_is_no_part_of_learning_nor_taken_from_it(
    fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A target network that follows every update fetches weights before samples are drawn."""
    handle = Server.handle

    def slowly(server: Server, request: Request) -> Any:
        time.sleep(0.005)
        return handle(server, request)

    monkeypatch.setattr(Server, "handle", slowly)
    config = make_config(update="async", workers=1, train_freq=1, learning_starts=50, **fields)
    worker = make_worker(config, make_servers(config))
    report = worker.work(WorkOrder(0, 100, LONG_S))
    assert report.updates > 20
    assert report.seconds["communicate"] >= 0.005 * report.updates
    assert report.seconds["learn"] > 0
    assert sum(report.seconds.values()) <= report.wall_s
