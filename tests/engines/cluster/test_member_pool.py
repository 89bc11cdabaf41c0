"""A crew by hand: calls that report, die, or stay silent. No cluster, no time but what is said."""

from __future__ import annotations

from typing import Any

import pytest

from qfleet.core.errors import MemberLost
from qfleet.engines.cluster.member_pool import PING_S, CallResult, MemberPool


class FakeCluster:
    """References are names; what became of them is written down beforehand."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}

    def ready(self, pending: list[str], wait_s: float) -> list[str]:
        del wait_s
        return [name for name in pending if name in self.values]

    def get(self, reference: str, who: str) -> Any:
        value = self.values[reference]
        if value is MemberLost:
            raise MemberLost(f"{who} died")
        return value


class Hands:
    def __init__(self) -> None:
        self.cluster, self.now_s, self.asked = FakeCluster(), 0.0, 0
        cluster: Any = self.cluster
        self.crew = MemberPool(cluster, "worker", timeout_s=10.0, clock=lambda: self.now_s)

    def call(self, number: int) -> None:
        def ask() -> str:
            self.asked += 1
            return f"ping {self.asked}"

        self.crew.called(number, f"call {number}", ask)


def test_reports_and_deaths_come_by_number() -> None:
    hands = Hands()
    for number in range(3):
        hands.call(number)
    hands.cluster.values |= {"call 0": "report", "call 2": MemberLost}
    assert hands.crew.come(0.0) == [CallResult(0, "report"), CallResult(2, None, "worker 2 died")]
    assert hands.crew.busy == {1}
    assert hands.crew.come(0.0) == []


def test_one_call_at_a_time() -> None:
    hands = Hands()
    hands.call(0)
    with pytest.raises(AssertionError, match="works already"):
        hands.call(0)


def test_who_waits_for_others_and_says_so_is_not_given_up() -> None:
    hands = Hands()
    hands.call(0)
    for _ in range(5):
        hands.now_s += 10.5
        assert hands.crew.come(0.0) == []
        hands.cluster.values[f"ping {hands.asked}"] = True
        assert hands.crew.come(0.0) == []
    assert hands.asked == 5
    hands.cluster.values["call 0"] = "at last"
    assert hands.crew.come(0.0) == [CallResult(0, "at last")]


def test_who_does_not_say_that_it_is_there_is_given_up() -> None:
    hands = Hands()
    hands.call(0)
    hands.now_s = 10.0
    assert hands.crew.come(0.0) == []
    assert hands.asked == 0
    hands.now_s = 10.1
    assert hands.crew.come(0.0) == []
    assert hands.asked == 1
    hands.now_s = 10.1 + PING_S
    assert hands.crew.come(0.0) == []
    hands.now_s += 0.1
    assert hands.crew.come(0.0) == [CallResult(0, None, "worker 0 was not heard of for 10 s")]
    assert hands.crew.busy == frozenset()


def test_one_that_has_yet_to_start_is_given_longer() -> None:
    hands = Hands()
    hands.crew.called(0, "call 0", lambda: "ping", grace_s=100.0)
    for now_s in (50.0, 110.0, 110.1, 110.1 + PING_S):
        hands.now_s = now_s
        assert hands.crew.come(0.0) == []
    hands.now_s += 0.1
    assert [came.report for came in hands.crew.come(0.0)] == [None]
