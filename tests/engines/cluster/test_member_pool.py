"""A member pool without a cluster: calls that report, die or stay silent; losses and lives."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from qfleet.core.errors import ClusterError, MemberLost, MemberSilent
from qfleet.engines.cluster.member_pool import PING_S, Member, MemberPool
from qfleet.engines.cluster.ray_cluster import IF_SLOW, RUN_AGAIN, TIMEOUT_S
from support.messages import says


class FakeCluster:
    """References are names; the outcome of each is written down beforehand."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.stopped: list[Any] = []
        self.address, self.room = "here", 2
        self.folder: Path | None = None

    def ready(self, pending: list[str], wait_s: float) -> list[str]:
        del wait_s
        return [name for name in pending if name in self.values]

    def get(self, reference: str, who: str, wait_s: float | None = None) -> Any:
        del wait_s
        value = self.values[reference]
        if isinstance(value, type):
            raise value(f"{who} died{RUN_AGAIN if value is MemberLost else IF_SLOW}")
        return value

    def stop(self, handle: Any) -> None:
        self.stopped.append(handle.name)
        raise OSError("it is dead already")

    def processors(self) -> int:
        return self.room


class Hands:
    """A pool of two workers whose clock and calls a test moves by hand."""

    def __init__(self, workers: int = 2) -> None:
        self.cluster, self.now_s, self.pings = FakeCluster(), 0.0, 0
        cluster: Any = self.cluster
        self.pool = MemberPool(
            cluster,
            "worker",
            self.spawn,
            [Member(number) for number in range(workers)],
            timeout_s=10.0,
            max_failures=2,
            processors_needed=workers,
            clock=lambda: self.now_s,
        )
        self.members = self.pool.members

    def spawn(self, member: Member) -> Any:
        assert (member.handle is None) == (member.life == 0), "others may use it at any time"

        def ping() -> str:
            self.pings += 1
            return f"ping {self.pings}"

        name = f"{member.number} in life {member.life}"
        return SimpleNamespace(name=name, ping=SimpleNamespace(remote=ping))

    def call(self, number: int, is_ready: bool = True) -> Member:
        self.members[number].is_ready = is_ready
        self.pool.call(self.members[number], f"call {number}")
        return self.members[number]


def test_reports_and_deaths_come_by_member() -> None:
    hands = Hands(3)
    first, second, third = (hands.call(number) for number in range(3))
    hands.cluster.values |= {"call 0": "report", "call 2": MemberLost}
    assert hands.pool.results(0.0) == [
        (first, "report", ""),
        (third, None, "worker 2 died"),
    ]
    assert [member.call for member in (first, second, third)] == [None, "call 1", None]
    assert hands.pool.results(0.0) == []


def test_results_come_in_the_order_of_the_calls() -> None:
    hands = Hands(3)
    for number in (2, 0, 1):
        hands.call(number)
        hands.cluster.values[f"call {number}"] = "report"
    assert [member.number for member, _, _ in hands.pool.results(0.0)] == [2, 0, 1]


def test_one_call_at_a_time() -> None:
    hands = Hands()
    hands.call(0)
    with pytest.raises(AssertionError, match="works already"):
        hands.call(0)


def test_a_call_that_was_dropped_has_no_result() -> None:
    hands = Hands()
    hands.pool.drop_call(hands.call(0))
    hands.cluster.values["call 0"] = "report"
    assert hands.pool.results(0.0) == []


def test_a_member_that_waits_for_others_and_answers_pings_is_not_lost() -> None:
    hands = Hands()
    member = hands.call(0)
    for _ in range(5):
        hands.now_s += 10.5
        assert hands.pool.results(0.0) == []
        hands.cluster.values[f"ping {hands.pings}"] = True
        assert hands.pool.results(0.0) == []
    assert hands.pings == 5
    hands.cluster.values["call 0"] = "at last"
    assert hands.pool.results(0.0) == [(member, "at last", "")]


