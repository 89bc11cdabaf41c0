"""``qfleet data`` and ``qfleet train --data`` on the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qfleet.cli.main import main
from qfleet.core.types import EnvSpec
from support.datasets import STACK, record_block, scripted_block
from support.messages import holds

CARTPOLE = EnvSpec("CartPole-v1", (4,), "float32", 2)


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    record_block("data", scripted_block(CARTPOLE, 300, 2), CARTPOLE)
    return "data"


def answer(capsys: pytest.CaptureFixture[str], *argv: str) -> Any:
    assert main([*argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_dataset_is_described_checked_split_and_sharded(
    data: str, capsys: pytest.CaptureFixture[str]
) -> None:
    info = answer(capsys, "data", "info", data)
    assert (info["env"], info["statistics"]) == ("CartPole-v1", None)
    assert answer(capsys, "data", "validate", data)["valid"] is True
    stats = answer(capsys, "data", "stats", data)
    assert sum(stats["actions"]) == info["transitions"]
    assert answer(capsys, "data", "info", data)["statistics"] == stats
    for command in (["split", data, "splits", "--stratify"],
                    ["shard", data, "shards", "--speeds", "1", "3"]):  # fmt: skip
        sizes = answer(capsys, "data", *command)
        assert sum(one["transitions"] for one in sizes.values()) == info["transitions"]
    assert main(["data", "info", "splits/train"]) == 0
    assert "transitions" in capsys.readouterr().out


def test_the_mean_of_images_is_one_short_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record_block(tmp_path / "data", scripted_block(STACK, 60, 1), STACK)
    assert main(["data", "stats", str(tmp_path / "data")]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "obs_mean" in line]
    assert holds(line, "…", "2×2")
    info = answer(capsys, "data", "info", str(tmp_path / "data"))
    assert np.shape(info["statistics"]["obs_mean"]) == (2, 2)


def test_a_dataset_names_the_environment_of_training(
    data: str, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["--net-arch", "8", "--n-eval-episodes", "1", "--no-tensorboard", "--eval-freq", "0"]
    result = answer(capsys, "train", "--data", data, "--epochs", "2", "--algo", "bc", *small)
    assert (result["env_id"], result["engine"]) == ("CartPole-v1", "offline")
    assert result["updates"] == result["env_steps"] // 32


def test_given_steps_replace_epochs_of_a_stored_configuration(
    data: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a run has stored, and values that change nothing, are accepted."""
    small = ["--net-arch", "8", "--n-eval-episodes", "1", "--no-tensorboard", "--envs", "1"]
    old = ["--epochs", "1", "--algo", "bc", "--run-dir", "old", *small]
    assert answer(capsys, "train", "--data", data, *old)["updates"] > 0
    again = ("train", "--config", "old", "--run-dir", "new", "--batch-size", "16")
    assert answer(capsys, *again, "--steps", "400")["env_steps"] == 400


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("train --data data --steps 400 --epochs 1", "steps 400 and epochs 1"),
        ("train --data data --train-freq=8", "train_freq 8 has no effect"),
        ("train --data data --gradient-steps 2", "gradient_steps"),
        ("train --data data --replay-device cuda", "replay_device cuda has no effect"),
        ("data inf data", "did you mean info"),
        ("data info nowhere", "has no manifest.json"),
        ("train --data nowhere", "has no manifest.json"),
        ("data split data splits --fractions 0.5 0.5 0.5", "fractions"),
        ("data shard data shards --speeds 1 0", "speeds"),
        ("train Acrobot-v1 --data data", "env must be 'CartPole-v1'"),
        ("train CartPole-v1 --epochs 3", "epochs"),
        ("data merge nowhere", "no finished file"),
    ],
)
@pytest.mark.usefixtures("data")
def test_mistakes_are_one_line(
    command: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command.split()) == 2
    message = capsys.readouterr().err
    assert words in message
    assert len(message.splitlines()) == 1


@pytest.mark.parametrize("action", ["info", "validate"])
def test_files_that_are_not_in_the_manifest_are_reported(
    action: str, data: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(data) / "manifest.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps(values | {"parts": values["parts"][:-1]}))
    assert main(["data", action, data]) == 0
    assert "qfleet data merge" in capsys.readouterr().err
    assert answer(capsys, "data", "merge", data)["files"] == len(values["parts"])
    assert main(["data", action, data]) == 0
    assert capsys.readouterr().err == ""
