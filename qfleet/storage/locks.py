"""The lock of a folder, against a second writer: that of a run, or of a cluster's own files."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from pathlib import Path
from types import TracebackType

from qfleet.core.errors import ConfigError, RunBusyError
from qfleet.core.files import read_text

_LOOKS, _LOOK_S = 3, 0.01
"""Tries of a lock, and seconds between them: ``is_locked`` in another process holds it briefly."""


class RunLock:
    """A lock on ``<run>/.lock``; the system releases it when the process ends, even by SIGKILL."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None

    def __enter__(self) -> RunLock:
        try:
            descriptor = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o644)
        except OSError as error:
            raise ConfigError(f"cannot lock run folder '{self.path}': {error.strerror}") from None
        try:
            _lock(descriptor)
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        except BlockingIOError:
            os.close(descriptor)
            raise _busy(self.path) from None
        except OSError as error:
            os.close(descriptor)
            raise ConfigError(f"cannot lock run folder '{self.path}': {error.strerror}") from None
        self._descriptor = descriptor
        _held.add(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # The file is not removed: otherwise two processes could lock two files of the same name.
        self.close()

    def is_in_place(self) -> bool:
        """Return whether the folder still has the file that this lock holds."""
        try:
            ours = os.fstat(-1 if self._descriptor is None else self._descriptor)
            there = os.stat(self.path / ".lock")
        except OSError:
            return False
        return os.path.samestat(there, ours)

    def renew(self) -> None:
        """Lock the folder again after it was deleted and made anew, perhaps by another run."""
        self.close()
        self.__enter__()

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
            _held.discard(self)


def _lock(descriptor: int) -> None:
    """Acquire the lock or raise BlockingIOError.

    It retries, because ``is_locked`` in another process holds a shared lock for a moment.
    """
    for _ in range(_LOOKS):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            time.sleep(_LOOK_S)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def is_locked(path: Path) -> bool:
    """Return whether a process holds the lock of this run's folder."""
    try:
        descriptor = os.open(path / ".lock", os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


def check_idle(path: Path) -> None:
    """Raise RunBusyError if a process holds the lock of this run's folder."""
    if is_locked(path):
        raise _busy(path)


def _busy(path: Path) -> RunBusyError:
    try:
        pid = read_text(path / ".lock", errors="replace")[:20]
    except OSError:
        pid = ""
    return RunBusyError(
        f"folder '{path}' is in use by process {pid or 'unknown'}; "
        "wait for it, stop it, or choose another name"
    )


_held: set[RunLock] = set()


def _close_in_child() -> None:
    """Close inherited locks, so that a forked env worker whose parent died keeps no run locked."""
    for lock in list(_held):
        with contextlib.suppress(OSError):
            lock.close()


os.register_at_fork(after_in_child=_close_in_child)
