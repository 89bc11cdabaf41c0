"""Faults 1, 8, 9, 10, 15 and 40 of docs/faults.md on the pipeline engine, as whole runs.

There the envs are stepped in a thread of their own, a block ahead of the learner: what goes wrong
goes wrong beside the loop, and must still reach it.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import qfleet
from qfleet.core.errors import EnvironmentFault, FaultRateError
from qfleet.core.types import FIRST, SKIP
from qfleet.engines import placement
from qfleet.storage.checkpoint import list_checkpoints, load_checkpoint
from qfleet.training.run_state import RunOptions
from support.faulty_envs import TINY, FaultyEnv, faulty, result_of
from support.messages import says
from support.processes import children_of, count_lines, is_alive, needs_proc, start_qfleet
from support.waiting import deadline, finish, wait_until

PIPELINE: dict[str, Any] = {"engine": "pipeline", "vectorize": "async", "envs": 2, "block_rows": 10}


class DoomedEnv(FaultyEnv):
    """In step number ``at`` of its life it takes its process along, or never returns.

    ``once`` names a file: of all envs, that befalls only the one which creates it.
    """

    def __init__(self, way: str, at: int, once: str) -> None:
        super().__init__()
        self.way, self.at, self.once = way, at, Path(once)

    def step(self, action: Any) -> Any:
        if self.steps + 1 == self.at and self._is_the_one():
            if self.way != "hang":
                os.kill(os.getpid(), signal.Signals[self.way])
            time.sleep(3600)
        return super().step(action)

    def _is_the_one(self) -> bool:
        try:
            self.once.touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


class MayflyEnv(FaultyEnv):
    """Takes its process along in its first step, every time."""

    def step(self, action: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


def doomed(way: str, at: int, once: Path, **changes: Any) -> dict[str, Any]:
    """Arguments of qfleet.train: DoomedEnvs in a process each, of which the first to get there."""
    kwargs = json.dumps({"way": way, "at": at, "once": str(once)})
    env = {"env": "test_fault_pipeline:DoomedEnv", "env_kwargs": kwargs}
    return {**TINY, **PIPELINE, **env, **changes}


def await_the_collectors_end() -> None:
    """A run that ends with an error waits some seconds for it, and a busy machine may need more."""
    wait_until(
        lambda: not any(thread.name == "collector" for thread in threading.enumerate()),
        "the end of the collector",
    )


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """One process per env of a group, on every machine; and no long measurement at the start."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(2)))
    monkeypatch.setattr(placement, "MEASURE_S", 0.01)


@pytest.mark.parametrize(
    ("way", "kind", "env_groups"),
    [
        ("SIGKILL", "env_process", 1),
        pytest.param("SIGKILL", "env_process", 2, marks=pytest.mark.slow),
        pytest.param("hang", "env_timeout", 2, marks=pytest.mark.slow),
    ],
)
def test_a_run_outlives_a_process_that_dies_or_hangs(
    way: str, kind: str, env_groups: int, tmp_path: Path
) -> None:
    # Only a process that hangs is to run into the timeout, however slowly others start.
    timeout_s = deadline(10.0 if kind == "env_timeout" else 60.0)
    arguments = doomed(way, 101, tmp_path / "once", env_groups=env_groups, env_timeout_s=timeout_s)
    trained = qfleet.train(**arguments, run_dir=tmp_path / "run")
    assert trained.result.env_steps == 600
    assert trained.result.updates == (600 - 40) // 4
    assert trained.result.stopped_by == "steps"
    assert trained.result.faults == result_of(trained.folder)["faults"] == {kind: 1}
    memory = load_checkpoint(trained.folder / "checkpoints").parts["memory"]
    flags = memory["flags"].numpy().reshape(-1, 2)
    # 100 steps, ten an episode and the autoreset: the 101st is row 110.
    lost = (flags[110] & SKIP) != 0
    assert lost.sum() == 1
    assert (flags[111][lost] & FIRST != 0).all()
    # Who was not lost plays on, and its episode ends ten steps later.
    assert ((flags[120] & SKIP != 0) == ~lost).all()


