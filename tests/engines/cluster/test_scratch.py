"""The temporary folder of a cluster; fault 51 of docs/faults.md without Ray."""

from __future__ import annotations

import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from qfleet.engines.cluster import scratch
from qfleet.storage.locks import RunLock
from support.processes import is_alive, needs_proc, python, start
from support.waiting import finish

psutil = pytest.importorskip("psutil")

OWNER = """
import pathlib, subprocess, sys
from qfleet.engines.cluster import scratch
scratch.temporary_root = lambda: pathlib.Path(sys.argv[1])
wait = [sys.executable, "-c", "import time; time.sleep(600)"]
with scratch.locked_folder() as folder:
    with (folder / "log").open("w") as log:
        agent = subprocess.Popen(wait, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    print(folder, agent.pid, flush=True)
    sys.stdin.read()
    agent.kill()
"""
"""Makes a folder, starts a process that writes into it, and waits."""


class Owner:
    def __init__(self, root: Path) -> None:
        self.process = start(python("-c", OWNER, str(root)), stdin=subprocess.PIPE)
        folder, pid = self.process.stdout.readline().split()
        self.folder, self.agent = Path(folder), int(pid)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(scratch, "temporary_root", lambda: tmp_path)
    yield tmp_path
    for process in scratch._users(psutil, tmp_path):
        process.kill()


def test_the_folder_is_ours_alone_and_gone_after_an_error(root: Path) -> None:
    def use() -> None:
        with scratch.locked_folder() as folder:
            (folder / "left").write_text("over")
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        use()
    assert list(root.iterdir()) == []


def test_a_long_temporary_folder_leaves_room_for_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    for length in range(1, 60):
        usual = "/" + "x" * (length - 1)
        monkeypatch.setattr(scratch.tempfile, "gettempdir", lambda usual=usual: usual)
        folder = scratch.temporary_root() / "qfleet-12345678"
        session = folder / "ray" / "session_2026-11-15_17-00-07_820450_1234567"
        assert len(str(session / "sockets" / "plasma_store")) <= 103


@needs_proc
def test_folders_and_processes_of_killed_owners_are_removed_and_no_others(root: Path) -> None:
    dead, living = Owner(root), Owner(root)
    reader = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"], stdin=(dead.folder / "log").open()
    )
    foreign = {root / name for name in ("qfleet-old", "qfleet-starting", "qfleet-link")}
    (root / "qfleet-old").mkdir()  # of a version without locks
    (root / "qfleet-starting").mkdir()
    (root / "qfleet-starting" / ".lock").touch()  # not locked yet
    (root / "qfleet-link").symlink_to(living.folder)
    try:
        dead.process.kill()
        dead.process.wait()
        assert is_alive(dead.agent)
        scratch.sweep(psutil)
        assert not is_alive(dead.agent)
        assert not dead.folder.exists()
        assert is_alive(living.agent)
        assert is_alive(reader.pid)
        assert (living.folder / "log").exists()
        assert all(path.exists() for path in foreign)
        finish(living.process, "the end of the living owner")
        assert not living.folder.exists()
    finally:
        for process in (dead.process, living.process, reader):
            process.kill()
            process.wait()


def test_a_run_in_a_folder_of_such_a_name_is_kept(root: Path) -> None:
    run = root / "qfleet-cartpole"
    run.mkdir()
    with RunLock(run):
        (run / "config.json").write_text("{}")
    scratch.sweep(psutil)
    assert (run / "config.json").exists()
