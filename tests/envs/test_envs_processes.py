"""ProcessEnvs: the same rows as SyncEnvs, workers that come back, and no process left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver

import numpy as np
import pytest
import torch

from qfleet.config.config import Config
from qfleet.core.errors import CheckpointError, EnvironmentFault
from qfleet.core.seeding import env_seeds, mix_seeds
from qfleet.core.types import Step, VectorEnv
from qfleet.envs import processes
from qfleet.envs.factory import make_envs
from qfleet.envs.processes import ProcessEnvs
from qfleet.envs.registry import make_single
from qfleet.envs.sync import SyncEnvs
from qfleet.envs.worker import pack, unpack
from support.messages import holds, says
from support.processes import is_alive, needs_proc, python, start
from support.scripted_envs import Faults, faulty, scripted
from support.waiting import deadline, finish, wait_until

pytestmark = needs_proc
COLUMNS = ("obs", "reward", "terminated", "truncated", "invalid", "fresh")


def pids(envs: ProcessEnvs) -> list[int]:
    found = [worker.pid for worker in envs._workers]
    return [pid for pid in found if pid is not None]


def strike(pid: int, number: signal.Signals) -> None:
    os.kill(pid, number)
    wait_until(lambda: not is_alive(pid), f"the end of {pid}")


def go(envs: VectorEnv) -> Step:
    return envs.step(np.zeros(envs.num_envs, dtype=np.int64))


def assert_same(got: Step, expected: Step, envs: slice = slice(None)) -> None:
    for name in COLUMNS:
        ours, theirs = getattr(got, name)[envs], getattr(expected, name)[envs]
        assert np.array_equal(ours, theirs), name


@contextmanager
def pool(
    config: Config, num_envs: int, seed: int = 0, *, cores: int = 2
) -> Iterator[tuple[ProcessEnvs, Faults]]:
    """ProcessEnvs as a machine with ``cores`` makes them; afterwards none of them may be alive."""
    faults = Faults()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
        envs = ProcessEnvs(config, num_envs, seed, faults)
    started = pids(envs)
    try:
        assert len(started) == min(num_envs, cores)
        yield envs, faults
        started += pids(envs)
    finally:
        envs.close()
    wait_until(lambda: not any(map(is_alive, started)), "the end of the workers")
    envs.close()


# --- rows ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_envs", "cores"), [(2, 2), (5, 2)], ids=["one each", "shares"])
@pytest.mark.parametrize(
    "config",
    [
        Config(max_episode_steps=11),
        Config(env="FrozenLake-v1"),
        faulty("crash", at=3),
        faulty("nan_obs", at=3),
        faulty("nan_reward", at=4, frame_stack=2),
    ],
    ids=["truncated", "discrete", "crash", "nan_obs", "nan_reward"],
)
def test_rows_and_faults_equal_sync(config: Config, num_envs: int, cores: int) -> None:
    here = Faults()
    sync = SyncEnvs(config, num_envs, 7, here)
    with pool(config, num_envs, 7, cores=cores) as (envs, there):
        assert (envs.spec, envs.seeds) == (sync.spec, sync.seeds)
        rng, opened = np.random.default_rng(0), 0
        for _ in range(2):  # the second time from the same seeds again
            assert np.array_equal(envs.reset(), sync.reset())
            for _ in range(40):
                actions = rng.integers(sync.spec.num_actions, size=num_envs)
                got = envs.step(actions)
                assert_same(got, sync.step(actions))
                opened += int(got.fresh.sum())
        assert opened >= 2
        assert sorted(here) == sorted(there)


def test_the_configuration_leads_here() -> None:
    config = scripted(vectorize="async")
    envs = make_envs(config, 2, 0, training=True, on_fault=Faults())
    envs.close()
    assert type(envs) is ProcessEnvs


def test_a_step_outlives_the_next_one() -> None:
    with pool(scripted(), 3) as (envs, _):
        envs.reset()
        for _ in range(6):
            held = go(envs)
            copied = Step(*(np.array(column) for column in held[:6]))
            go(envs)
            assert_same(held, copied)


ALL_KINDS = {
    "sync": (Config(vectorize="sync", max_episode_steps=9), 3),
    "async": (Config(vectorize="async", max_episode_steps=9), 3),
    "native": (Config(vectorize="native", max_episode_steps=9), 3),
    "atari": (Config(env="ALE/Breakout-v5", episodic_life=True, max_episode_steps=9), 2),
}


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_send_and_recv_are_step_in_two_halves(kind: str) -> None:
    config, num_envs = ALL_KINDS[kind]
    whole, halves = (
        make_envs(config, num_envs, 3, training=True, on_fault=Faults()) for _ in range(2)
    )
    try:
        assert np.array_equal(whole.reset(), halves.reset())
        rng, opened, kept = np.random.default_rng(1), 0, []
        for _ in range(30):
            actions = rng.integers(whole.spec.num_actions, size=num_envs)
            expected = whole.step(actions)
            halves.send(actions)
            actions[:] = 0  # whoever sends may use the array again
            got = halves.recv()
            assert_same(got, expected)
            assert np.array_equal(np.array(got.life_lost), np.array(expected.life_lost))
            opened += int(got.fresh.sum())
            kept.append((got, Step(*(column.copy() for column in got[:6]))))
        assert opened >= 2
        if kind == "atari":  # its pool overwrites nothing, ever
            for step, copied in kept:
                assert_same(step, copied)
        whole.reset()
        with pytest.raises(AssertionError, match="without a send"):
            whole.recv()
        whole.send(actions)
        with pytest.raises(AssertionError, match="before the recv"):
            whole.send(actions)
    finally:
        whole.close()
        halves.close()


# --- faults -------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_killed_worker_comes_back(number: signal.Signals) -> None:
    config = Config(max_episode_steps=30)
    sync = SyncEnvs(config, 4, 5, Faults())
    with pool(config, 4, 5) as (envs, faults):
        first = np.array(envs.reset())
        sync.reset()
        for _ in range(3):
            assert_same(go(envs), go(sync))
        strike(pids(envs)[1], number)
        step = go(envs)
        assert_same(step, go(sync), slice(0, 2))
        assert step.invalid.tolist() == step.fresh.tolist() == [False, False, True, True]
        assert step.reward.tolist() == [1, 1, 0, 0]
        assert not step.terminated.any()
        assert not step.truncated.any()
        assert faults == [
            (
                "env_process",
                f"the process of envs 2-3 of 'CartPole-v1' died (exit code {-number}), restarted",
            )
        ]
        # New episodes, and not the first ones again.
        plain = make_single(config)
        seed = mix_seeds(mix_seeds(envs.seeds[2], 0), 1)
        assert np.array_equal(step.obs[2], plain.reset(seed=seed)[0])
        assert not np.array_equal(step.obs[2:], first[2:])
        for _ in range(5):
            step = go(envs)
            assert_same(step, go(sync), slice(0, 2))
            assert np.array_equal(step.obs[2], plain.step(0)[0])
            assert not step.invalid.any()
        assert np.array_equal(envs.reset(), first)
        assert len(faults) == 1


def test_all_workers_may_be_lost_at_once() -> None:
    with pool(scripted(), 3) as (envs, faults):
        envs.reset()
        go(envs)
        lost = pids(envs)
        for pid in lost:
            strike(pid, signal.SIGKILL)
        step = go(envs)
        assert step.fresh.all()
        assert step.obs.tolist() == [[1, 0]] * 3
        assert faults.kinds == ["env_process"] * 2
        assert go(envs).obs.tolist() == [[1, 1]] * 3
        assert not set(lost) & set(pids(envs))


@pytest.mark.parametrize(("fault", "code"), [("exit", 7), ("segv", -11)])
def test_an_env_that_takes_its_process_along(fault: str, code: int) -> None:
    config = faulty(fault, at=2, only_seed=env_seeds(0, 4)[3])
    with pool(config, 4) as (envs, faults):
        envs.reset()
        go(envs)
        step = go(envs)
        assert step.fresh.tolist() == [False, False, True, True]
        text = f"the process of envs 2-3 of '{config.env}' died (exit code {code}), restarted"
        assert faults == [("env_process", text)]
        for count in (1, 2, 3):
            assert go(envs).obs[2:].tolist() == [[1, count]] * 2


def test_a_hanging_env_is_killed_and_replaced() -> None:
    limit_s = round(deadline(3.0), 1)  # also for the start of a worker's episodes
    config = faulty("hang", at=2, only_seed=env_seeds(0, 3)[0], env_timeout_s=limit_s)
    with pool(config, 3, cores=3) as (envs, faults):
        envs.reset()
        go(envs)
        hanging = pids(envs)[0]
        step = go(envs)
        assert step.invalid[0]
        assert step.fresh[0]
        assert step.obs[0].tolist() == [1, 0]
        (text,) = (text for kind, text in faults if kind == "env_timeout")
        assert holds(text, "env 0", config.env, f"env_timeout_s {limit_s:g}")
        assert not is_alive(hanging)
        assert go(envs).obs[0].tolist() == [1, 1]


def test_deaths_in_a_row_have_a_limit() -> None:
    with pool(faulty("exit", max_env_restarts=2), 2) as (envs, faults):
        envs.reset()
        for _ in range(2):
            assert go(envs).fresh.all()
        with pytest.raises(EnvironmentFault) as caught:
            go(envs)
        process = ["env 0", "support.scripted_envs:ScriptedEnv", "7"]
        mend = ["3", "max_env_restarts 2", "--vectorize sync"]
        assert holds(str(caught.value), *process, *mend)
        assert faults.kinds == ["env_process"] * 5
        assert pids(envs) == []


def test_completed_steps_clear_the_count() -> None:
    with pool(faulty("exit", at=2, max_env_restarts=1), 1) as (envs, faults):
        envs.reset()
        for _ in range(4):
            assert not go(envs).fresh.any()
            assert go(envs).fresh.all()
        assert faults.kinds == ["env_process"] * 4


def test_a_reset_that_hangs_is_a_failure_too() -> None:
    config = faulty("hang_reset", max_env_restarts=1, env_timeout_s=0.2)
    with (
        pool(config, 1) as (envs, faults),
        pytest.raises(EnvironmentFault, match=says("env 0", "env_timeout_s", "0.2", "2")),
    ):
        envs.reset()
    assert faults.kinds == ["env_timeout"] * 2


def test_a_fault_above_the_guards_limit_comes_back_as_itself() -> None:
    with pool(faulty("reset", max_env_restarts=2), 2) as (envs, faults):
        with pytest.raises(EnvironmentFault, match=says("cannot reset", "3")):
            envs.reset()
        assert set(faults.kinds) == {"env_reset"}
        assert pids(envs) == []


def test_a_changed_observation_ends_the_pool() -> None:
    with pool(faulty("shape", at=2), 2) as (envs, _):
        envs.reset()
        go(envs)
        with pytest.raises(EnvironmentFault, match=says("(2,)", "(5,)", "float32")):
            go(envs)
        assert pids(envs) == []


# --- the end ------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["", "hang"])
def test_close_with_a_step_in_flight(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "CLOSE_S", 0.5)
    with pool(faulty(fault), 2) as (envs, _):
        envs.reset()
        envs.send(np.zeros(2, dtype=np.int64))


def test_what_an_env_has_started_ends_with_it() -> None:
    with pool(faulty("child"), 2) as (envs, _):
        envs.reset()
        children = [int(pid) for pid in go(envs).obs[:, 1]]
        assert all(map(is_alive, children))
    wait_until(lambda: not any(map(is_alive, children)), "the end of the children")


@pytest.mark.slow
def test_workers_end_when_their_parent_is_killed() -> None:
    """One of them waits for a command, the other hangs in its env and cannot see the pipe."""
    script = """
        import sys
        import numpy as np
        from support.scripted_envs import Faults, scripted
        from qfleet.envs.processes import ProcessEnvs
        if __name__ == "__main__":
            config = scripted(env_kwargs=sys.argv[1])
            envs = ProcessEnvs(config, 2, 0, Faults())
            envs.reset()
            envs.send(np.zeros(2, dtype=np.int64))
            print([worker.pid for worker in envs._workers], flush=True)
            sys.stdin.read()
    """
    kwargs = json.dumps({"fault": "hang", "at": 1, "only_seed": env_seeds(0, 2)[0]})
    parent = start(python("-c", textwrap.dedent(script), kwargs), stdin=subprocess.PIPE)
    try:
        assert parent.stdout is not None
        workers = json.loads(parent.stdout.readline())
        assert all(map(is_alive, workers))
    finally:
        parent.kill()
        parent.communicate()
    wait_until(lambda: not any(map(is_alive, workers)), "the end of the workers")


@pytest.mark.usefixtures("default_signals")
def test_workers_ignore_an_interrupt() -> None:
    with pool(scripted(), 2) as (envs, faults):
        envs.reset()
        for pid in pids(envs):
            os.kill(pid, signal.SIGINT)
        assert not go(envs).fresh.any()
        assert faults == []


# --- state --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [Config(frame_stack=2, max_episode_steps=13), Config(env="support.scripted_envs:MemoryEnv")],
    ids=["stack", "own"],
)
@pytest.mark.parametrize("others", [SyncEnvs, ProcessEnvs])
def test_state_goes_on_identically(config: Config, others: type[SyncEnvs | ProcessEnvs]) -> None:
    """Also in envs of the other class, and there and back."""
    other = others(config, 3, 2, Faults())
    try:
        with pool(config, 3, 1) as (envs, _):
            envs.reset()
            for _ in range(20):
                go(envs)
            state = envs.state_dict()
            assert state is not None
            trace = [[np.array(column) for column in go(envs)[:6]] for _ in range(30)]
            other.load_state_dict(state)
            returned = other.state_dict()
            assert returned is not None
            for expected in trace:
                assert all(map(np.array_equal, go(other)[:6], expected))
            envs.load_state_dict(returned)
            for expected in trace:
                assert all(map(np.array_equal, go(envs)[:6], expected))
    finally:
        other.close()


def test_state_remembers_restarts() -> None:
    """After a resume, the next lost process must not play the episodes of an earlier one."""
    config = Config(env="support.scripted_envs:MemoryEnv")
    with pool(config, 2) as (envs, _), pool(config, 2) as (copy, _):
        envs.reset()
        strike(pids(envs)[0], signal.SIGKILL)
        go(envs)
        state = envs.state_dict()
        assert state is not None
        copy.load_state_dict(state)
        for pool_ in (envs, copy):
            strike(pids(pool_)[0], signal.SIGKILL)
        assert_same(go(copy), go(envs))


def test_no_state_from_envs_without_or_with_a_lost_worker() -> None:
    with pool(scripted(), 2) as (envs, _):
        assert envs.state_dict() is None
        envs.reset()
        assert envs.state_dict() is None
    with pool(Config(), 2) as (envs, faults):
        envs.reset()
        strike(pids(envs)[1], signal.SIGKILL)
        assert envs.state_dict() is None
        assert go(envs).fresh.tolist() == [False, True]
        assert faults.kinds == ["env_process"]
        assert envs.state_dict() is not None


@pytest.mark.slow
def test_a_stopped_worker_blocks_no_load() -> None:
    """A state larger than a pipe takes would block whoever writes it for ever."""
    limit_s = round(deadline(3.0), 1)  # also for the calls that must succeed
    with pool(Config(env_timeout_s=limit_s), 1) as (envs, faults):
        envs.reset()
        state = envs.state_dict()
        assert state is not None
        state["0"]["ballast"] = "x" * 10_000_000
        os.kill(pids(envs)[0], signal.SIGSTOP)
        with pytest.raises(CheckpointError, match=says("env_timeout_s", f"{limit_s:g}", "state")):
            envs.load_state_dict(state)
        envs.reset()
        assert "env_timeout" in faults.kinds


def test_a_state_that_does_not_fit_is_refused() -> None:
    with pool(Config(), 2) as (envs, _):
        envs.reset()
        state = envs.state_dict()
        assert state is not None
        with pytest.raises(CheckpointError, match="--envs 1"):
            envs.load_state_dict({"0": state["0"]})
        del state["1"]["env"]["layers"]["0"]
        with pytest.raises(CheckpointError):
            envs.load_state_dict(state)


def test_messages_bring_back_what_was_sent() -> None:
    tensors = [
        torch.tensor(3.5, dtype=torch.float64),
        torch.zeros((0, 3)),
        torch.arange(6, dtype=torch.uint8).reshape(2, 3),
        torch.tensor([True, False]),
    ]
    message = {"state": [{"a": tensor} for tensor in tensors], "big": 2**127 + 1, "none": None}
    got = unpack(pack(message))
    assert (got["big"], got["none"]) == (2**127 + 1, None)
    for entry, tensor in zip(got["state"], tensors, strict=True):
        assert entry["a"].dtype == tensor.dtype
        assert torch.equal(entry["a"], tensor)
    with pytest.raises(CheckpointError, match=says("key", "3")):
        pack({"state": [{3: "x"}]})


# --- exits and closing --------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["sys.exit", "interrupt"])
def test_an_env_that_exits_or_interrupts_has_crashed(fault: str) -> None:
    """Fault 46 of docs/faults.md. Its process goes on."""
    with pool(faulty(fault, at=2), 1) as (envs, faults):
        envs.reset()
        before = pids(envs)
        go(envs)
        assert go(envs).fresh.all()
        assert pids(envs) == before
        assert faults.kinds == ["env_crash"]


def test_workers_go_on_after_a_sigterm_to_all_processes() -> None:
    """As batch systems send it. The fork server dies of it, and is started again when needed."""
    with pool(scripted(), 2) as (envs, faults):
        envs.reset()
        before = pids(envs)
        server = forkserver._forkserver._forkserver_pid
        for pid in (server, *before):
            os.kill(pid, signal.SIGTERM)
        wait_until(lambda: not is_alive(server), "the end of the fork server")
        for _ in range(3):
            go(envs)
        assert (pids(envs), faults.kinds) == (before, [])
        os.kill(min(before), signal.SIGKILL)
        wait_until(lambda: bool(go(envs)) and faults.kinds == ["env_process"], "a loss")
        every = {*before, *pids(envs)}
        assert len(every) == len(before) + 1  # by a new server
        go(envs)
        # No server looks after the other one, so close cannot wait for its end.
        envs.close()
        wait_until(lambda: not any(map(is_alive, every)), "the end of the workers")


@pytest.mark.slow
@pytest.mark.parametrize("env", ["CartPole-v1", "ALE/Pong-v5"])
def test_a_program_that_closes_nothing_ends_and_leaves_no_process(env: str) -> None:
    program = textwrap.dedent(f"""
        from qfleet.config.config import Config
        from qfleet.envs.registry import ale_game
        from qfleet.envs.processes import ProcessEnvs
        envs = ProcessEnvs(Config(env={env!r}), 2, 0, print, ale_game({env!r}))
        envs.reset()
        print(*(worker.pid for worker in envs._workers), flush=True)
    """)
    with start(python("-c", program)) as process:
        out, errors = finish(process, "the end of a program with open environments")
    assert process.returncode == 0, errors
    assert out.split()
    for pid in map(int, out.split()):
        wait_until(lambda pid=pid: not is_alive(pid), "the end of a worker")  # type: ignore[misc]


def test_an_error_in_close_is_reported_by_the_process() -> None:
    with pool(faulty("exit_in_close", action_masks=False), 2) as (envs, faults):
        assert faults.kinds == ["env_close"]  # of the environment that was made for its spaces
        envs.reset()
    assert faults.kinds == ["env_close"] * 3
    assert holds(faults[-1][1], "env 1", "SystemExit")


@pytest.mark.slow
def test_a_close_that_hangs_has_a_deadline_and_is_counted() -> None:
    """Fault 47 of docs/faults.md."""
    with pool(faulty("hang_in_close", action_masks=False), 2) as (envs, faults):
        envs.reset()
    assert faults.kinds == ["env_close"] * 3
    assert holds(faults[-1][1], "env 1", "close", "5 s")
