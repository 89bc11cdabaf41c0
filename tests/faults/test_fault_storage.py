"""Faults 25 to 29, 31 and 39 of docs/faults.md, at the level of a whole run."""

from __future__ import annotations

import errno
import json
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest

import qfleet
from qfleet.cli.main import main
from qfleet.core import files
from qfleet.core.errors import (
    CheckpointError,
    ClusterError,
    ConfigError,
    EnvironmentFault,
    RunBusyError,
    UserError,
)
from qfleet.storage.checkpoint import list_checkpoints, load_checkpoint
from qfleet.training.run import Run
from qfleet.training.run_state import RunOptions
from support.faulty_envs import TINY, faulty, result_of
from support.messages import holds, says


def train(folder: Path, **changes: Any) -> qfleet.Trained:
    return qfleet.train("CartPole-v1", **TINY | changes, run_dir=folder)


@pytest.fixture
def halted(tmp_path: Path) -> Path:
    """A run that stopped at 400 of its 600 steps, with checkpoints 200 and 400."""
    folder = tmp_path / "halted"
    train(folder, checkpoint_freq=200, options=RunOptions(stop_after=400))
    assert list_checkpoints(folder / "checkpoints") == [200, 400]
    return folder


def test_a_full_disk_costs_a_checkpoint_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"

    def full_after_the_first(name: str) -> None:
        if (folder / "checkpoints" / "200").exists() and name.startswith("write "):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files, "write_point", full_after_the_first)
    trained = train(folder, checkpoint_freq=200)
    assert trained.result.stopped_by == "steps"
    assert trained.result.env_steps == 600
    # At 400 and at the end, and the best policy.
    assert trained.result.faults["checkpoint"] >= 2
    assert result_of(folder)["faults"] == trained.result.faults
    assert list_checkpoints(folder / "checkpoints") == [200]
    assert load_checkpoint(folder / "checkpoints").env_steps == 200
    monkeypatch.undo()
    again = qfleet.resume(folder)
    assert again.result.env_steps == 600
    assert list_checkpoints(folder / "checkpoints")[-1] == 600


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_a_damaged_checkpoint_is_told_and_the_one_before_it_taken(
    halted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flip_a_byte(halted / "checkpoints" / "400" / "learner.safetensors")
    capsys.readouterr()
    trained = qfleet.resume(halted, options=RunOptions(display="plain"))
    told = " ".join(capsys.readouterr().err.split())
    assert holds(told, "checkpoint 400", "damaged")
    assert "SHA-256" in told
    assert trained.result.env_steps == 600


def test_without_a_whole_checkpoint_there_is_no_resume(halted: Path) -> None:
    for number in ("200", "400"):
        flip_a_byte(halted / "checkpoints" / number / "learner.safetensors")
    with pytest.raises(CheckpointError, match=says("every", "damaged")):
        qfleet.resume(halted)


class Canary:
    """Its unpickling would be heard."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("which", ["best", "last"])
def test_a_pickle_in_a_checkpoints_place_is_refused_and_never_run(
    which: Any, halted: Path, tmp_path: Path
) -> None:
    sung = tmp_path / "sung"
    pickled = pickle.dumps(Canary(sung))
    for path in halted.rglob("*.safetensors"):
        path.write_bytes(pickled)
    with pytest.raises(CheckpointError):
        qfleet.resume(halted)
    with pytest.raises(CheckpointError):
        qfleet.load(halted, which)
    assert not sung.exists()
    pickle.loads(pickled)
    assert sung.exists()


def test_an_edited_config_is_told_by_its_differing_keys(halted: Path) -> None:
    path = halted / "config.json"
    fields = json.loads(path.read_text())
    path.write_text(json.dumps(fields | {"net_arch": [32], "gamma": 0.5, "log_interval": 50}))
    with pytest.raises(CheckpointError) as caught:
        qfleet.resume(halted)
    message = str(caught.value)
    assert holds(message, "net_arch", "[16]", "[32]", "gamma", "0.99", "0.5")
    # What does not change the computation may be changed.
    assert "log_interval" not in message
    path.write_text(json.dumps(fields | {"log_interval": 50}))
    assert qfleet.resume(halted).result.stopped_by == "steps"


def test_a_finished_run_is_told_apart_and_may_be_prolonged(tmp_path: Path) -> None:
    folder = train(tmp_path / "run").folder
    with pytest.raises(ConfigError, match=says("600", "steps")):
        qfleet.resume(folder)
    trained = qfleet.resume(folder, steps=700)
    assert trained.result.env_steps == 700
    assert json.loads((folder / "config.json").read_text())["steps"] == 700


class Failing(qfleet.Callback):
    """The run fails before its first step."""

    def on_start(self, run: Run) -> None:
        raise ClusterError(f"no room for {run.config.env}")


def fail(folder: Path) -> None:
    with pytest.raises(ClusterError, match="no room"):
        train(folder, callbacks=[Failing()])


def test_a_start_that_came_to_nothing_does_not_take_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    fail(folder)
    assert result_of(folder)["env_steps"] == 0
    (folder / "notes.txt").write_text("mine")

    class Looking(qfleet.Callback):
        def on_start(self, run: Run) -> None:
            # The failure of before must not be taken for the end of this one.
            assert not (run.folder / "result.json").exists()

    trained = train(folder, gamma=0.5, callbacks=[Looking()])
    assert trained.folder == folder
    assert result_of(folder)["stopped_by"] == "steps"
    assert json.loads((folder / "config.json").read_text())["gamma"] == 0.5
    assert (folder / "notes.txt").read_text() == "mine"
    assert qfleet.resume(folder, steps=700).result.env_steps == 700


def test_what_a_run_came_to_is_kept_though_it_has_no_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with pytest.raises(EnvironmentFault, match="observation"):
        qfleet.train(**faulty("shape", after=150), run_dir=folder)
    assert not (folder / "checkpoints").exists()
    before = {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    with pytest.raises(ConfigError, match=says("checkpoint", "another folder")):
        train(folder)
    with pytest.raises(
        CheckpointError, match=says("checkpoint", "qfleet train --config")
    ) as caught:
        qfleet.resume(folder, trust=True)
    assert "--run-dir" not in str(caught.value)  # it would be refused
    assert {path: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before


def test_who_cannot_resume_is_told_a_command_that_works(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    fail(folder)
    assert main(["resume", str(folder)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("qfleet: ")
    assert holds(said, str(folder), "checkpoint")
    words = said.rsplit(": qfleet ", 1)[1].split()
    assert main([*words, "--quiet"]) == 0
    assert result_of(folder)["stopped_by"] == "steps"


def test_seeds_that_were_trained_are_not_trained_over(tmp_path: Path) -> None:
    folder = tmp_path / "many"
    qfleet.train_seeds(1, "CartPole-v1", **TINY, seed=1, run_dir=folder)
    before = (folder / "seed-1" / "metrics.jsonl").read_bytes()
    with pytest.raises(ConfigError, match=says("seed-1'", "run", "qfleet resume")):
        qfleet.train_seeds(2, "CartPole-v1", **TINY, run_dir=folder)
    assert not (folder / "seed-0").exists()
    assert (folder / "seed-1" / "metrics.jsonl").read_bytes() == before


class Beginner(qfleet.Callback):
    """Tries to start and to resume another where a run has no checkpoint yet."""

    def __init__(self) -> None:
        self.errors: list[UserError] = []

    def on_start(self, run: Run) -> None:
        assert not (run.folder / "checkpoints").exists()
        for action in (train, qfleet.resume):
            with pytest.raises(UserError) as caught:
                action(run.folder)
            self.errors.append(caught.value)


def test_a_run_without_a_checkpoint_yet_is_in_use(tmp_path: Path) -> None:
    beginner = Beginner()
    assert train(tmp_path / "run", callbacks=[beginner]).result.env_steps == 600
    for refusal in beginner.errors:
        assert isinstance(refusal, RunBusyError)
        assert holds(str(refusal), "in use", str(os.getpid()))
    assert len(beginner.errors) == 2


class Intruder(qfleet.Callback):
    """While a run is going on, tries to start and to resume another in its folder."""

    def __init__(self) -> None:
        self.errors: list[UserError] = []

    def on_log(self, run: Run, scalars: dict[str, float | None]) -> None:
        if run.parts.clock.env_steps != 400:
            return
        assert scalars
        for action in (train, qfleet.resume):
            with pytest.raises(UserError) as caught:
                action(run.folder)
            self.errors.append(caught.value)


def test_a_second_run_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    intruder = Intruder()
    trained = train(tmp_path / "run", checkpoint_freq=200, callbacks=[intruder])
    start, resume = intruder.errors
    for refusal in (start, resume):
        assert isinstance(refusal, RunBusyError)
        assert holds(str(refusal), "in use", str(os.getpid()))
    # The first one is none the worse for it.
    assert trained.result.env_steps == 600
    assert load_checkpoint(trained.folder / "checkpoints").env_steps == 600
    metrics = [json.loads(line) for line in (trained.folder / "metrics.jsonl").open()]
    assert [row["env_steps"] for row in metrics if "train/loss" in row] == [*range(100, 601, 100)]


def test_a_finished_runs_folder_is_not_used_again(tmp_path: Path) -> None:
    folder = train(tmp_path / "run").folder
    before = (folder / "metrics.jsonl").read_bytes()
    with pytest.raises(ConfigError, match=says("run", "qfleet resume")):
        train(folder)
    assert (folder / "metrics.jsonl").read_bytes() == before


def test_a_run_that_could_not_start_does_not_take_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here a tracker is not installed; after mending that, the same command must work."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="pip install wandb"):
        train(tmp_path / "run", track="wandb")
    assert train(tmp_path / "run").result.stopped_by == "steps"


@pytest.mark.parametrize(
    "name",
    ["../out", "..", "a/b", "/absolute", "a\\b", "", " ", ".hidden", "-dash", "nul\0", "x" * 101],
)
def test_a_name_that_leads_elsewhere_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    monkeypatch.chdir(inside)
    with pytest.raises(ConfigError, match="run name"):
        qfleet.train("CartPole-v1", **TINY, name=name)
    assert [path for path in tmp_path.rglob("*") if path.name not in ("inside", "runs")] == []
