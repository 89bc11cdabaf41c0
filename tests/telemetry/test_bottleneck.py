from __future__ import annotations

from typing import Any

import pytest

from qfleet.core.errors import ConfigError
from qfleet.telemetry.bottleneck import (
    OVERHEAD_BELOW,
    Diagnosis,
    StageRates,
    diagnose,
    rates_table,
)
from support.messages import holds, says


def judged(
    env: float | None,
    inference: float | None,
    learner: float | None,
    end_to_end: float,
    **changes: Any,
) -> Diagnosis:
    machine: dict[str, Any] = {
        "cores": 16,
        "envs": 64,
        "device_type": "cuda",
        "updates_per_env_step": 0.25,
        "batch_size": 32,
    }
    return diagnose(StageRates(env, inference, learner, end_to_end), **(machine | changes))


def test_slow_environments() -> None:
    diagnosis = judged(25_600, 90_000, 60_000, 24_900)
    assert diagnosis.bottleneck == "env"
    assert diagnosis.share_of_slowest == pytest.approx(24_900 / 25_600)
    assert holds(diagnosis.sentence, "environments", "24.9k", "25.6k", "97 %", "16", "cores")


def test_fewer_envs_than_cores_leave_cores_unused() -> None:
    diagnosis = judged(25_600, 90_000, 60_000, 24_900, envs=8, device_type="cpu")
    assert holds(diagnosis.sentence, "--envs 16", "cores")


def test_slow_inference() -> None:
    diagnosis = judged(90_000, 25_600, None, 25_000)
    assert diagnosis.bottleneck == "inference"
    assert holds(diagnosis.sentence, "Inference", "25k", "25.6k", "98 %", "envs", "64", "CPU")
    on_cpu = judged(90_000, 25_600, None, 25_000, device_type="cpu")
    assert holds(on_cpu.sentence, "Inference", "GPU")
    assert not holds(on_cpu.sentence, "CPU")


def test_slow_learner() -> None:
    diagnosis = judged(90_000, 80_000, 12_000, 11_900)
    assert diagnosis.bottleneck == "learner"
    rates = ("learner", "11.9k", "12k", "99 %")
    assert holds(diagnosis.sentence, *rates, "--batch-size 256", "8", "--train-freq", "bf16")
    on_cpu = judged(90_000, 80_000, 12_000, 11_900, device_type="cpu")
    assert holds(on_cpu.sentence, *rates, "--batch-size 256", "--train-freq", "GPU")
    assert not holds(on_cpu.sentence, "bf16")


def test_below_seventy_percent_it_is_the_waiting() -> None:
    diagnosis = judged(20_000, 30_000, 12_000, 5_000)
    assert diagnosis.bottleneck == "overhead"
    assert diagnosis.share_of_slowest == pytest.approx(5 / 12)
    assert holds(diagnosis.sentence, "5k", "42 %", "12k", "learner", "64", "--replay-slack")


def test_where_overhead_begins() -> None:
    limit = OVERHEAD_BELOW * 10_000
    assert judged(10_000, None, None, limit).bottleneck == "env"
    assert judged(10_000, None, None, limit - 1).bottleneck == "overhead"


def test_stages_that_share_a_cpu_take_turns() -> None:
    # 1/20k + 1/30k + 1/12k = 1/6k: together on the same cores they cannot do more than that.
    shared = judged(20_000, 30_000, 12_000, 5_000, device_type="cpu", cores=2)
    assert shared.bottleneck == "overhead"
    assert holds(shared.sentence, "2", "cores", "6k", "GPU")
    one = judged(20_000, 30_000, 12_000, 5_000, device_type="cpu", cores=1)
    assert holds(one.sentence, "1", "core")
    # Slower than turns: sharing alone does not explain it.
    waiting = judged(20_000, 30_000, 12_000, 3_000, device_type="cpu", cores=2)
    assert "--replay-slack" in waiting.sentence


def test_a_stage_that_does_not_apply_is_never_the_bottleneck() -> None:
    assert judged(None, None, 12_000, 11_000).bottleneck == "learner"
    assert judged(50_000, None, None, 49_000).bottleneck == "env"


def test_measurements_may_beat_the_slowest_stage() -> None:
    diagnosis = judged(10_000, 90_000, 90_000, 10_400)
    assert diagnosis.share_of_slowest == pytest.approx(1.04)
    assert "(104 %)" in diagnosis.sentence


def test_rates_that_mean_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match=says("stage")):
        judged(None, None, None, 100.0)
    for bad in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match=says(str(bad), "inference")):
            judged(10.0, bad, None, 5.0)
    for bad in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match=says("end-to-end", str(bad))):
            judged(10.0, None, None, bad)


def test_table() -> None:
    rates = StageRates(25_600.4, 90_000, None, 24_900)
    diagnosis = Diagnosis("env", 24_900 / 25_600.4, "The environments are the bottleneck.")
    assert rates_table(rates, diagnosis).splitlines() == [
        "env-only              25,600 steps/s",
        "inference-only        90,000 steps/s",
        "learner-only                       –",
        "end-to-end            24,900 steps/s   97 % of the slowest stage",
        "The environments are the bottleneck.",
    ]


def test_no_overlap_is_advised_for_stages_that_share_a_device() -> None:
    slow_learner = judged(900_000, None, 100_000, 81_000, share_a_device=True)
    assert slow_learner.bottleneck == "learner"
    assert slow_learner.share_of_slowest == pytest.approx(0.81)
    rates = ("Learning", "90 %", "81k", "90k")
    assert holds(slow_learner.sentence, *rates, "--batch-size 256", "8", "--train-freq")
    slow_envs = judged(100_000, None, 900_000, 45_000, share_a_device=True)
    assert slow_envs.bottleneck == "env"
    assert holds(slow_envs.sentence, "environments", "90 %", "envs", "64")
