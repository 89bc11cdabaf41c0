"""Run N, stop, resume to 2N ≡ run 2N: bit for bit, wherever and however the run was stopped."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import qfleet
from qfleet.config.config import Config
from qfleet.core.types import FIRST, SKIP
from qfleet.storage.checkpoint import list_checkpoints, load_checkpoint
from qfleet.training.run_state import RunOptions
from support.runs import STEPS, assert_same_run, configure, final_state, resume, train
from support.waiting import PHASE_S, deadline

ROLLOUTS: dict[str, Any] = {"envs": 4, "train_freq": 80, "gradient_steps": 20, "algo": "pqn"}
SHORT_ROLLOUTS: dict[str, Any] = {
    "envs": 2,
    "train_freq": 4,
    "gradient_steps": 1,
    "batch_size": 4,
    "learning_starts": 0,
}


@pytest.mark.parametrize(
    ("config", "stops"),
    [
        (configure(), (137, 411)),
        (configure(), (3,)),
        pytest.param(configure(algo="rainbow"), (271,), marks=pytest.mark.slow),
        pytest.param(configure(algo="iqn"), (322,), marks=pytest.mark.slow),
        (configure(algo="munchausen-dqn"), (199, 201)),
        (configure(envs=8, vectorize="native"), (333,)),
        pytest.param(configure(envs=8, algo="rainbow"), (250,), marks=pytest.mark.slow),
        (configure(envs=3, vectorize="sync", train_freq=16, gradient_steps=6), (101,)),
        (configure("MountainCar-v0", "prioritized-dqn", optimizer="rmsprop"), (287,)),
        (configure("FrozenLake-v1", "double-dqn", tau=0.1), (288,)),
        pytest.param(configure(frame_stack=3, algo="n-step-dqn"), (301,), marks=pytest.mark.slow),
        (configure(lr_plateau_patience=1, eval_freq=60), (305,)),
        (configure(**ROLLOUTS), (240,)),
        (configure(**SHORT_ROLLOUTS, algo="a3c", target_network=True, tau=0.3), (240,)),
        (configure(**SHORT_ROLLOUTS, algo="n-step-q", vectorize="sync"), (120, 300)),
        # Stopped in the middle of a rollout; rows of the log tell of updates of their own sitting.
        pytest.param(
            configure(**ROLLOUTS, frame_stack=2, block_rows=5, log_interval=160),
            (170, 333),
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda value: f"{value.env}-{value.algo}-{value.envs}" if type(value) is Config else None,
)
def test_a_resumed_run_is_the_whole_run(
    config: Config, stops: tuple[int, ...], tmp_path: Path
) -> None:
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    train(config, whole)
    train(config, parted, stop_after=stops[0])
    for stop in (*stops[1:], None):
        assert list_checkpoints(parted / "checkpoints")[-1] < STEPS
        resume(parted, stop_after=stop)
    assert_same_run(whole, parted, stops)


@pytest.mark.slow
def test_equal_runs_are_equal_and_seeds_matter(tmp_path: Path) -> None:
    for name, seed in (("one", 5), ("two", 5), ("other", 6)):
        train(configure(algo="rainbow", seed=seed), tmp_path / name)
    assert_same_run(tmp_path / "one", tmp_path / "two")
    one, other = final_state(tmp_path / "one"), final_state(tmp_path / "other")
    for name in ("learner.weights", "memory.frames", "memory.sampler.generator", "actor.obs.0"):
        assert not torch.equal(one[f"state.{name}"], other[f"state.{name}"]), name
    assert one["state.actor.random.state.state"] != other["state.actor.random.state.state"]


def test_where_an_env_cannot_give_its_state_its_episode_is_cut_and_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    config = configure("support.stateless_envs:StatelessEnv", buffer_size=1000, max_episode_steps=0)
    train(config, folder, stop_after=300)
    qfleet.resume(folder, options=RunOptions(display="plain"), trust=True)
    assert "open episodes were cut" in capsys.readouterr().err
    memory = load_checkpoint(folder / "checkpoints", STEPS).parts["memory"]
    flags, frames = memory["flags"], torch.cat(memory["frames"].tensors)[:, 0]
    # Row 299 is the last one before the stop: in mid-episode, so it would lead to a wrong place.
    assert frames[299].tolist() != [1.0, 0.0]
    assert int(flags[299]) & SKIP
    assert int(flags[300]) & FIRST
    assert frames[300].tolist() == [1.0, 0.0]
    assert not int(flags[298]) & SKIP
    result = json.loads((folder / "result.json").read_text())
    assert (result["env_steps"], result["stopped_by"]) == (STEPS, "steps")


KILLED = """
import json, os, signal, sys
from pathlib import Path
from qfleet.training.callbacks import Callback
from qfleet.training.run import Run
from qfleet.training.run_state import RunOptions
from qfleet.config.config import Config
from qfleet.core import files

class Die(Callback):
    def on_log(self, run, scalars):
        if run.parts.clock.env_steps >= 450:
            os.kill(os.getpid(), signal.SIGKILL)

def die_in_the_second_checkpoint(name):
    if (folder / "checkpoints" / "150").exists() and name == "sync manifest.json":
        os.kill(os.getpid(), signal.SIGKILL)

folder, where = Path(sys.argv[1]), sys.argv[2]
if where == "in a checkpoint":
    files.write_point = die_in_the_second_checkpoint
Run(Config(**json.loads(sys.argv[3])), folder, RunOptions(), [Die()]).go()
"""


@pytest.mark.parametrize(
    "where", [pytest.param("between", marks=pytest.mark.slow), "in a checkpoint"]
)
def test_a_killed_run_goes_on_from_its_last_whole_checkpoint(where: str, tmp_path: Path) -> None:
    config = configure(checkpoint_freq=150)
    train(config, tmp_path / "whole")
    folder = tmp_path / "killed"
    died = subprocess.run(
        [sys.executable, "-c", KILLED, str(folder), where, config.to_json()],
        capture_output=True,
        text=True,
        timeout=deadline(PHASE_S),
    )
    assert died.returncode == -signal.SIGKILL, died.stderr
    assert not (folder / "result.json").exists()
    kept = list_checkpoints(folder / "checkpoints")
    assert kept == ([150] if where == "in a checkpoint" else [150, 300])
    resume(folder)
    assert_same_run(tmp_path / "whole", folder)
    assert not list((folder / "checkpoints").glob(".*"))