def test_a_member_that_does_not_answer_a_ping_is_lost() -> None:
    hands = Hands()
    member = hands.call(0)
    hands.now_s = 10.0
    assert hands.pool.results(0.0) == []
    assert hands.pings == 0
    hands.now_s = 10.1
    assert hands.pool.results(0.0) == []
    assert hands.pings == 1
    hands.now_s = 10.1 + PING_S
    assert hands.pool.results(0.0) == []
    hands.now_s += 0.1
    silence = "worker 0 was not heard of for 10 s"
    assert hands.pool.results(0.0) == [(member, None, silence)]
    assert member.call is None


def test_an_unanswered_ping_of_an_earlier_call_does_not_count() -> None:
    hands = Hands()
    hands.call(0)
    hands.now_s = 10.1
    assert hands.pool.results(0.0) == []
    hands.cluster.values["call 0"] = "report"
    assert len(hands.pool.results(0.0)) == 1
    del hands.cluster.values["call 0"]
    hands.call(0)
    hands.now_s += PING_S + 1
    assert hands.pool.results(0.0) == []


def test_a_member_that_has_yet_to_start_has_longer() -> None:
    hands = Hands()
    member = hands.call(0, is_ready=False)
    asked_s = TIMEOUT_S + 10.0
    for now_s in (asked_s / 2, asked_s, asked_s + 0.1, asked_s + 0.1 + PING_S):
        hands.now_s = now_s
        assert hands.pool.results(0.0) == []
    hands.now_s += 0.1
    assert [report for _, report, _ in hands.pool.results(0.0)] == [None]
    hands.cluster.values["call 0"] = "started"
    hands.call(0, is_ready=False)
    assert [report for _, report, _ in hands.pool.results(0.0)] == ["started"]
    assert member.is_ready


def test_a_replacement_has_a_new_life_and_no_call() -> None:
    hands = Hands()
    member = hands.call(0)
    hands.pool.replace(member)
    assert (member.handle.name, member.life) == ("0 in life 1", 1)
    assert (member.is_ready, member.call) == (False, None)
    assert hands.cluster.stopped == ["0 in life 0"]
    hands.cluster.values["call 0"] = "of the life before"
    assert hands.pool.results(0.0) == []
    hands.pool.end(member)
    assert (member.handle, member.life) == (None, 2)


def test_all_are_stopped_and_keep_their_lives() -> None:
    hands = Hands()
    hands.pool.replace(hands.members[1])
    hands.pool.stop()
    assert hands.cluster.stopped == ["1 in life 0", "0 in life 0", "1 in life 1"]
    assert [member.life for member in hands.members.values()] == [0, 1]


def test_too_many_losses_in_a_row_are_an_error() -> None:
    hands = Hands()
    member = hands.members[1]
    for _ in range(2):
        hands.pool.count_failure(member, "it died")
    member.failures = 0
    for _ in range(2):
        hands.pool.count_failure(member, "it died")
    with pytest.raises(ClusterError, match=says("worker 1", "3 times in a row", "it died")):
        hands.pool.count_failure(member, "it died")


def test_a_member_that_waits_for_a_node_has_not_failed() -> None:
    hands = Hands()
    waiting, ready = hands.members.values()
    ready.is_ready = True
    assert not hands.pool.waits_for_room(waiting)  # there is room: it failed
    hands.cluster.room = 1
    assert not hands.pool.has_room()
    assert hands.pool.waits_for_room(waiting)
    assert not hands.pool.waits_for_room(ready)
    ready.is_ready = False
    with pytest.raises(ClusterError, match=says("no worker is left", "1 processors")):
        hands.pool.waits_for_room(waiting)
    hands.cluster.folder = Path("ours")  # extra members of a cluster of our own take no processor
    assert not hands.pool.waits_for_room(waiting)


@pytest.mark.parametrize("kind", [MemberLost, MemberSilent])
def test_a_loss_that_is_made_good_needs_no_advice(kind: type[MemberLost]) -> None:
    hands = Hands()
    hands.cluster.values["frames"] = kind
    with pytest.raises(kind) as caught:
        hands.pool.get(hands.members[0], "frames")
    assert str(caught.value) == "worker 0 died"
