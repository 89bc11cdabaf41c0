"""A run as it is stored at a URL, and the local copies of it.

    <url>/objects/<sha256>    contents of files; frames that checkpoints share are one object
    <url>/index.json          path → size and SHA-256 of every file of the run, written last
    <url>/leases/<n>.json     which process may publish (see `lease.py`)

In: a Store. Out: local folders that verbs read like any run's, verified by the index.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from qfleet.core.errors import ConfigError, StorageError, StorageMissing, UnknownNameError, one_line
from qfleet.core.files import MOST_JSON_BYTES
from qfleet.core.urls import public_url
from qfleet.storage.remote import TEMPORARY, TRANSFER_S, Store

INDEX, OBJECTS = "index.json", "objects"
CACHE_DIR, CACHE_BYTES = "QFLEET_CACHE_DIR", "QFLEET_CACHE_BYTES"
"""Environment variables: the folder of local copies, and the most that copies for reading take."""
DEFAULT_CACHE_BYTES = 20 * 2**30
_FORMAT = "qfleet-run-1"
_PATH = re.compile(r"[A-Za-z0-9_][\w.-]*(/[A-Za-z0-9_][\w.-]*){0,4}", re.ASCII)
"""Paths that an index may list: neither absolute nor with '..', and no hidden files."""
_SHA256 = re.compile(r"[0-9a-f]{64}")
_ATTEMPTS = 3
_IN_USE = 16
"""Files of one URL that were asked for last: the cache keeps them, because they may be in use."""


class Record(NamedTuple):
    """Size and SHA-256 of a file."""

    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class Index:
    """The files of a run at a URL."""

    files: dict[str, Record]
    lease: int
    """Number of the lease under which it was written."""
    written_s: float = 0.0
    """When it was written, in seconds since 1970; 0 if unknown."""

    def to_json(self) -> bytes:
        written = {"lease": self.lease, "written_s": time.time()}
        body = {"format": _FORMAT, **written, "files": self.files}
        return json.dumps(body, indent=1).encode()

    def has_progress(self) -> bool:
        """Return whether the run has logged, or has a policy or a checkpoint."""
        logged = self.files.get("metrics.jsonl", Record(0, "")).size_bytes > 0
        return logged or any(path.endswith("/manifest.json") for path in self.files)

    def newest_checkpoint(self) -> str:
        """Return the folder of the newest checkpoint, or '' if there is none."""
        folders = {path.rpartition("/")[0] for path in self.files if path.startswith("checkpoints")}
        return max(folders, key=lambda path: (len(path), path), default="")


def object_name(sha256: str) -> str:
    return f"{OBJECTS}/{sha256}"


def read_index(store: Store) -> Index | None:
    """Return the index, which may be anyone's data; None if there is no run."""
    try:
        body = json.loads(store.read(INDEX, MOST_JSON_BYTES))
        if body["format"] != _FORMAT:
            raise ValueError(f"its format is {str(body['format'])[:40]!r}, not {_FORMAT!r}")
        files = {path: _record(path, entry) for path, entry in body["files"].items()}
        return Index(files, int(body["lease"]), float(body.get("written_s", 0.0)))
    except StorageMissing:
        return None
    except (
        ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError
    ) as error:  # fmt: skip
        raise StorageError(
            f"'{store.shown}/{INDEX}' is malformed ({one_line(error)}); publish the run again"
        ) from None


def require_index(store: Store) -> Index:
    """Return the index, or raise UnknownNameError if there is no run."""
    if (index := read_index(store)) is None:
        raise UnknownNameError("run", store.shown, [], "there is no run at this URL")
    return index


def _record(path: str, entry: Any) -> Record:
    size_bytes, sha256 = entry
    if not _PATH.fullmatch(path) or not _SHA256.fullmatch(sha256):
        raise ValueError(f"entry {path[:60]!r} is refused")
    return Record(int(size_bytes), sha256)


def record_of(path: Path) -> Record:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return Record(path.stat().st_size, digest)


def cache_dir() -> Path:
    """Return the folder of local copies."""
    if chosen := os.environ.get(CACHE_DIR):
        return Path(chosen).absolute()
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "qfleet" / "urls"


def working_folder(url: str) -> Path:
    """Return the local folder in which a run that is published to this URL works."""
    return local_folder("runs", url)


def local_folder(kind: str, url: str) -> Path:
    """Return the folder of a URL below ``kind``: runs, read (copies) or recordings (datasets)."""
    # Without what messages do not show: commands that they print must find the same folder.
    url = public_url(url).rstrip("/")
    above, _, last = url.rpartition("/")
    if re.fullmatch(r"seed-\d+", last):  # beside the other seeds, as in a local folder
        return local_folder(kind, above) / last
    last = re.sub(r"[^A-Za-z0-9._]+", "-", last).strip(".-")[-40:] or "run"
    return cache_dir() / kind / f"{last}-{hashlib.sha256(url.encode()).hexdigest()[:16]}"


def fetch(
    store: Store, folder: Path, needs: str, before_file: Callable[[], object] = lambda: None
) -> Index:
    """Bring the files of a run into ``folder``, verified; those that it has are not downloaded.

    ``needs``: ``summary`` (configuration, metrics, result), ``best`` or ``last`` (also that policy;
    best is last if there is none), ``all``. A file that is missing or damaged at the store is left
    out and reported. ``before_file`` is called before every file.
    """
    index = require_index(store)
    for _ in range(_ATTEMPTS):
        try:
            hits, downloaded, damaged = _fetch_files(
                store, _select(index, needs), folder, before_file
            )
        except OSError as error:
            raise cannot_write(folder, error) from None
        if not damaged:
            break
        # The run may have published meanwhile and removed an old checkpoint.
        before, index = index, require_index(store)
        if index == before:
            break
    _drop_others(folder, index)
    line = f"'{store.shown}': {hits} files from the cache, {len(downloaded)} downloaded"
    line += f" ({sum(downloaded) / 1e6:,.1f} MB)"
    for path, reason in damaged.items():
        line += f"; '{path}' is left out: {reason}"
    print(f"qfleet: {line}", file=sys.stderr)
    return index


