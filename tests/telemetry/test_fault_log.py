from __future__ import annotations

import json
import threading

import pytest

from qfleet.core.errors import FaultRateError
from qfleet.telemetry.faults import KEPT_MESSAGES, FaultLog


def test_counts_per_kind_and_keeps_the_first_messages() -> None:
    log = FaultLog()
    for i in range(20):
        log("env_reward", f"step {i}")
    log("gradient", "NaN")
    assert log.counts == {"env_reward": 20, "gradient": 1}
    assert log.first_messages("env_reward") == [f"step {i}" for i in range(KEPT_MESSAGES)]
    assert log.first_messages("unseen") == []


def test_notices_are_at_most_one_per_kind_in_ten_seconds(clock) -> None:
    said: list[str] = []
    log = FaultLog(said.append, clock)
    log("env_reward", "first")
    for i in range(36):
        clock.now_s += 0.1
        log("env_reward", f"env 3 step {i}")
    log("gradient", "NaN norm")
    assert said == ["env_reward ×1: first", "gradient ×1: NaN norm"]
    clock.now_s = 110.0
    log("env_reward", "env 3 step 120: NaN reward")
    assert said[2:] == ["env_reward ×37: env 3 step 120: NaN reward"]


def test_flush_sends_what_was_held_back_once(clock) -> None:
    said: list[str] = []
    log = FaultLog(said.append, clock)
    log("a", "one")
    log("a", "two")
    log.flush()
    log.flush()
    assert said == ["a ×1: one", "a ×1: two"]


def test_check_rate_stops_above_the_rate_and_names_the_mend() -> None:
    log = FaultLog()
    for i in range(11):
        log("env_reward", f"env 3 step {i}: NaN reward")
    log.check_rate("env_reward", 1100, 0.01)  # exactly the rate is tolerated
    log.check_rate("other", 0, 0.0)
    with pytest.raises(FaultRateError) as caught:
        log.check_rate("env_reward", 1099, 0.01)
    text = str(caught.value)
    assert "env_reward: 11 faults in 1099" in text
    assert "env 3 step 0: NaN reward" in text
    assert "--max-fault-rate" in text
    assert "\n" not in text


def test_check_rate_waits_for_ten_faults() -> None:
    log = FaultLog()
    for _ in range(9):
        log("gradient", "NaN")
    log.check_rate("gradient", 9, 0.0)
    log("gradient", "NaN")
    with pytest.raises(FaultRateError):
        log.check_rate("gradient", 10, 0.0)


def test_state_survives_as_json() -> None:
    log = FaultLog()
    log("a", "one")
    log("a", "two")
    copy = FaultLog()
    copy.load_state_dict(json.loads(json.dumps(log.state_dict())))
    copy("a", "three")
    assert copy.counts == {"a": 3}
    assert copy.first_messages("a") == ["one", "two", "three"]
    assert log.counts == {"a": 2}


def test_threads_lose_no_fault() -> None:
    log = FaultLog()
    threads = [
        threading.Thread(target=lambda: [log("env", "x") for _ in range(500)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert log.counts == {"env": 2000}
