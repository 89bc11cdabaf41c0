"""Run folders: names that stay inside, one writer each, texts that are never half written."""

from __future__ import annotations

import errno
import math
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import qfleet
from qfleet.core import files
from qfleet.core.errors import ConfigError, RunBusyError
from qfleet.core.files import atomic_write_text
from qfleet.storage import rundir
from qfleet.storage.locks import RunLock
from qfleet.storage.rundir import check_name, default_name, new_run_dir, remove_run
from support.configs import tiny_fields
from support.messages import says
from support.waiting import PHASE_S, deadline

BAD_NAMES = [
    "",
    " ",
    ".",
    "..",
    ".hidden",
    "-rf",
    "/etc/passwd",
    "a/b",
    "a/../b",
    "../up",
    "a\\b",
    "nul\0",
    "line\nend",
    "\ud800",
    "x" * 101,
    "試" * 90,
]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_unsafe_names_are_refused_in_one_line(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="run name") as caught:
        new_run_dir(tmp_path, name)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["a", "run 1", "a..b", "Pong-v5_dqn", "äöü", "x" * 100])
def test_safe_names_pass(name: str) -> None:
    assert check_name(name) == name


NAMES = st.text(max_size=110) | st.text("./\\-a\0 ", max_size=8)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(name=NAMES)
def test_whatever_passes_is_one_folder_inside_the_root(name: str, tmp_path_factory: Any) -> None:
    root = tmp_path_factory.getbasetemp() / "fuzz"
    try:
        path = new_run_dir(root, name)
    except ConfigError:
        return
    assert path.resolve().parent == root.resolve()
    assert path.is_dir()
    path.rmdir()


@settings(max_examples=100, deadline=None, derandomize=True)
@given(env=st.text(max_size=150), seed=st.integers(0, 2**64))
def test_default_names_are_always_safe(env: str, seed: int) -> None:
    name = default_name(env, "dqn", seed)
    assert check_name(f"{name}-99") == f"{name}-99"
    assert f"dqn-s{seed}-" in name


def test_default_name_reads_well() -> None:
    stamp = r"-\d{8}-\d{6}"
    assert re.fullmatch("CartPole-v1-dqn-s0" + stamp, default_name("CartPole-v1", "dqn", 0))
    assert re.fullmatch("ALE-Pong-v5-c51-s7" + stamp, default_name("ALE/Pong-v5", "c51", 7))


def test_default_names_step_aside_and_given_ones_do_not(tmp_path: Path) -> None:
    made = [new_run_dir(tmp_path / "runs", "x", explicit=False).name for _ in range(3)]
    assert made == ["x", "x-2", "x-3"]
    given = new_run_dir(tmp_path / "runs", "mine")
    assert new_run_dir(tmp_path / "runs", "mine") == given  # nothing in it yet
    (given / "config.json").write_text("{}")
    (given / "checkpoints" / "100").mkdir(parents=True)
    with pytest.raises(ConfigError, match=says("mine'", "qfleet resume")):
        new_run_dir(tmp_path / "runs", "mine")


def test_a_folder_in_use_is_not_given_away(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    with (
        RunLock(tmp_path / "mine"),
        pytest.raises(RunBusyError, match=says("mine'", str(os.getpid()))),
    ):
        new_run_dir(tmp_path, "mine")


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("")
    with pytest.raises(ConfigError, match=says("File exists")):
        new_run_dir(tmp_path, "x")


def test_the_second_holder_is_refused_and_told_who_has_it(tmp_path: Path) -> None:
    with RunLock(tmp_path):
        with pytest.raises(RunBusyError, match=says(tmp_path.name, str(os.getpid()))):
            RunLock(tmp_path).__enter__()
        with pytest.raises(RunBusyError):  # the failed attempt released nothing
            RunLock(tmp_path).__enter__()
    with RunLock(tmp_path):
        pass


def test_a_lock_needs_its_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says("lock", "gone'")):
        RunLock(tmp_path / "gone").__enter__()


def test_a_killed_holder_lets_go_even_if_its_children_live(tmp_path: Path) -> None:
    told, tell = os.pipe()
    holder = os.fork()
    if holder == 0:
        signal.alarm(math.ceil(deadline(PHASE_S)))
        try:
            RunLock(tmp_path).__enter__()
            worker = os.fork()
            if worker == 0:
                signal.alarm(math.ceil(deadline(PHASE_S)))
                os.write(tell, str(os.getpid()).encode())
            signal.pause()
        finally:
            os._exit(0)
    worker = int(os.read(told, 20))
    try:
        with pytest.raises(RunBusyError, match=says(str(holder))):
            RunLock(tmp_path).__enter__()
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)
        os.kill(worker, 0)  # the orphan is there
        with RunLock(tmp_path):
            assert (tmp_path / ".lock").read_text() == str(os.getpid())
    finally:
        os.kill(worker, signal.SIGKILL)
        os.close(told)
        os.close(tell)


def test_text_is_replaced_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "result.json"
    atomic_write_text(path, "old ü")
    assert path.read_text(encoding="utf-8") == "old ü"
    points: list[str] = []
    monkeypatch.setattr(files, "write_point", points.append)
    atomic_write_text(path, "old ü")
    assert len(points) == 4
    for failing in range(3):  # the last one is after the rename
        passed = 0

        def fail(_: str, failing: int = failing) -> None:
            nonlocal passed
            passed += 1
            if passed == failing + 1:
                raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(files, "write_point", fail)
        with pytest.raises(OSError, match="No space"):
            atomic_write_text(path, "new")
        assert path.read_text(encoding="utf-8") == "old ü"
        assert [p.name for p in tmp_path.iterdir()] == ["result.json"]
    monkeypatch.setattr(files, "write_point", lambda _: None)
    atomic_write_text(path, "new")
    assert path.read_text() == "new"


def test_a_removal_that_is_interrupted_leaves_a_run_and_goes_on_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the next run in the folder would resume the checkpoints of the old one."""
    run = tmp_path / "run"
    qfleet.train("CartPole-v1", run_dir=run, **tiny_fields(steps=100, learning_starts=50))
    rmtree = rundir.shutil.rmtree

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(rundir.shutil, "rmtree", stop)
    with pytest.raises(KeyboardInterrupt):
        remove_run(run)
    assert (run / "checkpoints").is_dir()
    assert (run / "config.json").is_file()
    with pytest.raises(ConfigError, match=says("--overwrite")):
        new_run_dir(tmp_path, "run")
    monkeypatch.setattr(rundir.shutil, "rmtree", rmtree)
    remove_run(run)
    assert {path.name for path in run.iterdir()} <= {".lock"}