@pytest.mark.parametrize("env_groups", [1, 2])
def test_faults_are_those_of_the_run_and_of_nothing_after_it(
    env_groups: int, tmp_path: Path
) -> None:
    """Every 150th step of two envs; a row of the autoreset is no step, so 272 in 300 rows."""
    arguments = {**faulty("nan_reward", every=150), **PIPELINE, "env_groups": env_groups}
    trained = qfleet.train(**arguments, run_dir=tmp_path / "run")
    assert trained.result.env_steps == 600
    assert result_of(trained.folder)["faults"] == {"env_reward": 2}
    memory = load_checkpoint(trained.folder / "checkpoints").parts["memory"]
    assert memory["reward"].isfinite().all()
    # 149 steps and 14 autoresets come before it.
    assert (memory["flags"].numpy().reshape(-1, 2)[163] & SKIP != 0).all()


def test_a_finished_run_does_not_fail_by_what_is_done_after_it(tmp_path: Path) -> None:
    """From step 400 on, which 300 rows never reach, the env cannot be used any more."""
    arguments = {**faulty("shape", after=400), **PIPELINE}
    trained = qfleet.train(**arguments, run_dir=tmp_path / "run")
    assert (trained.result.env_steps, trained.result.stopped_by) == (600, "steps")
    assert result_of(trained.folder)["stopped_by"] == "steps"


def test_too_many_bad_rewards_end_the_run(tmp_path: Path) -> None:
    with pytest.raises(FaultRateError, match=says("env_reward", "faults")):
        qfleet.train(**{**faulty("nan_reward", every=7), **PIPELINE}, run_dir=tmp_path / "run")
    assert result_of(tmp_path / "run")["stopped_by"].startswith("error: env_reward")
    await_the_collectors_end()


@pytest.mark.parametrize("env_groups", [1, 2])
def test_an_error_of_the_collectors_thread_ends_the_run_as_itself(
    env_groups: int, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    arguments = {**faulty("shape", every=99), **PIPELINE, "env_groups": env_groups}
    with pytest.raises(EnvironmentFault, match=says("(2,)", "(5,)", "float32")):
        qfleet.train(**arguments, run_dir=folder)
    result = result_of(folder)
    assert result["stopped_by"].startswith("error: ")
    assert "got (5,)" in result["stopped_by"]
    # Step 99 is in row 108, so in the block of rows 100 to 109: it never enters the memory.
    assert result["env_steps"] == 200
    await_the_collectors_end()


@pytest.mark.slow
def test_a_process_that_always_dies_ends_in_a_typed_error(tmp_path: Path) -> None:
    arguments = {**TINY, **PIPELINE, "env": "test_fault_pipeline:MayflyEnv"}
    with pytest.raises(EnvironmentFault, match=says("2", "max_env_restarts", "1")):
        qfleet.train(**arguments, max_env_restarts=1, run_dir=tmp_path / "run")
    assert "exit code -9" in result_of(tmp_path / "run")["stopped_by"]


@pytest.mark.slow
@needs_proc
def test_ctrl_c_ends_a_pipeline_in_good_order(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    # Endless but for the signal.
    command = "train CartPole-v1 --preset none --steps 100000000 --envs 4 --vectorize async"
    command += " --engine pipeline --env-groups 2 --buffer-size 1000 --net-arch 16"
    command += " --log-interval 200 --no-tensorboard"
    run = start_qfleet(*command.split(), "--run-dir", str(folder))
    try:
        metrics = folder / "metrics.jsonl"
        wait_until(lambda: count_lines(metrics) >= 2, "two log lines", process=run)
        children = children_of(run.pid)
        # The fork server, whose children the envs are.
        processes = [*children, *(pid for child in children for pid in children_of(child))]
        assert len(processes) >= 4
        # To the whole group of a terminal, as Ctrl-C does: the envs' processes get it too.
        for pid in [run.pid, *processes]:
            os.kill(pid, signal.SIGINT)
        out, err = finish(run, "the end after the signal")
    finally:
        run.kill()
        run.wait()
    assert run.returncode == 130, err
    assert "Traceback" not in err
    assert f"qfleet resume {folder}" in out
    result = result_of(folder)
    assert result["stopped_by"] == "SIGINT"
    assert result["faults"] == {}
    assert list_checkpoints(folder / "checkpoints") == [result["env_steps"]]
    wait_until(lambda: not any(map(is_alive, processes)), "the end of the processes")
    more = result["env_steps"] + 100
    resumed = qfleet.resume(folder, options=RunOptions(stop_after=more))
    assert resumed.result.env_steps >= more
    assert resumed.result.stopped_by == "stop_after"
    rows = [json.loads(line)["env_steps"] for line in metrics.open()]
    assert rows == sorted(rows)
