"""Publish a run to a URL while it trains: what is committed in its folder, from a thread.

In: the local folder of a run. Out: objects and an index at the URL (`storage/published.py`). A
thread compares the folder with what is published, so training never waits for the store; after an
outage the next comparison catches up.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

from qfleet.core.errors import CheckpointError, ConfigError, QfleetError, RunBusyError, one_line
from qfleet.core.files import atomic_write_text, read_text
from qfleet.storage import published
from qfleet.storage.checkpoint import has_checkpoint
from qfleet.storage.lease import Lease
from qfleet.storage.locks import check_idle
from qfleet.storage.published import INDEX, OBJECTS, Index, Record, object_name, record_of
from qfleet.storage.remote import Store
from qfleet.storage.snapshot import MANIFEST, read_manifest
from qfleet.training.callbacks import Callback, Callbacks, as_callbacks

POLL_S = 1.0
"""Seconds between comparisons of the folder with what is published."""
RETRY_S = 10.0
"""Seconds until the next attempt after one that failed."""
END_S, INTERRUPTED_S = 120.0, 20.0
"""Seconds that the end of a run waits for the store; after a signal the process must end soon."""
_LEASE = ".lease"
"""Local file with the number of the lease under which this folder was last equal to the URL."""
_FILES = (
    "config.json", "seeds.json", "metrics.jsonl", "result.json", "population.jsonl",
    "plots/[!.]*.png", "agents/*/config.json",
)  # fmt: skip
_SNAPSHOTS = (
    "checkpoints/[0-9]*", "checkpoints/.old-*", "best", ".old-best", "agents/*/best",
    "agents/*/.old-best",
)  # fmt: skip


Sources: TypeAlias = dict[str, tuple[Record, Path | bytes]]
"""Path in the run's folder → size and SHA-256, and the contents or a file with them."""


