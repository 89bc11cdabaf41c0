"""``--engine device`` from the command line: a whole run on a CPU, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from qfleet.cli.main import main
from qfleet.training.run import Run
from support.messages import holds

TEXT = (
    "--algo dqn --engine device --steps 4000 --envs 64 --learning-starts 500 --train-freq 64 "
    "--batch-size 8 --buffer-size 2000 --eval-freq 2000 --n-eval-episodes 3 --max-episode-steps 60 "
    "--log-interval 500 --network mlp --net-arch 16 --device cpu --quiet"
)
WORDS = TEXT.split()
FILES = {"config.json", "seeds.json", "metrics.jsonl", "result.json", "tensorboard", "checkpoints"}


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def test_a_run_leaves_its_files_resumes_and_is_evaluated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    stop = ["--run-dir", str(run), "--stop-after", "2000"]
    assert main(["train", "MinAtar/Breakout-v1", *WORDS, *stop]) == 0
    assert {path.name for path in run.iterdir()} >= FILES | {"best", "plots"}
    half = read(run / "result.json")
    assert (half["engine"], half["env_steps"]) == ("device", 2048)
    assert main(["resume", str(run), "--quiet"]) == 0
    result = read(run / "result.json")
    assert result["env_steps"] == 4032
    assert result["updates"] == (4032 - 500) // 64
    assert result["eval_return_mean"] is not None
    assert result["faults"] == {}
    seeds = read(run / "seeds.json")
    assert len(set(seeds["each_env"])) == 64
    logged = [json.loads(line) for line in (run / "metrics.jsonl").open()]
    assert any(row.get("rollout/ep_rew_mean") is not None for row in logged)
    assert all(row["rollout/exploration_rate"] for row in logged if "train/loss" in row)
    capsys.readouterr()
    assert main(["evaluate", str(run), "--episodes", "2", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["returns"]) == 2


def test_a_classic_of_gymnasium_is_profiled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The time is up after 1000 env steps, however long they take.
    monkeypatch.setattr(Run, "is_out_of_time", lambda run: run.parts.clock.env_steps >= 1000)
    text = "--engine device --envs 8 --batch-size 8 --device cpu --json"
    words = text.split()
    run = ["--run-dir", str(tmp_path / "run")]
    assert main(["profile", "CartPole-v1", *words, *run]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["from_timers"] is True
    assert told["env_only"] > 0
    assert told["inference_only"] is None  # part of a step here


@pytest.mark.parametrize(
    ("env", "words", "named"),
    [
        ("ALE/Pong-v5", [], "'ALE/Pong-v5' has no form as tensors, which --engine device needs"),
        ("FrozenLake-v1", [], "CartPole-v0, CartPole-v1, Acrobot-v1, MountainCar-v0, MinAtar's"),
        ("CartPole-v1", ["--vectorize", "sync"], "leave vectorize and frame_stack alone"),
        ("CartPole-v1", ["--frame-stack", "2"], "leave vectorize and frame_stack alone"),
        ("CartPole-v1", ["--env-kwargs", '{"x": 1}'], "takes no env_kwargs as tensors"),
        ("CartPole-v1", ["--lockstep"], "lockstep True --engine pipeline device"),
        ("CartPole-v1", ["--env-groups", "2", "--envs", "8"], "env_groups 2 pipeline device"),
        ("CartPole-v1", ["--inference-device", "cpu"], "inference_device pipeline device"),
    ],
)
def test_what_does_not_go_is_one_line(
    env: str, words: list[str], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    words = ["--engine", "device", "--device", "cpu", "--run-dir", str(run), *words]
    assert main(["train", env, *words]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert holds(line, *named.split())
    assert not run.exists()
