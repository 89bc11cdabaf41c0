"""A population that is stopped, or killed, goes on bit for bit, through PBT and halvings."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from qfleet.config.config import Config
from qfleet.storage.checkpoint import load_checkpoint, load_policy
from support.runs import assert_same_run, configure, leaves, resume, train
from support.waiting import PHASE_S, deadline

FIELDS: dict[str, Any] = {
    "engine": "device", "device": "cpu", "envs": 4, "train_freq": 80, "gradient_steps": 20,
    "population": 4, "steps": 640, "eval_freq": 320, "threads": 1,
    "vary": '{"learning_rate": [0.01, 0.001], "gamma": {"from": 0.9, "to": 0.99}}',
}  # fmt: skip


REPLAY: dict[str, Any] = {
    "algo": "dqn", "train_freq": 16, "gradient_steps": 4, "learning_starts": 64,
    "buffer_size": 400, "prioritized_replay": True, "noisy": True,
}  # fmt: skip


def populated(algo: str = "pqn", **changes: Any) -> Config:
    return configure("CartPole-v1", algo, **{**FIELDS, **changes})


def assert_same_agents(whole: Path, parted: Path) -> None:
    told = [(folder / "population.jsonl") for folder in (whole, parted)]
    if told[0].exists():
        assert told[0].read_text() == told[1].read_text()
    for agent in range(4):
        folders = [folder / "agents" / str(agent) for folder in (whole, parted)]
        configs = [(folder / "config.json").read_text() for folder in folders]
        assert configs[0] == configs[1]
        policies = [load_policy(folder / "best") for folder in folders]
        assert policies[0].meta == policies[1].meta
        ours, theirs = (dict(leaves(policy.parts, "best")) for policy in policies)
        assert ours["best.policy.weights"].equal(theirs["best.policy.weights"])


@pytest.mark.parametrize(
    ("changes", "stops"),
    [
        ({}, (200,)),
        # In the middle of an interval, and right where agents take over.
        pytest.param({"pbt_interval": 160}, (240, 320), marks=pytest.mark.slow),
        # Before, at and after halvings.
        pytest.param({"halving_interval": 240}, (160, 240, 400), marks=pytest.mark.slow),
        pytest.param(REPLAY | {"pbt_interval": 160}, (240, 320), marks=pytest.mark.slow),
        pytest.param(REPLAY | {"halving_interval": 240}, (160, 240, 400), marks=pytest.mark.slow),
    ],
    ids=["plain", "pbt", "halving", "pbt-replay", "halving-replay"],
)
def test_stopped_and_resumed_it_is_the_whole_run(
    changes: dict[str, Any], stops: tuple[int, ...], tmp_path: Path
) -> None:
    config = populated(**changes)
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    train(config, whole)
    train(config, parted, stops[0])
    for stop in (*stops[1:], None):
        resume(parted, stop)
    assert_same_run(whole, parted, stops)
    assert_same_agents(whole, parted)
    members = load_checkpoint(parted / "checkpoints").parts["agents"]["members"]
    assert len(members) == (1 if "halving_interval" in changes else 4)


KILLED = """
import json, os, signal, sys
from pathlib import Path
from qfleet.training.callbacks import Callback
from qfleet.training.run import Run
from qfleet.training.run_state import RunOptions
from qfleet.config.config import Config

class Die(Callback):
    def on_log(self, run, scalars):
        if run.parts.clock.env_steps >= int(sys.argv[2]):
            os.kill(os.getpid(), signal.SIGKILL)

Run(Config(**json.loads(sys.argv[3])), Path(sys.argv[1]), RunOptions(), [Die()]).go()
"""


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"pbt_interval": 80}, {"halving_interval": 240}], ids=str)
def test_killed_it_loses_no_more_than_since_its_checkpoint(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    """What agents did after it, told or not, is done and told again, once."""
    config = populated(checkpoint_freq=160, **changes)
    train(config, tmp_path / "whole")
    folder = tmp_path / "killed"
    died = subprocess.run(
        [sys.executable, "-c", KILLED, str(folder), "450", config.to_json()],
        capture_output=True,
        text=True,
        timeout=deadline(PHASE_S),
    )
    assert died.returncode == -signal.SIGKILL, died.stderr
    resume(folder)
    assert_same_run(tmp_path / "whole", folder)
    assert_same_agents(tmp_path / "whole", folder)