class Publisher(Callback):
    """Publishes the folder of one run to a URL, as its only writer; a context manager."""

    def __init__(self, url: str, *, resumes: bool = False) -> None:
        """Take the lease; raise RunBusyError if another process has it."""
        self._store, self.folder = Store(url), published.working_folder(url)
        if resumes and not has_checkpoint(self.folder / "checkpoints"):
            published.require_index(self._store)  # before anything is written there
        self._staged = self.folder.with_name(f"{self.folder.name}.publishing")
        self._lease = Lease(self._store)
        shutil.rmtree(self._staged, ignore_errors=True)  # of a process that was killed
        try:
            self._index = published.read_index(self._store)
            self._stored = {name.rpartition("/")[2] for name in self._store.names(OBJECTS)}
        except QfleetError:
            self._lease.release()
            raise
        self._seen: tuple[int, ...] = ()
        self._closing, self._failure = threading.Event(), ""
        self._is_superseded = False
        """Another process publishes to the URL now."""
        self._thread: threading.Thread | None = None
        self._run: Any = None

    def check_vacant(self, overwrite: bool) -> None:
        """Raise ConfigError if a run with progress is published there and not to be replaced."""
        if overwrite:
            self._index = None
        if self._index is not None and self._index.has_progress():
            url = self._store.shown
            raise ConfigError(
                f"'{url}' holds a run already; continue it with: qfleet resume {url}, or replace "
                "it with --overwrite (library: overwrite=True)"
            )

    def fetch(self) -> Path:
        """Return the local folder of the published run, in its newest state.

        What an earlier process on this machine could not publish is published now, unless another
        machine has published since.
        """
        check_idle(self.folder)  # a run may train there without publishing
        number, has_own = 0, has_checkpoint(self.folder / "checkpoints")
        with contextlib.suppress(OSError, ValueError):
            number = int(read_text(self.folder / _LEASE))
        is_newest = self._index is None or number >= self._index.lease
        if not (is_newest and has_own):
            if has_own:
                self._set_aside()
            index = published.fetch(self._store, self.folder, "all", self._lease.renew)
            atomic_write_text(self.folder / _LEASE, str(index.lease))
        else:
            self._publish()
        return self.folder

    def _set_aside(self) -> None:
        """Keep a folder with checkpoints that another machine's run has superseded at the URL."""
        kept = self.folder.with_name(f"superseded-{self._lease.number}-{self.folder.name}")
        self.folder.rename(kept)
        print(
            f"qfleet: another process has published to '{self._store.shown}' since; what this "
            f"machine had is kept in '{kept}'",
            file=sys.stderr,
        )

    def on_start(self, run: Any) -> None:
        self._check_lease(self._lease.renew())  # preparing the run may have taken minutes
        self._run = run
        run.show([f"publishing to {self._store.shown}"])
        self._thread = threading.Thread(target=self._keep_publishing, daemon=True, name="publisher")
        self._thread.start()

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, *_: object) -> None:
        """Publish the rest, wait for it, and release the lease."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(self._end_s())
            if self._thread.is_alive() or self._failure:
                how = f"`qfleet resume {self._store.shown}` on this machine publishes it"
                if self._is_superseded:
                    how = f"`qfleet resume {self.folder}` goes on with it, unpublished"
                print(
                    f"qfleet: '{self._store.shown}' lacks the end of the run: "
                    f"{self._failure or 'the store is slow'}; it is in '{self.folder}', and {how}",
                    file=sys.stderr,
                )
        if self._thread is None or not self._thread.is_alive():
            self._lease.release()  # otherwise it expires: the thread may still be writing

    def _end_s(self) -> float:
        return END_S if self._run.interrupted_by is None else INTERRUPTED_S

    def _keep_publishing(self) -> None:
        """Publish whenever the folder has changed; at the end of the run, until all is there."""
        ends_s = float("inf")
        while True:
            closing = self._closing.is_set()  # before publishing, which then includes the last file
            if closing:
                ends_s = min(ends_s, time.monotonic() + self._end_s())
            try:
                self._check_lease(self._lease.renew())
                self._publish()
                if self._failure:
                    self._run.show([f"'{self._store.shown}' is up to date again"])
                self._failure = ""
            except Exception as error:  # also a mistake of ours must not end the training
                self._failure = str(error) if isinstance(error, QfleetError) else one_line(error)
                if not closing:
                    self._run.faults("storage", f"not published, the run goes on: {self._failure}")
                if isinstance(error, RunBusyError):
                    self._is_superseded = True
                    return
            if closing and (not self._failure or time.monotonic() > ends_s):
                return
            if closing:
                time.sleep(POLL_S)
            else:
                self._closing.wait(RETRY_S if self._failure else POLL_S)

    def _check_lease(self, is_ours: bool) -> None:
        if not is_ours:
            raise RunBusyError(f"another process publishes to '{self._store.shown}' now")

    def _publish(self) -> None:
        """Make the URL equal to the folder: objects first, then the index, then remove the rest."""
        seen = tuple(self._times())
        if seen == self._seen:
            return
        sources = self._collect()
        if not any(path.startswith("checkpoints/") for path in sources):
            sources = self._collect()  # the run may just have replaced its only checkpoint
        files = {path: record for path, (record, _) in sources.items()}
        wanted = {record.sha256 for record in files.values()}
        # Staged files stay until they are uploaded: after an outage they are not verified again.
        for staged in self._staged.iterdir():
            if staged.name not in wanted:
                staged.unlink()
        for record, source in sources.values():
            if record.sha256 not in self._stored:
                self._upload(record, source)
        index = Index(files, self._lease.number)
        if self._index and self._index.newest_checkpoint() and not index.newest_checkpoint():
            raise CheckpointError(
                f"'{self.folder}' has lost its checkpoints; those at the URL are kept"
            )
        self._check_lease(not self._lease.is_lost())
        self._store.write(INDEX, index.to_json())
        self._index = index
        atomic_write_text(self.folder / _LEASE, str(self._lease.number))
        for sha256 in self._stored - wanted:
            self._check_lease(self._lease.renew())
            self._store.remove(object_name(sha256))
            self._stored.discard(sha256)
        self._seen = seen
        shutil.rmtree(self._staged, ignore_errors=True)

    def _upload(self, record: Record, source: Path | bytes) -> None:
        self._check_lease(self._lease.renew())
        if isinstance(source, bytes):
            self._store.write(object_name(record.sha256), source)
        else:
            self._store.upload(source, object_name(record.sha256))
        self._stored.add(record.sha256)

    def _times(self) -> Iterator[int]:
        """Yield times that change when the run commits something other than a line of metrics."""
        for pattern in ("*.json", "checkpoints", "best", "plots/[!.]*.png", "agents/*/best"):
            for path in sorted(self.folder.glob(pattern)):
                with contextlib.suppress(OSError):
                    yield path.stat().st_mtime_ns

    def _collect(self) -> Sources:
        """Return path → record and contents of all that is committed in the folder."""
        found: Sources = {}
        for path in [path for pattern in _FILES for path in self.folder.glob(pattern)]:
            with contextlib.suppress(FileNotFoundError):
                found[self._relative(path)] = _in_memory(path)
        self._staged.mkdir(parents=True, exist_ok=True)
        for pattern in _SNAPSHOTS:
            for folder in self.folder.glob(pattern):
                # While a snapshot is replaced, the old one has another name.
                final = folder.with_name(folder.name.removeprefix(".old-"))
                if folder == final or not final.exists():
                    files = self._stage(folder) or self._stage(final) or {}
                    found |= {f"{self._relative(final)}/{name}": own for name, own in files.items()}
        return found

    def _stage(self, folder: Path) -> Sources | None:
        """Return the files of a snapshot; None if it is damaged, or replaced at this moment.

        Those to be uploaded are linked, so that they stay when the run removes the snapshot.
        """
        found: Sources = {}
        try:
            manifest = read_manifest(folder)
            for name, stored in manifest.files.items():
                record = Record(stored.size_bytes, stored.sha256)
                staged = self._staged / record.sha256
                if record.sha256 not in self._stored and not staged.exists():
                    new = staged.with_suffix(".new")
                    new.unlink(missing_ok=True)
                    _link(folder / name, new)
                    if record_of(new) != record:
                        return None
                    new.rename(staged)
                found[name] = (record, staged)
            found[MANIFEST] = _in_memory(folder / MANIFEST)
            return found if read_manifest(folder) == manifest else None
        except (CheckpointError, FileNotFoundError):
            return None

    def _relative(self, path: Path) -> str:
        return path.relative_to(self.folder).as_posix()


@contextlib.contextmanager
def publishing(url: str | None, callbacks: Callbacks, overwrite: bool) -> Iterator[Callbacks]:
    """Yield the callbacks of a new run, with a publisher if it has a URL."""
    if url is None:
        yield callbacks
        return
    with Publisher(url) as publisher:
        publisher.check_vacant(overwrite)
        yield [*as_callbacks(callbacks), publisher]


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:  # the file system has no links
        shutil.copyfile(source, target)


def _in_memory(path: Path) -> tuple[Record, bytes]:
    data = path.read_bytes()
    return Record(len(data), hashlib.sha256(data).hexdigest()), data
