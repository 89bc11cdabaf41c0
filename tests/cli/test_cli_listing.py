"""``runs`` sorted and filtered, ``evaluate`` of several seeds, and runs without a best policy."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qfleet
from qfleet.cli.main import main
from qfleet.config.config import Config
from qfleet.core.errors import CheckpointError
from qfleet.telemetry.aggregate import iqm
from support.messages import holds
from support.processes import start_qfleet
from support.waiting import deadline

TINY: dict[str, Any] = {
    "preset": "none", "steps": 200, "learning_starts": 50, "net_arch": (8,), "batch_size": 8,
    "buffer_size": 500, "eval_freq": 0, "n_eval_episodes": 1, "max_episode_steps": 50,
    "tensorboard": False, "engine": "serial", "device": "cpu",
}  # fmt: skip


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def call(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> tuple[str, str]:
    capsys.readouterr()
    assert main(list(words)) == code
    return tuple(capsys.readouterr())  # type: ignore[return-value]


@pytest.fixture
def three_runs() -> None:
    scores = {"low": 1.5, "high": 300.0, "none": None}
    for seed, (name, score) in enumerate(scores.items()):
        folder = Path("runs") / name
        folder.mkdir(parents=True)
        config = Config(env="Taxi-v4" if name == "none" else "CartPole-v1", seed=seed)
        (folder / "config.json").write_text(config.to_json())
        if score is not None:
            result = {"env_steps": 10, "eval_return_mean": score, "stopped_by": "steps"}
            (folder / "result.json").write_text(json.dumps(result))


@pytest.mark.usefixtures("three_runs")
@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("--sort return", ["low", "high", "none"]),
        ("--sort eval_return_mean --reverse", ["none", "high", "low"]),
        ("--sort name", ["high", "low", "none"]),
        ("--sort seed --filter env=CartPole-v1", ["low", "high"]),
        ("--sort seed --filter env=cartpole*", ["low", "high"]),
        ("--filter return=300", ["high"]),
        ("--filter state=finished --filter seed=0", ["low"]),
        ("--filter algo=rainbow", []),
        ("--filter env=cart?ole*", []),
        ("--filter env=[c]artpole*", []),
    ],
)
def test_runs_are_sorted_and_filtered(
    words: str, names: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    out, _ = call(capsys, "runs", *words.split(), "--json")
    assert [row["name"] for row in json.loads(out)] == names
    out, _ = call(capsys, "runs", *words.split(), "--csv")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert [row["name"] for row in rows] == names
    call(capsys, "runs", *words.split())


@pytest.mark.usefixtures("three_runs")
def test_a_damaged_configuration_does_not_hide_the_other_runs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    damaged = Path("runs/damaged")
    damaged.mkdir()
    (damaged / "config.json").write_text('{"env": NaN, "algo": 5, "seed": "x"}')
    out, _ = call(capsys, "runs", "--json")
    assert {row["name"]: row["env"] for row in json.loads(out)}["damaged"] is None
    assert len(json.loads(out)) == 4
    out, _ = call(capsys, "runs")
    assert holds(out, "high", "damaged")


@pytest.mark.usefixtures("three_runs")
@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--sort retrun", "retrun return"),
        ("--filter sede=1", "sede seed"),
        ("--filter seed", "seed KEY=VALUE"),
        ("--csv --json", "--csv --json"),
    ],
)
def test_a_wrong_column_is_named(
    words: str, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _, err = call(capsys, "runs", *words.split(), code=2)
    assert holds(err, *named.split())


@pytest.mark.usefixtures("three_runs")
@pytest.mark.parametrize("width", [60, 80, 200])
def test_a_narrow_terminal_leaves_columns_out(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as a terminal
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(width))
    head, *rows = re.sub(r"\x1b\[\d*m", "", call(capsys, "runs")[0]).splitlines()
    assert {"name", "steps", "return", "best", "state"} <= set(head.split())
    assert ("engine" in head) == (width == 200)
    assert len(rows) == 3 + (width < 200)  # no row is broken into two lines
    assert max(map(len, [head, *rows[:3]])) <= width
    if width < 200:
        assert holds(rows[3], "engine", "--csv")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="writes to /dev/full")
def test_output_on_a_full_disk_is_an_error_of_one_line() -> None:
    with open("/dev/full", "w") as full:
        process = start_qfleet("runs", stdout=full)
    _, said = process.communicate(timeout=deadline(60))
    assert process.returncode == 1
    assert said.count("\n") == 1
    assert holds(said, "disk", "output")


def test_a_terminal_without_greek_letters_shows_help() -> None:
    process = start_qfleet("train", "--help", env=os.environ | {"PYTHONIOENCODING": "ascii"})
    said, _ = process.communicate(timeout=deadline(60))
    assert process.returncode == 0
    assert "--exploration-fraction" in said


def test_evaluate_plays_every_seed_and_aggregates(capsys: pytest.CaptureFixture[str]) -> None:
    qfleet.train_seeds(3, "CartPole-v1", name="many", **TINY)
    out, err = call(capsys, "evaluate", "many", "--episodes", "2", "--json")
    report = json.loads(out)
    assert err == ""
    assert list(report["runs"]) == ["many/seed-0", "many/seed-1", "many/seed-2"]
    alone = json.loads(call(capsys, "evaluate", "runs/many/seed-1", "--episodes", "2", "--json")[0])
    assert report["runs"]["many/seed-1"] == alone
    means = [one["return_mean"] for one in report["runs"].values()]
    assert report["return_iqm"] == iqm(means)
    low, high = report["return_iqm_ci95"]
    assert min(means) <= low <= high <= max(means)
    lines = call(capsys, "evaluate", "many", "--episodes", "2")[0].splitlines()
    assert len(lines) == 4
    assert lines[0].startswith("many/seed-0: return ")
    assert holds(lines[-1], "3 seeds", "IQM", "95 %")


def test_no_seed_of_a_stranger_plays_before_consent(capsys: pytest.CaptureFixture[str]) -> None:
    qfleet.train_seeds(2, "CartPole-v1", name="many", **TINY)
    path = Path("runs/many/seed-1/config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"imports": ["evil"]}))
    Path("evil.py").write_text("open('imported', 'w')")
    out, err = call(capsys, "evaluate", "many", "--episodes", "1", code=2)
    assert out == ""
    assert holds(err, "evil", "--trust")
    assert not Path("imported").exists()


def test_the_last_policy_is_used_where_there_is_no_best(
    capsys: pytest.CaptureFixture[str],
) -> None:
    trained = qfleet.train("CartPole-v1", run_dir="run", **TINY)
    best = trained.policy()
    shutil.rmtree("run/best")
    out, err = call(capsys, "evaluate", "run", "--episodes", "1", "--json")
    assert json.loads(out)["episodes"] == 1
    assert err.count("\n") == 1
    assert holds(err, "no best policy", "last")
    policy = qfleet.load("run")
    observations = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
    np.testing.assert_array_equal(policy.act(observations), best.act(observations))
    assert trained.policy().act(observations[0]) == best.act(observations[0])
    # What is asked for by name is not replaced.
    _, err = call(capsys, "evaluate", "run", "--which", "best", code=2)
    assert "no policy" in err
    with pytest.raises(CheckpointError, match="no policy"):
        qfleet.load("run", "best")
    shutil.rmtree("run/checkpoints")
    with pytest.raises(CheckpointError, match="no policy"):
        qfleet.load("run")


def test_a_video_of_the_last_policy_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    qfleet.train("CartPole-v1", run_dir="run", **TINY)
    shutil.rmtree("run/best")
    monkeypatch.setattr("qfleet.training.video.record_video", lambda *_: (1, 1.0))
    out, err = call(capsys, "video", "run")
    assert "last-seed1000.gif" in out
    assert err.count("\n") == 1
    assert holds(err, "no best policy", "last")


def test_what_environments_print_is_no_part_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    qfleet.train("support.odd_envs:Chatty", run_dir="run", **TINY)
    capsys.readouterr()
    out, err = call(capsys, "evaluate", "run", "--episodes", "1", "--trust", "--json")
    assert json.loads(out)["episodes"] == 1
    assert "chat" in err
