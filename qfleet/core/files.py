"""Building blocks of crash-safe writes; ``atomic_file`` is the complete sequence.

A new or renamed file survives a crash once its folder was synced (``sync_folder``).
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any


def write_point(name: str) -> None:
    """Do nothing. Called before every step that a crash could interrupt; tests replace it to crash
    there."""


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
