"""Faults 25, 41 and 45 of docs/faults.md: a full disk, a deleted folder, another directory."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import qfleet
from qfleet.core.errors import ConfigError, RunBusyError
from qfleet.core.files import append_bytes
from qfleet.storage.checkpoint import list_checkpoints
from qfleet.training.run import Run
from qfleet.training.run_state import RunOptions, RunState
from support.configs import tiny_config
from support.faulty_envs import TINY, result_of
from support.messages import holds

LOGGED = TINY | {"tensorboard": True, "log_interval": 40, "checkpoint_freq": 200}


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(folder)]
    if sys.platform != "linux" or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("needs the right to mount a tmpfs (root on Linux)")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def fill(disk: Path) -> None:
    """Write until nothing more fits."""
    with (disk / "other").open("wb", 0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass


def steps_logged(folder: Path) -> list[int]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["env_steps"] for line in lines]


@pytest.mark.slow
def test_a_run_survives_a_full_disk_and_its_result_says_so(
    disk: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = disk / "run"

    def strike(run: RunState) -> None:
        if run.parts.clock.env_steps == 300:
            fill(disk)

    shown = RunOptions(display="plain")
    trained = qfleet.train("CartPole-v1", **LOGGED, run_dir=folder, callbacks=strike, options=shown)
    told = capfd.readouterr().err
    assert trained.result.env_steps == 600
    assert trained.curve is None
    faults = result_of(folder)["faults"]
    # A line or two still fit into the last page of a file.
    assert faults["metrics"] >= 2
    assert faults["tensorboard"] >= 2
    assert faults["checkpoint"] >= 2
    assert set(steps_logged(folder)) < set(range(0, 601, 40))
    assert holds(told, "metrics ×", "No space left", "learning_curve.png")
    assert "Traceback" not in told
    assert list_checkpoints(folder / "checkpoints") == [200]
    (disk / "other").unlink()
    again = qfleet.resume(folder)
    assert again.result.env_steps == 600
    assert steps_logged(folder)[-1] == 600
    assert again.curve is not None


def test_a_run_writes_again_once_there_is_space(disk: Path) -> None:
    folder = disk / "run"

    def strike(run: RunState) -> None:
        if run.parts.clock.env_steps == 220:
            fill(disk)
        if run.parts.clock.env_steps == 420:
            (disk / "other").unlink()

    trained = qfleet.train("CartPole-v1", **LOGGED, run_dir=folder, callbacks=strike)
    lost = set(range(40, 601, 40)) - set(steps_logged(folder))
    assert lost
    assert lost <= set(range(240, 401, 40))
    assert trained.result.faults["metrics"] == len(lost)
    assert list_checkpoints(folder / "checkpoints")[-1] == 600
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = reader.EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    missing = set(range(40, 601, 40)) - {e.step for e in events.Scalars("time/env_steps")}
    assert missing <= set(range(240, 401, 40))
    assert trained.result.faults["tensorboard"] == len(missing) > 0


def test_a_full_disk_refuses_a_new_run(disk: Path) -> None:
    (disk / "run").mkdir()
    fill(disk)
    with pytest.raises(ConfigError, match=r"run folder .* No space left"):
        qfleet.train("CartPole-v1", **LOGGED, run_dir=disk / "run")


def test_bytes_are_appended_whole_or_not_at_all(disk: Path) -> None:
    path = disk / "file"
    append_bytes(path, b"first\n")
    with pytest.raises(OSError, match="No space left"):
        append_bytes(path, bytes(8 * 2**20))
    assert path.read_bytes() == b"first\n"
    append_bytes(path, b"second\n")
    assert path.read_bytes() == b"first\nsecond\n"


def test_a_deleted_folder_is_made_again(tmp_path: Path) -> None:
    folder = tmp_path / "run"

    def strike(run: RunState) -> None:
        if run.parts.clock.env_steps == 420:
            shutil.rmtree(folder)

    trained = qfleet.train("CartPole-v1", **LOGGED, run_dir=folder, callbacks=strike)
    assert result_of(folder)["faults"]["folder"] == 1
    assert trained.result.env_steps == 600
    assert min(steps_logged(folder)) == 440
    again = qfleet.resume(folder, steps=700)
    assert again.result.env_steps == 700


def test_a_run_leaves_a_folder_in_which_another_has_begun(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    others: list[Run] = []

    def strike(run: RunState) -> None:
        if run.parts.clock.env_steps == 300:
            shutil.rmtree(folder)
            others.append(Run(tiny_config(steps=200), folder, RunOptions()))

    with pytest.raises(RunBusyError, match="in use"):
        qfleet.train("CartPole-v1", **LOGGED, run_dir=folder, callbacks=strike)
    assert not (folder / "result.json").exists()
    assert others[0].go().env_steps == 200


@pytest.mark.slow
def test_an_environment_may_change_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    env: dict[str, Any] = {
        "env": "support.faulty_envs:FaultyEnv",
        "env_kwargs": {"fault": "chdir", "every": 7, "folder": str(tmp_path / "elsewhere")},
    }
    fields = LOGGED | {"steps": 200, "checkpoint_freq": 100}
    seeds = qfleet.train_seeds(2, **env, **fields, run_dir="runs/one", replay_dir="replay")
    assert not os.listdir(tmp_path / "elsewhere")
    assert Path.cwd() == tmp_path
    assert sorted(os.listdir(tmp_path)) == ["elsewhere", "replay", "runs"]
    for run in seeds.runs:
        assert list_checkpoints(run.folder / "checkpoints")[-1] == 200
        assert run.policy("last").act([0.0, 1.0]) in (0, 1)
    assert qfleet.resume("runs/one/seed-1", steps=240, trust=True).result.env_steps == 240


def test_links_in_a_run_folder_are_not_written_through(tmp_path: Path) -> None:
    folder, victim = tmp_path / "run", tmp_path / "victim"
    victim.write_text("mine")
    qfleet.train("CartPole-v1", **LOGGED, run_dir=folder)
    (folder / ".reserve").symlink_to(victim)
    (folder / "population.jsonl").symlink_to(victim)
    qfleet.resume(folder, steps=640)
    assert victim.read_text() == "mine"
    (folder / "link").symlink_to(victim)
    with pytest.raises(OSError, match="symbolic link"):
        append_bytes(folder / "link", b"more")
