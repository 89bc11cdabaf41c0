"""Building blocks of crash-safe writes; ``atomic_file`` is the complete sequence.

A new or renamed file survives a crash once its folder was synced (``sync_folder``).
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from qfleet.core.errors import ConfigError

MOST_JSON_BYTES = 256 * 2**20  # far above the files that qfleet writes


def write_point(name: str) -> None:
    """Do nothing. Called before every step that a crash could interrupt; tests replace it to crash
    there."""


def read_text(path: Path, most_bytes: int | None = MOST_JSON_BYTES, errors: str = "strict") -> str:
    """Return the text of a regular file; raise OSError if it is a pipe, a device, or too large."""
    with open_regular(path) as file:
        if most_bytes is not None and os.fstat(file.fileno()).st_size > most_bytes:
            raise OSError(errno.EFBIG, f"larger than {most_bytes} bytes", str(path))
        with io.TextIOWrapper(file, encoding="utf-8", errors=errors) as text:
            return text.read()


def open_regular(path: Path) -> io.BufferedReader:
    """Open a regular file to read bytes; raise OSError if it is a folder, a pipe or a device."""
    # Without O_NONBLOCK, opening a pipe that nobody writes to would block.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return open(descriptor, "rb")


def write_text(path: Path, text: str) -> None:
    """Write a text file that does not exist yet, and sync it."""
    write_point(f"create {path.name}")
    with path.open("x", encoding="utf-8") as file:
        file.write(text)
        sync(file, path.name)


def sync_folder(path: Path) -> None:
    """Sync a folder, so that files created or renamed in it survive a crash."""
    write_point("sync folder")
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename(source: Path, target: Path) -> None:
    write_point(f"rename {_role(source)} to {_role(target)}")
    source.rename(target)


def remove_tree(path: Path) -> None:
    write_point(f"remove {_role(path)}")
    shutil.rmtree(path)


def _role(path: Path) -> str:
    """Return a folder's name without the process id that temporary names end in."""
    return path.name.rsplit("-", 1)[0] if path.name.startswith(".tmp-") else path.name


def sync(file: IO[Any], name: str) -> None:
    file.flush()
    write_point(f"sync {name}")
    os.fsync(file.fileno())


def atomic_write_text(path: Path, text: str) -> None:
    """Replace a file atomically: a reader, or a crash, finds either the old text or the new."""
    with atomic_file(path) as tmp:
        write_text(tmp, text)


def _open_to_write(path: str, flags: int) -> int:
    # Not through a link to a file elsewhere; a pipe that nobody reads must not block.
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)


@contextlib.contextmanager
def writing(what: str, folder: Path) -> Iterator[None]:
    """Turn a failure to write into a ConfigError."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"cannot write {what} into '{folder}': {error.strerror}; free space there or choose "
            "another --run-dir"
        ) from None


def append_bytes(path: Path, data: bytes) -> None:
    """Append all of ``data`` to a file; if the disk is full, append nothing and raise OSError."""
    with open(path, "ab", buffering=0, opener=_open_to_write) as file:
        size = file.tell()
        try:
            if (file.write(data) or 0) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            file.truncate(size)
            raise


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield the path of a new file, to be written and synced; then let it replace ``path``."""
    tmp = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        tmp.unlink(missing_ok=True)
        yield tmp
        rename(tmp, path)
        sync_folder(path.parent)
    finally:
        tmp.unlink(missing_ok=True)


def change_folder(folder: Path) -> None:
    """Return to a working directory that an environment may have left; it may be gone."""
    with contextlib.suppress(OSError):
        os.chdir(folder)


def short(path: Path) -> Path:
    """Return a path as it is written from the working directory."""
    with contextlib.suppress(OSError, ValueError):  # not below it, or it is gone
        return path.relative_to(Path.cwd())
    return path
