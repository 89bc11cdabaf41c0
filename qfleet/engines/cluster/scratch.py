"""The temporary folder of a cluster that qfleet starts, and the removal of abandoned ones.

A folder is locked by the process that made it. The system releases the lock when that process
ends, even by SIGKILL: then the next start removes the folder and ends Ray's processes in it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from qfleet.core.files import read_text
from qfleet.storage.locks import RunLock, is_locked

GRACE_S = 30.0
"""Time that killed processes have to end."""
_PREFIX = "qfleet-"
_MARK = ".cluster"
"""A file that only folders of clusters have: a run may lie in a folder of such a name too."""
_LONGEST_TMP = 20
"""Ray's sockets lie below the temporary folder. Their paths have 103 bytes at most (macOS), some 80
of which are our names and Ray's."""


def temporary_root() -> Path:
    usual = tempfile.gettempdir()
    return Path(usual if len(usual) < _LONGEST_TMP else "/tmp")


@contextlib.contextmanager
def locked_folder() -> Iterator[Path]:
    """Create a folder that only this user can enter, and remove it afterwards."""
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=temporary_root()))
    with RunLock(folder):
        (folder / _MARK).touch()
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def sweep(psutil: Any) -> None:
    """Remove this user's folders whose process is dead, and end the processes that use them."""
    for folder in temporary_root().glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # another process removes it, or it is another user's
            if _is_abandoned(folder):
                kill(psutil, _users(psutil, folder))
                shutil.rmtree(folder, ignore_errors=True)


def _is_abandoned(folder: Path) -> bool:
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        return False
    # The pid is written after the lock was taken: a file without one is about to be locked.
    is_cluster = (folder / _MARK).is_file()
    return is_cluster and not is_locked(folder) and bool(read_text(folder / ".lock"))


def _users(psutil: Any, folder: Path) -> list[Any]:
    """Return this user's processes that write to a file in the folder, such as a log of Ray."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            is_ours = process.uids().real == os.getuid() and process.pid != os.getpid()
            for file in process.open_files() if is_ours else ():
                writes = getattr(file, "mode", "w") != "r"  # macOS does not say
                if writes and Path(file.path).is_relative_to(folder):
                    found.append(process)
                    break
    return found


def kill(psutil: Any, processes: list[Any]) -> None:
    """Kill all of them and wait until they are dead; zombies count as dead.

    The process that inherits orphans may reap them late or, in a container, never.
    """
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    until_s = time.monotonic() + GRACE_S
    while processes and time.monotonic() < until_s:
        processes = [process for process in processes if _is_alive(psutil, process)]
        time.sleep(0.01)


def _is_alive(psutil: Any, process: Any) -> bool:
    try:
        if process.ppid() == os.getpid():
            process.wait(0)
            return False
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.TimeoutExpired:
        return True
    except psutil.NoSuchProcess:
        return False
