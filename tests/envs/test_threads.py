"""How many threads a pool of Atari games gets."""

from __future__ import annotations

import os

import pytest

from qfleet.config.config import Config
from qfleet.engines.parameter_server.worker import worker_config
from qfleet.envs.threads import pool_threads


def test_a_pool_has_all_cores_and_that_of_a_worker_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    config = Config(env="ALE/Pong-v5", engine="parameter-server", workers=16, envs=8)
    assert pool_threads(config.replace(engine="serial"), 8, training=True) == 8
    assert pool_threads(worker_config(config, 0), 8, training=True) == 1
    assert pool_threads(worker_config(config, 0), 8, training=False) == 8


def test_threads_limit_the_pool_of_serial_but_not_that_of_pipeline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    config = Config(env="ALE/Pong-v5", envs=64, threads=2)
    assert pool_threads(config.replace(engine="serial"), 64, training=True) == 2
    assert pool_threads(config.replace(engine="pipeline"), 64, training=True) == 16
