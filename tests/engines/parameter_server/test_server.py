"""A server that many call at once: who waits, who is woken, and what comes after a restart."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch

from qfleet.agent.weights import FlatWeights
from qfleet.config.config import Config
from qfleet.config.validation import validate
from qfleet.core.errors import GivenUp
from qfleet.core.types import Clock
from qfleet.engines.parameter_server.client import Servers
from qfleet.engines.parameter_server.compression import Cast, TopK, bytes_of, unpack
from qfleet.engines.parameter_server.layout import cut
from qfleet.engines.parameter_server.server import (
    THREADED_FROM,
    RemoteServer,
    Server,
    cut_state,
    join_states,
    threads_for,
)
from qfleet.engines.parameter_server.updaters import RemoteGradients
from qfleet.engines.parameter_server.wire import (
    Exchange,
    Join,
    Message,
    Ping,
    Pull,
    Push,
    Reply,
    Request,
    Stamp,
    Wait,
    Welcome,
    decode,
    encode,
)
from qfleet.telemetry.timers import Timers
from support.configs import tiny_config
from support.messages import says
from support.server_cases import DirectLine

LONG_S = 600.0


def make_server(**fields: Any) -> Server:
    told = {"engine": "parameter-server", "workers": 2, "optimizer": "sgd", **fields}
    return Server(validate(Config(**told)), np.zeros(3, dtype=np.float32))


def push(server: Server, worker: int, sequence: int, value: float, patience_s: float) -> Any:
    gradient = np.full(3, value, dtype=np.float32)
    known = server.pull(Pull()).stamp
    return server.push(Push(worker, sequence, *known, gradient, 1.0, patience_s=patience_s))


def test_a_barrier_keeps_a_call_until_the_last_one_comes() -> None:
    server = make_server(update="sync")
    for worker in (0, 1):
        server.join(Join(worker))
    answers: dict[int, Any] = {}
    first = threading.Thread(target=lambda: answers.update({0: push(server, 0, 0, 1.0, LONG_S)}))
    first.start()
    while not server.account()["received"]:
        pass
    assert 0 not in answers
    answers[1] = push(server, 1, 0, 3.0, LONG_S)
    first.join()
    for answer in answers.values():
        assert (answer.waits, answer.stamp) == (False, Stamp(0, 1))
        assert answer.weights.tolist() == [-2.0] * 3


def test_patience_ends_and_the_gradient_stays() -> None:
    server = make_server(update="sync")
    for worker in (0, 1):
        server.join(Join(worker))
    assert push(server, 0, 0, 1.0, 0.0).waits
    assert server.wait(Wait(0, None, 0.0)).waits
    server.leave(1)
    free = server.wait(Wait(0, None, 0.0))
    assert (free.waits, free.weights.tolist()) == (False, [-1.0] * 3)


def test_a_window_ends_while_somebody_waits() -> None:
    """Nobody but the waiting call itself looks at the clock."""
    now = iter(float(second) for second in range(10**6))
    config = Config(
        engine="parameter-server", workers=3, update="hybrid", hybrid_workers=3,
        hybrid_window_s=5.0, optimizer="sgd",
    )  # fmt: skip
    server = Server(config, np.zeros(3, dtype=np.float32), clock=lambda: next(now))
    for worker in range(3):
        server.join(Join(worker))
    answer = push(server, 0, 0, 1.0, LONG_S)
    assert (answer.waits, answer.stamp.version) == (False, 1)


def test_who_was_given_up_is_told() -> None:
    server = make_server(update="async")
    server.join(Join(0))
    server.leave(0)
    answer = push(server, 0, 0, 1.0, 0.0)
    assert (answer.is_present, answer.outcome, answer.weights) == (False, "", None)
    assert not server.wait(Wait(0, None, 0.0)).is_present
    exchange = Exchange(0, 0, 0, np.ones(3, dtype=np.float32), 0.5)
    assert not server.exchange(exchange).is_present
    assert server.account()["applied"] == 0


def test_a_server_goes_on_from_a_snapshot_and_its_workers_come_again() -> None:
    server = make_server(update="sync")
    for worker in (0, 1):
        server.join(Join(worker))
    assert push(server, 0, 0, 1.0, 0.0).waits
    snapshot = server.snapshot()
    other = Server(
        Config(engine="parameter-server", update="sync", optimizer="sgd"),
        snapshot["weights"],
        snapshot=snapshot,
    )
    account = other.account()
    assert (account["epoch"], account["present"]) == (1, [])
    # What was kept for others to come is in the weights: nobody is waited for any more.
    assert other.pull(Pull()).weights is not None
    assert (account["version"], account["applied"]) == (1, 1)
    assert other.join(Join(0)).sequence == 1


def test_repeating_a_message_changes_nothing() -> None:
    """Fault 18 of docs/faults.md: the answer was lost after the push was applied."""
    server = make_server(update="async")
    server.join(Join(0))
    message = Push(0, 0, 0, 0, np.ones(3, dtype=np.float32), learning_rate=1.0)
    first, again = (server.push(message) for _ in range(2))
    assert first[:5] == again[:5] == Reply(0, 1, "applied")[:5]
    assert again.weights is not None
    assert again.weights.tolist() == [-1.0] * 3
    account = server.account()
    assert (account["received"], account["applied"], account["repeated"]) == (2, 1, 1)


def is_plain(value: Any) -> bool:
    if type(value) is tuple:
        return all(is_plain(part) for part in value)
    return value is None or type(value) in (bool, int, float, str, np.ndarray)


@pytest.mark.parametrize(
    ("compressor", "nbytes"),
    [
        (Cast(torch.bfloat16), 10),
        (Cast(torch.float16), 10),
        (Cast(torch.float32), 20),
        (TopK(0.4), 16),
        (TopK(1.0), 20),
    ],
)
def test_packed_vectors_cross_the_wire(compressor: Any, nbytes: int) -> None:
    packed = compressor.pack(torch.tensor([1.0, -2.5, 3.0, 0.25, 7.0]))
    plain = encode(Push(0, 0, 0, 0, packed, 1.0))
    assert is_plain(plain)
    crossed = decode(plain).gradient
    assert bytes_of(crossed) == nbytes
    expected = [0.0, 0.0, 3.0, 0.0, 7.0] if nbytes == 16 else [1.0, -2.5, 3.0, 0.25, 7.0]
    assert unpack(crossed).dtype == torch.float32
    assert unpack(crossed).tolist() == expected


@pytest.mark.parametrize(
    "message",
    [
        Join(1, 2, 3),
        Ping(),
        Pull((0, 4)),
        Push(1, 2, 0, 4, None, 0.5, None, 3.0, 7, 1, 1.0),
        Wait(1, None, 1.0, 2),
        Exchange(1, 2, 0, (3, None, None), 0.5, 1),  # type: ignore[arg-type]
        Welcome(0, 5),
        Reply(0, 4, "dropped", "late", True, None, 0.25, False, 9),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_message_is_the_same_after_encoding_and_decoding(message: Message) -> None:
    plain = encode(message)
    assert is_plain(plain)
    crossed = decode(plain)
    assert type(crossed) is type(message)
    assert crossed == message


def test_messages_travel_without_classes_of_ours() -> None:
    """What Ray sees are tuples, numbers and arrays; what comes out is what went in."""
    config = Config(
        engine="parameter-server", optimizer="sgd", workers=1, weight_compression="bf16"
    )
    server = RemoteServer(config, np.zeros(3, dtype=np.float32))
    joined = server.ask(encode(Join(0)))
    assert decode(joined) == Welcome(0, 0)
    gradient = TopK(0.4).pack(torch.tensor([1.0, 3.0, 2.0]))
    said = server.ask(encode(Push(0, 0, 0, 0, gradient, learning_rate=1.0)))
    assert is_plain(said)
    assert is_plain(joined)
    answer = decode(said)
    assert answer[:5] == Reply(0, 1, "applied")[:5]
    assert unpack(answer.weights).tolist() == [0.0, -3.0, -2.0]
    known = server.ask(encode(Wait(0, tuple(answer.stamp), 0.0)))
    assert decode(known).weights is None
    assert decode(server.ask(encode(Ping()))) == Ping()


def test_a_client_sends_no_classes_of_ours() -> None:
    config = Config(engine="parameter-server", optimizer="sgd", workers=1, update="sync")
    server = RemoteServer(config, np.zeros(3, dtype=np.float32))
    seen: list[str] = []

    class Encoded(DirectLine):
        def start(self, request: Request) -> Any:
            plain = encode(request)
            assert is_plain(plain)
            seen.append(plain[0])
            reply = server.ask(plain)
            assert is_plain(reply)
            return decode(reply)

    servers, into = Servers(0, 3, [Encoded(server)], Timers()), torch.ones(3)
    servers.look(into)
    servers.join(into)
    servers.push(torch.ones(3), 1.0, None, 1.0, into)
    servers.exchange(into, 0.5)
    servers.join(into)
    servers.ping()
    assert into.tolist() == [-1.0] * 3
    assert set(seen) == {"Pull", "Join", "Wait", "Push", "Exchange", "Ping"}


@pytest.mark.parametrize(("update", "is_lent"), [("async", True), ("sync", False)])
def test_weights_are_lent_only_where_calls_come_one_by_one(update: str, is_lent: bool) -> None:
    """Where others may be answered meanwhile, an answer must not change under way."""
    config = Config(engine="parameter-server", optimizer="sgd", workers=1, update=update)
    server = RemoteServer(config, np.zeros(3, dtype=np.float32))
    server.join(Join(0))
    weights = server.pull(Pull()).weights
    push(server, 0, 0, 1.0, 0.0)
    assert isinstance(weights, np.ndarray)
    assert weights.tolist() == [-1.0 if is_lent else 0.0] * 3


def test_optimisers_of_shards_are_cut_and_joined() -> None:
    whole = {"first": torch.arange(7.0), "steps": torch.tensor(3.0)}
    parts = cut(7, 3)
    states = [cut_state(whole, 7, part) for part in parts]
    assert [len(state["first"]) for state in states] == [3, 2, 2]
    joined = join_states(states, [3, 2, 2])
    assert torch.equal(joined["first"], whole["first"])
    assert float(joined["steps"]) == 3.0


def test_one_that_was_cut_off_is_not_heard_beside_its_successor() -> None:
    """Both have one number, and each the right sequence for its next message."""
    server = make_server(update="async")
    server.join(Join(1))
    push(server, 1, 0, 1.0, 0.0)
    known = server.pull(Pull()).stamp
    late = Push(1, 1, *known, np.full(3, 50.0, dtype=np.float32), learning_rate=1.0)
    server.leave(1, life=1)
    with pytest.raises(GivenUp, match=says("given up")):
        server.join(Join(1, life=0))
    assert server.join(Join(1, life=1)).sequence == 1
    # What was under way when the link went down arrives.
    refused = server.push(late)
    assert (refused.outcome, refused.is_present) == ("", False)
    assert not server.wait(Wait(1, known, 0.0)).is_present
    moved = Exchange(1, 1, known.epoch, np.zeros(3, dtype=np.float32), 0.5)
    assert not server.exchange(moved).is_present
    server.leave(1, life=0)  # what is late does not send the successor away
    gradient = np.full(3, 2.0, dtype=np.float32)
    answer = server.push(late._replace(gradient=gradient, life=1))
    assert answer.outcome == "applied"
    assert answer.weights is not None
    assert answer.weights.tolist() == [-3.0] * 3
    account = server.account()
    assert (account["applied"], account["repeated"]) == (2, 0)


@pytest.mark.parametrize(
    ("fields", "is_brief"),
    [
        ({}, True),
        ({"pull": "with-push"}, False),
        ({"gradient_steps": 2}, False),
        ({"envs": 4}, False),
    ],
)
def test_a_reply_has_no_weights_that_would_be_old_at_the_next_gradient(
    fields: dict[str, Any], is_brief: bool
) -> None:
    server = make_server(**{"update": "async", "train_freq": 2, "envs": 1, **fields})
    for worker in (0, 1):
        server.join(Join(worker))
    old = server.pull(Pull()).stamp
    gradient = np.ones(3, dtype=np.float32)
    first = server.push(Push(0, 0, *old, gradient, 1.0))
    assert (first.stamp, first.weights.tolist()) == (Stamp(0, 1), [-1.0] * 3)  # it is alone so far
    second = server.push(Push(1, 0, *old, gradient, 1.0))
    assert second.outcome == "applied"
    if is_brief:
        assert (second.stamp, second.weights) == (old, None)
    else:
        assert (second.stamp, second.weights.tolist()) == (Stamp(0, 2), [-2.0] * 3)
    assert server.pull(Pull(tuple(old))).weights.tolist() == [-2.0] * 3


def test_a_worker_without_the_weights_of_its_gradient_fetches_them_before_the_next_one() -> None:
    server = make_server(update="async", train_freq=2, envs=1)
    first, second = (Servers(number, 3, [DirectLine(server)], Timers()) for number in (0, 1))
    weights = {client: torch.zeros(3) for client in (first, second)}
    for client, own in weights.items():
        client.join(own)
    for client, own in weights.items():
        client.push(torch.ones(3), 1.0, None, 1.0, own)
    assert (first.is_behind, second.is_behind) == (False, True)
    config = Config(update="async", train_freq=2, envs=1, max_grad_norm=0.0)
    made = FlatWeights(torch.nn.Linear(2, 1))
    updater = RemoteGradients(config, made, second)
    updater.own_clock = Clock()
    updater._fetched_at = 0  # it has collected nothing since
    updater.before_gradient()
    assert made.data.tolist() == [-2.0] * 3
    assert not second.is_behind


def test_long_steps_have_threads_on_the_cores_that_workers_leave(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("qfleet.engines.parameter_server.server.usable_cores", lambda: 16)
    config = tiny_config(engine="parameter-server", workers=8, servers=1)
    assert threads_for(config, THREADED_FROM - 1) == 1
    assert threads_for(config, THREADED_FROM) == 4
    assert threads_for(config.replace(servers=4), THREADED_FROM) == 2
    assert threads_for(config.replace(workers=16), THREADED_FROM) == 1
    assert threads_for(config.replace(workers=16, address="auto"), THREADED_FROM) == 4
