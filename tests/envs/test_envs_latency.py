"""Slowed environments: how long they wait on a clock that stands still otherwise, and for what."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from qfleet.config.config import Config
from qfleet.core.types import VectorEnv
from qfleet.engines import registry
from qfleet.engines.registry import build
from qfleet.engines.torch_settings import TorchSettings
from qfleet.envs.factory import make_envs
from qfleet.envs.latency import DelayedEnvs, latency_of
from qfleet.envs.sync import SyncEnvs
from qfleet.telemetry.faults import FaultLog
from support.configs import tiny_config
from support.scripted_envs import Faults

GO = np.zeros(2, dtype=np.int64)


class Time:
    """A clock that only sleeping and ``pass_s`` move."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.slept_s: list[float] = []

    def clock(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.slept_s.append(round(seconds, 9))
        self.now_s += seconds


def delayed(latency_s: float) -> tuple[DelayedEnvs, Time]:
    time = Time()
    envs = DelayedEnvs(SyncEnvs(Config(), 2, 0, Faults()), latency_s, time.clock, time.sleep)
    envs.reset()
    return envs, time


def make(training: bool = True, **changes: Any) -> VectorEnv:
    return make_envs(Config(**changes), 2, 0, training=training, on_fault=Faults())


def test_every_step_takes_so_much_longer_and_a_reset_does_not() -> None:
    envs, time = delayed(0.25)
    assert time.slept_s == []
    for _ in range(3):
        envs.step(GO)
    assert time.slept_s == [0.25, 0.25, 0.25]
    envs.close()


def test_what_passed_since_send_is_not_waited_for_again() -> None:
    envs, time = delayed(0.25)
    envs.send(GO)
    assert time.slept_s == []
    time.now_s += 0.125
    envs.recv()
    assert time.slept_s == [0.125]
    envs.send(GO)
    time.now_s += 7.0
    envs.recv()
    assert time.slept_s == [0.125]
    # A late answer is no credit for the next step.
    envs.step(GO)
    assert time.slept_s == [0.125, 0.25]
    envs.close()


def test_what_is_computed_does_not_change() -> None:
    envs, _ = delayed(0.25)
    plain = SyncEnvs(Config(), 2, 0, Faults())
    assert (envs.spec, envs.num_envs, envs.seeds) == (plain.spec, plain.num_envs, plain.seeds)
    assert np.array_equal(envs.reset(), plain.reset())
    for _ in range(10):
        for ours, theirs in zip(envs.step(GO), plain.step(GO), strict=True):
            assert np.array_equal(ours, theirs)
    envs.close()
    plain.close()


def test_the_state_is_that_of_the_envs_inside() -> None:
    envs, _ = delayed(0.25)
    other, _ = delayed(0.25)
    envs.step(GO)
    state = envs.state_dict()
    assert state is not None
    other.load_state_dict(state)
    for ours, theirs in zip(envs.step(GO), other.step(GO), strict=True):
        assert np.array_equal(ours, theirs)
    envs.close()
    other.close()


def test_a_step_in_flight_does_not_keep_envs_from_closing() -> None:
    envs, time = delayed(1e9)
    envs.send(GO)
    envs.close()
    assert time.slept_s == []


@pytest.mark.parametrize(
    ("training", "latency_s", "slowed"),
    [(True, 0.1, True), (False, 0.1, False), (True, 0.0, False)],
)
def test_only_training_is_slowed(training: bool, latency_s: float, slowed: bool) -> None:
    envs = make(training, step_latency_s=latency_s)
    assert isinstance(envs, DelayedEnvs) == slowed
    assert envs.in_background == slowed
    envs.close()


@pytest.mark.parametrize("env", ["CartPole-v1", "MinAtar/Breakout-v1"])
def test_any_environment_on_the_host_can_be_slowed(env: str) -> None:
    config = Config(env=env, step_latency_s=1e-6)
    envs = make_envs(config, 8, 0, training=True, on_fault=Faults())
    assert isinstance(envs, DelayedEnvs)
    envs.reset()
    assert len(envs.step(np.zeros(8, dtype=np.int64)).reward) == 8
    envs.close()


def test_worker_0_is_the_straggler() -> None:
    config = Config(step_latency_s=0.01, straggler=4.0)
    assert [latency_of(config, worker) for worker in range(3)] == [0.04, 0.01, 0.01]


@pytest.mark.parametrize("engine", ["serial", "pipeline"])
def test_engines_step_slowed_envs(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(DelayedEnvs.__init__, "__defaults__", (lambda: 0.0, waits.append))
    config = tiny_config(
        engine=engine, envs=2, net_arch=(8,), batch_size=8, buffer_size=200, learning_starts=8
    )
    settings = TorchSettings()
    parts = build(config.replace(step_latency_s=0.5), FaultLog())
    try:
        registry.run(parts, lambda: parts.clock.env_steps < 40)
    finally:
        parts.close()
        settings.restore()
    assert set(waits) == {0.5}
    assert len(waits) >= 20
