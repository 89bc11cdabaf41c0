"""ProcessEnvs: the same rows as SyncEnvs, faults that come back, and no worker left behind."""

from __future__ import annotations

import json
import multiprocessing
from typing import Any

import numpy as np
import pytest
from scripted_envs import Faults, scripted

from qfleet.config import Config
from qfleet.envs import make_envs
from qfleet.envs.processes import ProcessEnvs
from qfleet.envs.sync import SyncEnvs
from qfleet.errors import EnvironmentFault

BOTH = np.zeros(2, dtype=np.int64)


def faulty(fault: str, at: int = 1, **changes: Any) -> tuple[ProcessEnvs, Faults]:
    kwargs = json.dumps({"fault": fault, "at": at})
    faults = Faults()
    return ProcessEnvs(scripted(env_kwargs=kwargs, **changes), 2, 0, faults), faults


def assert_no_worker_left() -> None:
    names = [child.name for child in multiprocessing.active_children()]
    assert not [name for name in names if "AsyncVectorEnv" in name]


@pytest.mark.parametrize(
    "config",
    [
        Config(max_episode_steps=11),
        Config(env="FrozenLake-v1"),
        scripted(env_kwargs='{"fault": "crash", "at": 3}'),
        scripted(env_kwargs='{"fault": "nan_obs", "at": 3}'),
        scripted(env_kwargs='{"fault": "nan_reward", "at": 4}', frame_stack=2),
    ],
    ids=["truncated", "discrete", "crash", "nan_obs", "nan_reward"],
)
def test_rows_and_faults_equal_sync(config: Config) -> None:
    here, there = Faults(), Faults()
    sync = SyncEnvs(config, 2, 7, here)
    envs = make_envs(config.replace(vectorize="async"), 2, 7, training=True, on_fault=there)
    assert type(envs) is ProcessEnvs
    try:
        assert (envs.spec, envs.seeds) == (sync.spec, sync.seeds)
        assert np.array_equal(envs.reset(), sync.reset())
        rng, opened = np.random.default_rng(0), 0
        for _ in range(40):
            actions = rng.integers(sync.spec.num_actions, size=2)
            expected, got = sync.step(actions), envs.step(actions)
            for name in ("obs", "reward", "terminated", "truncated", "invalid", "fresh"):
                assert np.array_equal(getattr(got, name), getattr(expected, name)), name
            opened += int(got.fresh.sum())
        assert opened >= 2
        assert sorted(here) == sorted(there)
    finally:
        envs.close()
    assert_no_worker_left()
    envs.close()


def test_fault_above_the_limit_comes_back_as_itself() -> None:
    envs, faults = faulty("reset", max_env_restarts=2)
    with pytest.raises(EnvironmentFault, match=r"cannot reset.*failure 3"):
        envs.reset()
    assert "env_reset" in faults.kinds
    assert_no_worker_left()


def test_hanging_env_meets_its_deadline() -> None:
    envs, _ = faulty("hang", at=2, env_timeout_s=20.0)
    envs.reset()
    envs.step(BOTH)
    envs._timeout_s = 0.2
    with pytest.raises(EnvironmentFault, match=r"env 0, 1 .*did not answer.*env_timeout_s 0.2"):
        envs.step(BOTH)
    assert_no_worker_left()


def test_dead_worker_is_named() -> None:
    envs, _ = faulty("exit", at=2)
    envs.reset()
    envs.step(BOTH)
    with pytest.raises(EnvironmentFault, match=r"process of env 0.* died .*exit code 7"):
        envs.step(BOTH)
    assert_no_worker_left()


def test_close_in_mid_step_leaves_nothing() -> None:
    envs, _ = faulty("hang", at=1)
    envs.reset()
    envs._envs.step_async(BOTH)
    envs._end_workers(grace_s=0.1)
    assert_no_worker_left()
    assert envs.state_dict() is None