def fetch_to_read(store: Store, needs: str) -> Path:
    """Return a local copy of a run, in the cache, for reading."""
    folder = local_folder("read", store.url)
    index = fetch(store, folder, needs)
    _evict(keep={folder / path for path in _select(index, needs)})
    return folder


class CachedFiles:
    """Verified copies of files at a URL, in the cache for reading; threads may share it."""

    def __init__(self, store: Store) -> None:
        self._store, self._folder = store, local_folder("read", store.url)
        self._verified, self._recent = set[str](), deque[Path](maxlen=_IN_USE)
        self._lock = threading.Lock()
        self._of_file = defaultdict[str, threading.Lock](threading.Lock)

    def local(self, name: str, record: Record) -> Path:
        """Return the path of a copy; it is downloaded unless the cache has it."""
        path = self._folder / name
        with self._lock:
            self._recent.append(path)
            of_file = self._of_file[name]
        with of_file:
            try:
                if name in self._verified and path.is_file():
                    os.utime(path)
                    return path
                was_there = _bring(self._store, name, path, record)
            except OSError as error:
                raise cannot_write(self._folder, error) from None
            if was_there is None:
                raise StorageError(
                    f"'{self._store.shown}/{name}' is damaged: its SHA-256 differs; copy it again"
                )
            self._verified.add(name)
        if not was_there:
            with self._lock:
                _evict(keep=self._recent)
        return path


def _select(index: Index, needs: str) -> dict[str, Record]:
    prefixes = ["config.json", "metrics.jsonl", "result.json"]
    if needs != "summary":
        has_best = "best/manifest.json" in index.files
        newest = index.newest_checkpoint() or "checkpoints"
        prefixes += ["agents/", "best/" if needs == "best" and has_best else f"{newest}/"]
    return {
        path: record
        for path, record in index.files.items()
        if needs == "all" or path.startswith(tuple(prefixes))
    }


def _fetch_files(
    store: Store, wanted: Mapping[str, Record], folder: Path, before_file: Callable[[], object]
) -> tuple[int, list[int], dict[str, str]]:
    """Return the number of files that were there, sizes of those downloaded, and path → damage."""
    hits, downloaded, damaged, places = 0, list[int](), dict[str, str](), dict[str, Path]()
    for path, record in wanted.items():
        before_file()
        local = folder / path
        source = places.get(record.sha256)
        try:
            was_there = _bring(store, object_name(record.sha256), local, record, source)
        except StorageMissing:
            damaged[path] = "its object is missing"
            continue
        if was_there is None:
            damaged[path] = "its object is damaged (SHA-256)"
            continue
        hits += was_there
        downloaded += [] if was_there or source else [record.size_bytes]
        places[record.sha256] = local
    return hits, downloaded, damaged


def _bring(
    store: Store, name: str, local: Path, record: Record, source: Path | None = None
) -> bool | None:
    """Return whether ``local`` was right already, after having fetched it if not; None: damaged.

    ``source``: a local file with the same contents.
    """
    if local.is_file() and record_of(local) == record:
        os.utime(local)  # the cache removes what was used least recently
        return True
    local.parent.mkdir(parents=True, exist_ok=True)
    if source is None:
        store.download(name, local)
    else:
        local.unlink(missing_ok=True)
        shutil.copyfile(source, local)
    if record_of(local) != record:
        local.unlink(missing_ok=True)
        return None
    return False


def cannot_write(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"cannot write into '{folder}': {error.strerror or error}; free space there or set "
        "--cache-dir"
    )


def _drop_others(folder: Path, index: Index) -> None:
    """Remove checkpoints and policies that the run does not have any more."""
    for snapshot in [*folder.glob("checkpoints/*"), *folder.glob("agents/*/best"), folder / "best"]:
        if f"{snapshot.relative_to(folder).as_posix()}/manifest.json" not in index.files:
            shutil.rmtree(snapshot, ignore_errors=True)


def _evict(keep: Collection[Path]) -> None:
    """Remove the least recently used files until the rest fits into the cache."""
    try:
        limit_bytes = int(os.environ.get(CACHE_BYTES, DEFAULT_CACHE_BYTES))
    except ValueError:
        raise ConfigError(
            f"{CACHE_BYTES} must be a number of bytes, got {os.environ[CACHE_BYTES]!r}"
        ) from None
    found = []
    for path in (cache_dir() / "read").rglob("*"):
        with contextlib.suppress(OSError):  # another process may have removed it
            if path.is_file():
                found.append((path.stat(), path))
    total_bytes = sum(status.st_size for status, _ in found)
    for status, path in sorted(found, key=lambda pair: pair[0].st_mtime_ns):
        if total_bytes <= limit_bytes:
            break
        is_arriving = path.name.startswith(TEMPORARY) and time.time() - status.st_mtime < TRANSFER_S
        if path not in keep and not is_arriving:
            with contextlib.suppress(OSError):  # another process may have removed it
                path.unlink()
            total_bytes -= status.st_size
