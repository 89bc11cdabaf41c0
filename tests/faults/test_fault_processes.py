"""Faults 8 and 9 of docs/faults.md, at the level of a whole run: env processes that die or hang."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qfleet
from qfleet.core.errors import EnvironmentFault
from qfleet.core.types import FIRST, SKIP
from qfleet.storage.checkpoint import load_checkpoint
from qfleet.training.run_state import RunOptions
from support.faulty_envs import TINY, FaultyEnv, result_of
from support.messages import holds
from support.waiting import deadline


class MortalEnv(FaultyEnv):
    """In step number ``at`` of its life it takes its process along, or never returns."""

    def __init__(self, way: str, at: int) -> None:
        super().__init__()
        self.way, self.at = way, at

    def step(self, action: Any) -> Any:
        if self.steps + 1 == self.at:
            if self.way != "hang":
                os.kill(os.getpid(), signal.Signals[self.way])
            time.sleep(3600)
        return super().step(action)


IN_PROCESSES: dict[str, Any] = {**TINY, "engine": "serial", "envs": 2, "vectorize": "async"}
"""One engine, named: others may step envs in another order, or try them out before the run."""


def mortal(way: str, at: int, **changes: Any) -> dict[str, Any]:
    """Arguments of qfleet.train: two MortalEnvs in a process each."""
    kwargs = json.dumps({"way": way, "at": at})
    env = {"env": "test_fault_processes:MortalEnv", "env_kwargs": kwargs}
    return {**IN_PROCESSES, **env, **changes}


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """One process per env, on every machine."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(2)))


@pytest.mark.parametrize("way", ["SIGKILL", pytest.param("SIGSEGV", marks=pytest.mark.slow)])
def test_a_run_outlives_the_processes_of_its_envs(way: str, tmp_path: Path) -> None:
    trained = qfleet.train(**mortal(way, at=111), run_dir=tmp_path / "run")
    # 300 rows: each env dies in its 111th step, is another from then on, and dies as such again.
    # An episode costs ten steps and the autoreset, so 110 of them take 121 rows.
    assert trained.result.faults == {"env_process": 4}
    assert result_of(trained.folder)["faults"] == {"env_process": 4}
    assert trained.result.env_steps == 600
    assert trained.result.stopped_by == "steps"
    memory = load_checkpoint(trained.folder / "checkpoints").parts["memory"]
    flags = memory["flags"].numpy().reshape(-1, 2)
    # The lost step leads nowhere, and the row behind it opens an episode.
    for died_in in (121, 243):
        assert (flags[died_in] & SKIP).all()
        assert (flags[died_in + 1] & FIRST).all()


@pytest.mark.slow
def test_a_run_outlives_an_env_that_hangs(tmp_path: Path) -> None:
    arguments = mortal("hang", at=150, env_timeout_s=deadline(10.0))
    trained = qfleet.train(**arguments, run_dir=tmp_path / "run")
    assert trained.result.faults["env_timeout"] >= 2
    assert trained.result.env_steps == 600
    assert trained.result.stopped_by == "steps"


def test_a_process_that_dies_at_once_ends_in_a_typed_error(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault) as caught:
        qfleet.train(**mortal("SIGKILL", at=1, max_env_restarts=2), run_dir=tmp_path / "run")
    message = str(caught.value)
    assert holds(message, "env 0", "test_fault_processes:MortalEnv", "-9", "3")
    assert holds(message, "max_env_restarts 2")
    assert result_of(tmp_path / "run")["stopped_by"].startswith("error: ")


def test_envs_in_processes_resume_in_mid_episode(tmp_path: Path) -> None:
    """Bit for bit, as those in the run's own process do."""
    whole = qfleet.train("CartPole-v1", **IN_PROCESSES, run_dir=tmp_path / "whole")
    halves = tmp_path / "halves"
    qfleet.train("CartPole-v1", **IN_PROCESSES, run_dir=halves, options=RunOptions(stop_after=300))
    resumed = qfleet.resume(halves)
    assert resumed.result.env_steps == whole.result.env_steps == 600
    parts = [load_checkpoint(folder / "checkpoints").parts for folder in (whole.folder, halves)]
    for name in ("action", "reward", "flags"):
        first, second = (part["memory"][name].numpy() for part in parts)
        assert np.array_equal(first, second), name
    first, second = (part["learner"]["weights"].numpy() for part in parts)
    assert np.array_equal(first, second)
