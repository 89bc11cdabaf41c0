"""A server that many call at once: who waits, who is woken, and what comes after a restart."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch

from qfleet.config.config import Config
from qfleet.config.validation import validate
from qfleet.core.errors import GivenUp
from qfleet.engines.parameter_server.compression import Cast, TopK, decode
from qfleet.engines.parameter_server.layout import cut
from qfleet.engines.parameter_server.server import (
    RemoteServer,
    Server,
    answer_from_plain,
    cut_state,
    join_states,
)
from qfleet.engines.parameter_server.shard import Exchange, Push, Receipt, Stamp, Welcome
from qfleet.engines.parameter_server.wire import from_wire, plain, to_wire
from support.messages import says

NOBODY: Any = None
LONG_S = 600.0


def make_server(**fields: Any) -> Server:
    told = {"engine": "parameter-server", "workers": 2, "optimizer": "sgd", **fields}
    return Server(validate(Config(**told)), np.zeros(3, dtype=np.float32))


def push(server: Server, worker: int, sequence: int, value: float, patience_s: float) -> Any:
    known = server.pull(None).stamp
    message = Push(worker, sequence, known, NOBODY, learning_rate=1.0)
    return server.push(message, to_wire(torch.full((3,), value)), patience_s)


def test_a_barrier_keeps_a_call_until_the_last_one_comes() -> None:
    server = make_server(update="sync")
    for worker in (0, 1):
        server.join(worker)
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
        server.join(worker)
    assert push(server, 0, 0, 1.0, 0.0).waits
    assert server.wait(0, None, 0.0).waits
    server.leave(1)
    free = server.wait(0, None, 0.0)
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
        server.join(worker)
    answer = push(server, 0, 0, 1.0, LONG_S)
    assert (answer.waits, answer.stamp.version) == (False, 1)


def test_who_was_given_up_is_told() -> None:
    server = make_server(update="async")
    server.join(0)
    server.leave(0)
    answer = push(server, 0, 0, 1.0, 0.0)
    assert (answer.is_present, answer.receipt, answer.weights) == (False, None, None)
    assert not server.wait(0, None, 0.0).is_present
    exchange = Exchange(0, 0, 0, NOBODY, 0.5)
    assert not server.exchange(exchange, to_wire(torch.ones(3))).is_present
    assert server.account()["applied"] == 0


def test_a_server_goes_on_from_a_snapshot_and_its_workers_come_again() -> None:
    server = make_server(update="sync")
    for worker in (0, 1):
        server.join(worker)
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
    assert other.pull(None).weights is not None
    assert (account["version"], account["applied"]) == (1, 1)
    assert other.join(0).sequence == 1


def test_repeating_a_message_changes_nothing() -> None:
    """Fault 18 of docs/faults.md: the answer was lost after the push was applied."""
    server = make_server(update="async")
    server.join(0)
    message = Push(0, 0, Stamp(0, 0), NOBODY, learning_rate=1.0)
    gradient = to_wire(torch.ones(3))
    first, again = (server.push(message, gradient, 0.0) for _ in range(2))
    assert first.receipt == again.receipt
    assert again.weights is not None
    assert again.weights.tolist() == [-1.0] * 3
    account = server.account()
    assert (account["received"], account["applied"], account["repeated"]) == (2, 1, 1)


@pytest.mark.parametrize("codec", [Cast(torch.bfloat16), Cast(torch.float16), TopK(0.4), TopK(1.0)])
def test_packed_vectors_cross_the_wire(codec: Any) -> None:
    packed = codec.encode(torch.tensor([1.0, -2.5, 3.0, 0.25, 7.0]))
    crossed = from_wire(to_wire(packed))
    assert type(crossed) is type(packed)
    assert crossed.values.dtype == packed.values.dtype
    assert torch.equal(crossed.values, packed.values)
    assert (crossed.places is None) == (packed.places is None)
    assert crossed.places is None or torch.equal(crossed.places, packed.places)


def test_messages_travel_without_classes_of_ours() -> None:
    """What Ray sees are tuples, numbers and arrays; what comes out is what went in."""

    def is_plain(value: Any) -> bool:
        if type(value) is tuple:
            return all(is_plain(part) for part in value)
        return value is None or type(value) in (bool, int, float, str, np.ndarray)

    config = Config(
        engine="parameter-server", optimizer="sgd", workers=1, weight_compression="bf16"
    )
    server = RemoteServer(config, np.zeros(3, dtype=np.float32))
    joined = server.ask(("join", 0, 0))
    assert answer_from_plain(joined) == Welcome(0, 0)
    gradient = to_wire(TopK(0.4).encode(torch.tensor([1.0, 3.0, 2.0])))
    message = Push(0, 0, Stamp(0, 0), NOBODY, learning_rate=1.0)
    said = server.ask(plain(("push", message, gradient, 0.0, 0)))
    assert is_plain(said)
    assert is_plain(joined)
    answer = answer_from_plain(said)
    assert answer.receipt == Receipt(Stamp(0, 1), "applied")
    assert decode(from_wire(answer.weights)).tolist() == [0.0, -3.0, -2.0]
    known = server.ask(("wait", 0, plain(answer.stamp), 0.0, 0))
    assert answer_from_plain(known).weights is None
    assert answer_from_plain(server.ask(("ping",))) is None


@pytest.mark.parametrize(("update", "is_lent"), [("async", True), ("sync", False)])
def test_weights_are_lent_only_where_calls_come_one_by_one(update: str, is_lent: bool) -> None:
    """Where others may be answered meanwhile, an answer must not change under way."""
    config = Config(engine="parameter-server", optimizer="sgd", workers=1, update=update)
    server = RemoteServer(config, np.zeros(3, dtype=np.float32))
    server.join(0)
    weights = server.pull(None).weights
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
    server.join(1)
    push(server, 1, 0, 1.0, 0.0)
    known = server.pull(None).stamp
    late = Push(1, 1, known, NOBODY, learning_rate=1.0)
    server.leave(1, life=1)
    with pytest.raises(GivenUp, match=says("given up")):
        server.join(1, life=0)
    assert server.join(1, life=1).sequence == 1
    # What was under way when the link went down arrives.
    refused = server.push(late, to_wire(torch.full((3,), 50.0)), 0.0, 0)
    assert (refused.receipt, refused.is_present) == (None, False)
    assert not server.wait(1, known, 0.0, 0).is_present
    moved = Exchange(1, 1, known.epoch, NOBODY, 0.5)
    assert not server.exchange(moved, to_wire(torch.zeros(3)), 0).is_present
    server.leave(1, life=0)  # what is late does not send the successor away
    answer = server.push(late, to_wire(torch.full((3,), 2.0)), 0.0, 1)
    assert answer.receipt.outcome == "applied"
    assert answer.weights.tolist() == [-3.0] * 3
    account = server.account()
    assert (account["applied"], account["repeated"]) == (2, 0)
