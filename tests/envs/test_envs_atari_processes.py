"""Atari pools in worker processes: the same rows as ``AtariEnvs``, and workers that come back."""

from __future__ import annotations

import os
import signal
import subprocess
import textwrap
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qfleet.config.config import Config
from qfleet.core.errors import CheckpointError, EnvironmentFault, UserError
from qfleet.core.seeding import env_seeds, mix_seeds
from qfleet.core.types import Step, VectorEnv
from qfleet.envs import factory, processes
from qfleet.envs.atari import AtariEnvs
from qfleet.envs.factory import make_envs, steps_in_background
from qfleet.envs.processes import ProcessEnvs
from qfleet.envs.threads import pool_processes
from support.messages import holds, says
from support.processes import is_alive, needs_proc, python
from support.scripted_envs import Faults
from support.waiting import wait_until

pytestmark = needs_proc
SEED = 7


def breakout(**changes: Any) -> Config:
    fields = {"envs": 3, "sticky_actions": 0.25, "max_episode_steps": 60, "episodic_life": True}
    return Config(env="ALE/Breakout-v5").replace(**fields | changes)


@pytest.fixture(autouse=True)
def two_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put 3 envs into 2 processes."""
    monkeypatch.setattr(factory, "PROCESSES_FROM", 3)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)))


@pytest.fixture
def faults() -> Faults:
    return Faults()


@pytest.fixture
def envs(faults: Faults) -> Iterator[ProcessEnvs]:
    """Three games in two processes, 1 and 2; afterwards none of the processes may be alive."""
    made = make_envs(breakout(), 3, SEED, training=True, on_fault=faults)
    assert isinstance(made, ProcessEnvs)
    with closing(made):
        started = pids(made)
        yield made
        started |= pids(made)
    assert len(started) >= 2
    wait_until(lambda: not any(map(is_alive, started)), "the end of the workers")


def in_process(seed: int = SEED) -> AtariEnvs:
    return AtariEnvs(breakout(), "breakout", 3, seed, training=True)


def pids(envs: ProcessEnvs) -> set[int]:
    return {worker.pid for worker in envs._workers if worker.pid is not None}


def go(envs: VectorEnv) -> Step:
    return envs.step(np.ones(envs.num_envs, dtype=np.int64))


def is_same(got: Step, expected: Step, rows: slice = slice(None)) -> bool:
    if (got.life_lost is None) != (expected.life_lost is None):
        return False
    columns = zip(got, expected, strict=True)
    return all(a is None or np.array_equal(a[rows], b[rows]) for a, b in columns)


@pytest.mark.slow
def test_rows_equal_those_of_a_pool_in_this_process(envs: ProcessEnvs) -> None:
    with closing(in_process()) as pool:
        assert (envs.spec, envs.seeds) == (pool.spec, pool.seeds)
        lost = opened = 0
        for num_steps in (5, 130):  # the second time from the same seeds again
            assert np.array_equal(envs.reset(), pool.reset())
            rng = np.random.default_rng(0)
            for _ in range(num_steps):
                actions = rng.integers(pool.spec.num_actions, size=3)
                got = envs.step(actions)
                assert is_same(got, pool.step(actions))
                assert got.life_lost is not None
                lost += int(got.life_lost.sum())
                opened += int((got.fresh & got.invalid).sum())
        assert opened >= 3
        assert lost >= 3
        # Other seeds would have been noticed.
        envs.reset()
        pool.seeds = env_seeds(SEED + 1, 3)
        pool.reset()
        assert not all(is_same(go(envs), go(pool)) for _ in range(10))


def test_a_step_outlives_the_next_one(envs: ProcessEnvs) -> None:
    envs.reset()
    held = go(envs)
    copied = Step(*(np.array(column) for column in held))
    assert not np.array_equal(go(envs).obs, copied.obs)
    assert is_same(held, copied)


def test_lives_are_reported_only_if_asked() -> None:
    config = breakout(episodic_life=False)
    made = make_envs(config, 3, SEED, training=True, on_fault=Faults())
    with closing(made) as envs:
        assert type(envs) is ProcessEnvs
        envs.reset()
        assert go(envs).life_lost is None


def test_a_killed_worker_comes_back(envs: ProcessEnvs, faults: Faults) -> None:
    with closing(in_process()) as pool:
        first = np.array(envs.reset())
        pool.reset()
        assert is_same(go(envs), go(pool))
        pid = envs._workers[1].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not is_alive(pid), "the end of the worker")
        step = go(envs)
        assert is_same(step, go(pool), slice(0, 1))
        assert step.invalid.tolist() == step.fresh.tolist() == [False, True, True]
        assert not step.obs[1:, :3].any()
        assert not step.reward[1:].any()
        assert step.life_lost is not None
        for ends in (step.terminated, step.truncated, step.life_lost):
            assert not ends[1:].any()
        text = "the process of envs 1-2 of 'ALE/Breakout-v5' died (exit code -9), restarted"
        assert faults == [("env_process", text)]
        # New episodes, and not the first ones again.
        seeds = [mix_seeds(mix_seeds(seed, 0), 1) for seed in envs.seeds[1:]]
        with closing(AtariEnvs(breakout(), "breakout", 2, 0, training=True)) as restarted:
            restarted.seeds = seeds
            assert np.array_equal(step.obs[1:], restarted.reset())
            for _ in range(5):
                step = go(envs)
                assert is_same(step, go(pool), slice(0, 1))
                assert np.array_equal(step.obs[1:], go(restarted).obs)
                assert not step.invalid.any()
        assert np.array_equal(envs.reset(), first)
        assert len(faults) == 1


def test_there_is_no_state(envs: ProcessEnvs) -> None:
    assert envs.state_dict() is None
    envs.reset()
    assert envs.state_dict() is None
    with pytest.raises(CheckpointError, match=says("ALE/Breakout-v5", "cannot be resumed")):
        envs.load_state_dict({str(i): {} for i in range(3)})


def test_close_does_not_wait_for_the_games(envs: ProcessEnvs, faults: Faults) -> None:
    envs.close()
    assert pids(envs) == set()
    assert faults == []


def test_games_that_take_too_long_to_create(monkeypatch: pytest.MonkeyPatch) -> None:
    """The timeout grows with the number of games of a worker: here 2 and 1."""
    monkeypatch.setattr(processes, "_BOOT_S", 0.0)
    monkeypatch.setattr(processes, "_BOOT_GAME_S", 0.01)
    faults = Faults()
    made = make_envs(breakout(max_env_restarts=1), 3, SEED, training=True, on_fault=faults)
    with closing(made) as envs, pytest.raises(EnvironmentFault, match=says("max_env_restarts 1")):
        envs.reset()
    assert set(faults.kinds) == {"env_timeout"}
    assert any(holds(text, "did not start", "0.02 s") for _, text in faults)


def test_an_error_of_the_thread_that_starts_workers_is_that_of_the_first_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError("no memory for a process")

    monkeypatch.setattr(processes, "_Worker", fail)
    made = make_envs(breakout(), 3, SEED, training=True, on_fault=Faults())
    with closing(made) as envs, pytest.raises(MemoryError, match="no memory for a process"):
        envs.reset()


def test_closing_before_the_workers_have_started_leaves_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    release, spawned, spawn = threading.Event(), [], processes._Worker.spawn

    def wait_and_spawn(worker: Any) -> None:
        assert release.wait(60)
        spawn(worker)
        spawned.append(worker.pid)

    monkeypatch.setattr(processes._Worker, "spawn", wait_and_spawn)
    made = make_envs(breakout(), 3, SEED, training=True, on_fault=Faults())
    made.close()
    release.set()
    wait_until(lambda: len(spawned) == 2, "both workers")
    wait_until(lambda: not any(map(is_alive, spawned)), "their end")


@pytest.mark.slow
def test_games_of_an_evaluation_may_be_apart() -> None:
    """In one process, without lost lives; a second reset opens the same episodes."""
    config = breakout(envs=1)
    apart = make_envs(config, 3, SEED, training=False, on_fault=Faults(), apart=True)
    here = make_envs(config, 3, SEED, training=False, on_fault=Faults())
    with closing(apart), closing(here):
        assert isinstance(apart, ProcessEnvs)
        assert type(here) is AtariEnvs
        for _ in range(2):
            assert np.array_equal(apart.reset(), here.reset())
            for _ in range(70):
                ours, theirs = go(apart), go(here)
                assert is_same(ours, theirs)
                assert ours.life_lost is theirs.life_lost is None
        assert len(pids(apart)) == 1


@pytest.mark.parametrize(
    ("num_envs", "training", "changes"),
    [
        (3, False, {}),
        (3, True, {"envs": 2}),
        (3, True, {"vectorize": "native"}),
        (1, True, {}),
    ],
    ids=["evaluation", "few envs", "not auto", "a single env"],
)
def test_other_games_stay_in_this_process(
    num_envs: int, training: bool, changes: dict[str, Any]
) -> None:
    made = make_envs(breakout(**changes), num_envs, SEED, training=training, on_fault=Faults())
    made.close()
    assert type(made) is AtariEnvs


def test_groups_count_together() -> None:
    assert steps_in_background(breakout(envs=4, env_groups=2))
    made = make_envs(breakout(envs=4, env_groups=2), 2, 0, training=True, on_fault=Faults())
    made.close()
    assert type(made) is ProcessEnvs


@pytest.mark.parametrize("kwargs", ['{"img_height": "high"}', '{"img_hight": 84}'])
def test_wrong_env_kwargs_are_refused_in_the_same_words(kwargs: str) -> None:
    messages = []
    for num_envs in (1, 3):
        with pytest.raises(UserError, match="img_h") as caught:
            make_envs(breakout(env_kwargs=kwargs), num_envs, 0, training=True, on_fault=Faults())
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


@pytest.mark.parametrize(
    ("cores", "groups", "num_envs", "expected"),
    [(16, 4, 32, 2), (16, 1, 128, 8), (16, 0, 3, 3), (2, 1, 32, 1), (2, 4, 8, 1)],
)
def test_number_of_processes(
    monkeypatch: pytest.MonkeyPatch, cores: int, groups: int, num_envs: int, expected: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    assert pool_processes(Config(envs=num_envs, env_groups=groups), num_envs) == expected


def test_a_program_of_one_thread_starts_no_processes() -> None:
    config = breakout(threads=1, engine="serial")
    with closing(make_envs(config, 3, SEED, training=True, on_fault=Faults())) as envs:
        assert isinstance(envs, AtariEnvs)


@pytest.mark.slow
def test_a_script_needs_no_main_guard(tmp_path: Path) -> None:
    """The user does not choose these processes, so they must not run the user's script again."""
    script = """
        import numpy as np
        from qfleet.config.config import Config
        from qfleet.envs import factory
        print("script", flush=True)
        factory.PROCESSES_FROM = 2
        config = Config(env="ALE/Breakout-v5", envs=2)
        envs = factory.make_envs(config, 2, 0, training=True, on_fault=print)
        envs.reset()
        print(type(envs).__name__, envs.step(np.zeros(2, dtype=np.int64)).fresh.any())
        envs.close()
    """
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(script))
    ran = subprocess.run(python(str(path)), check=True, capture_output=True, text=True)
    assert ran.stdout.split() == ["script", "ProcessEnvs", "False"]
