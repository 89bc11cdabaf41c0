"""Fault 50 of docs/faults.md: several seeds whose process was killed are finished by one resume."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

import qfleet
from qfleet.cli.main import main
from qfleet.core.errors import CheckpointError, ConfigError, QfleetError, RunBusyError
from qfleet.storage.checkpoint import has_checkpoint
from qfleet.storage.locks import RunLock
from qfleet.training.run_state import RunOptions
from support.configs import tiny_fields
from support.messages import holds, says
from support.processes import start_qfleet
from support.waiting import finish, wait_until

FIELDS = tiny_fields(steps=300, learning_starts=40, eval_freq=100, checkpoint_freq=100)
SEEDS = (0, 1, 2)


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("seeds") / "parent"
    return qfleet.train_seeds(3, "CartPole-v1", **FIELDS, run_dir=folder).folder


@pytest.fixture
def parent(complete: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(complete, tmp_path / "parent"))


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def scores(aggregate: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in aggregate.items() if name != "wall_s"}


def test_what_is_missing_is_trained_and_the_rest_is_kept(parent: Path, complete: Path) -> None:
    """Seed 0 has ended, seed 1 lost its result, and seed 2 has not begun.

    The result of seed 0 is that of an older version, without the time of each thread.
    """
    result = read(parent / "seed-0" / "result.json")
    del result["resources"]
    (parent / "seed-0" / "result.json").write_text(json.dumps(result))
    before = (parent / "seed-0" / "metrics.jsonl").stat().st_mtime_ns
    (parent / "seed-1" / "result.json").unlink()
    shutil.rmtree(parent / "seed-2")
    shutil.rmtree(parent / "plots")
    (parent / "aggregate.json").unlink()
    trained = qfleet.resume(parent)
    assert isinstance(trained, qfleet.TrainedSeeds)
    assert (parent / "seed-0" / "metrics.jsonl").stat().st_mtime_ns == before
    assert scores(trained.aggregate) == scores(read(complete / "aggregate.json"))
    assert read(parent / "aggregate.json") == trained.aggregate
    assert trained.curve is not None
    assert trained.curve.exists()


def test_a_seed_without_a_checkpoint_starts_anew(parent: Path, complete: Path) -> None:
    (parent / "seed-1" / "result.json").unlink()
    shutil.rmtree(parent / "seed-1" / "checkpoints")
    trained = qfleet.resume(parent)
    assert scores(trained.aggregate) == scores(read(complete / "aggregate.json"))


def test_a_parent_of_which_no_seed_has_begun_is_resumed(parent: Path, complete: Path) -> None:
    for entry in parent.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
    (parent / "aggregate.json").unlink()
    trained = qfleet.resume(parent)
    assert scores(trained.aggregate) == scores(read(complete / "aggregate.json"))


@pytest.mark.slow
def test_seeds_that_were_stopped_go_on(tmp_path: Path) -> None:
    folder, stopped = tmp_path / "parent", RunOptions(stop_after=200)
    qfleet.train_seeds(3, "CartPole-v1", **FIELDS, run_dir=folder, options=stopped)
    assert qfleet.resume(folder).aggregate["env_steps"] == 900


def test_a_finished_parent_says_so_and_may_be_prolonged(
    parent: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["resume", str(parent)]) == 2
    assert holds(capsys.readouterr().err, "complete", "--steps")
    assert main(["resume", str(parent), "--steps", "400", "--quiet"]) == 0
    said = capsys.readouterr().out
    assert holds(said, "3 seeds", "IQM", str(parent))
    assert read(parent / "aggregate.json")["env_steps"] == 1200


def test_a_parent_without_its_file_is_refused(parent: Path) -> None:
    (parent / "experiment.json").unlink()
    with pytest.raises(ConfigError, match=says("several seeds", "seed-0")):
        qfleet.resume(parent)


def test_a_malformed_file_of_a_parent_is_refused(parent: Path) -> None:
    for text in ("[", "{}", '{"seeds": ["a"], "config": {}}', '{"seeds": [0], "config": []}'):
        (parent / "experiment.json").write_text(text)
        with pytest.raises((CheckpointError, ConfigError)) as caught:
            qfleet.resume(parent)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("busy", ["", "seed-1"])
def test_a_parent_that_trains_in_another_process_is_busy(busy: str, parent: Path) -> None:
    shutil.rmtree(parent / "seed-0")
    with RunLock(parent / busy), pytest.raises(RunBusyError, match="in use"):
        qfleet.resume(parent)
    assert not (parent / "seed-0").exists()


def test_stored_values_need_trust(parent: Path) -> None:
    stored = read(parent / "experiment.json")
    stored["config"]["imports"] = ["support.toy_envs"]
    (parent / "experiment.json").write_text(json.dumps(stored))
    shutil.rmtree(parent / "seed-2")
    with pytest.raises(ConfigError, match=says("trust")):
        qfleet.resume(parent)


def test_stopped_seeds_say_how_to_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, config = tmp_path / "parent", tmp_path / "config.json"
    fields = {name: value for name, value in FIELDS.items() if name != "preset"}
    config.write_text(json.dumps({"env": "CartPole-v1", **fields}))
    words = ["train", "--config", str(config), "--seeds", "2", "--run-dir", str(folder)]
    assert main([*words, "--stop-after", "150", "--quiet"]) == 0
    assert f"go on with: qfleet resume {folder}" in capsys.readouterr().out
    assert main(["resume", str(folder), "--quiet"]) == 0
    assert "go on with" not in capsys.readouterr().out
    words[-1] = str(tmp_path / "reached")
    assert main([*words, "--target-return", "1", "--quiet"]) == 0
    assert "go on with" not in capsys.readouterr().out


def test_a_refused_start_of_several_seeds_leaves_no_folder(tmp_path: Path) -> None:
    folder = tmp_path / "parent"
    fields = FIELDS | {"replay_dir": "/proc/nowhere"}
    with pytest.raises(QfleetError):
        qfleet.train_seeds(2, "CartPole-v1", **fields, run_dir=folder)
    assert not folder.exists()


@pytest.mark.slow
def test_killed_seeds_are_finished_by_the_command_line(tmp_path: Path) -> None:
    folder = tmp_path / "parent"
    options = "--preset none --engine serial --steps 3000 --learning-starts 40 --eval-freq 1000"
    options += " --checkpoint-freq 500 --no-tensorboard --quiet"
    words = ["train", "CartPole-v1", *options.split(), "--seeds", "3", "--run-dir", str(folder)]
    process = start_qfleet(*words)
    second = folder / "seed-1" / "checkpoints"
    wait_until(lambda: has_checkpoint(second), "a checkpoint of the second seed", process=process)
    process.send_signal(signal.SIGKILL)
    finish(process, "the kill")
    assert not (folder / "aggregate.json").exists()
    resumed = start_qfleet("resume", str(folder), "--quiet")
    out, err = finish(resumed, "resume of all seeds")
    assert resumed.returncode == 0, err
    assert holds(out, "3 seeds", "IQM", str(folder))
    aggregate = read(folder / "aggregate.json")
    assert aggregate["seeds"] == list(SEEDS)
    assert aggregate["env_steps"] == 9000
    assert (folder / "plots" / "learning_curve.png").exists()


def test_more_steps_are_for_all_seeds(tmp_path: Path) -> None:
    """Also for those that had reached their target, and for those after an interrupt."""
    folder = tmp_path / "parent"
    qfleet.train_seeds(2, "CartPole-v1", **FIELDS, target_return=1.0, run_dir=folder)
    cut = qfleet.resume(folder, steps=400, options=RunOptions(stop_after=200))
    assert [run.result.env_steps for run in cut.runs] == [200, 200]  # type: ignore[union-attr]
    assert json.loads((folder / "experiment.json").read_text())["config"]["steps"] == 400


@pytest.mark.parametrize("seeds", [[0, -1], [0, 0], []])
def test_all_seeds_are_checked_before_the_first(seeds: list[int], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="seed"):
        qfleet.train_seeds(seeds, "CartPole-v1", **FIELDS, run_dir=tmp_path / "parent")
    assert not (tmp_path / "parent").exists()
