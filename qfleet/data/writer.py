"""The writer of a dataset. In: pieces of rows. Out: Parquet files of about ``PART_BYTES``.

A file is finished in a local folder when it is full or ``finish_file`` says so, described by a JSON
file of its own, and uploaded if the dataset is at a URL. A store that does not answer stops
nothing: the next finished file takes the earlier ones along. ``close`` makes the manifest.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
from pathlib import Path
from secrets import token_hex
from typing import Any

from qfleet.config.config import Config
from qfleet.core.errors import ConfigError, DataError, StorageError, StorageOutage
from qfleet.core.files import atomic_write_text
from qfleet.core.types import SKIP
from qfleet.data.manifest import (
    MANIFEST,
    SUFFIX,
    Manifest,
    Origin,
    Part,
    env_fields,
    first_origin,
    merge,
    open_store,
    part_names,
    shown,
    sidecar,
    staging_folder,
    upload,
    waiting_files,
)
from qfleet.data.rows import Rows, complete, concatenate, pyarrow, row_bytes, schema, to_table
from qfleet.storage.published import cannot_write, record_of
from qfleet.storage.remote import TEMPORARY, Store

GROUP_BYTES, MOST_GROUP_ROWS = 4 * 2**20, 4096
"""Most bytes, uncompressed, and rows of a row group. A reader loads whole groups and shuffles the
rows of several."""
PART_BYTES = 64 * 2**20
"""Compressed size at which a file is finished."""
PATIENCE_S = 10.0
"""How long a finished file waits for a store that does not answer; it goes with the next one."""
UPLOADS = 4
"""Most files that go with one: all at once after a long outage would stop the training."""


def check_target(url: str, adds: Config | None = None) -> None:
    """Raise unless a dataset can be written: packages, permissions, and no dataset there yet.

    ``adds``: the configuration of a run that may add files to a dataset of the same environment.
    It goes on if the store does not answer. An empty ``url`` means no recording.
    """
    if not url:
        return
    pyarrow("pyarrow.parquet")
    store = open_store(url)
    folder = staging_folder(store)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(folder, error) from None
    try:
        _check_contents(store, adds)
        probe = f"{TEMPORARY}{token_hex(8)}"
        store.write(probe, b"-")
    except StorageOutage as error:
        if adds is None:
            raise
        print(f"qfleet: {error}; until then, recorded files wait in '{folder}'", file=sys.stderr)
        return
    with contextlib.suppress(StorageError):  # a store may not let us remove
        store.remove(probe)


def _check_contents(store: Store, adds: Config | None) -> None:
    """Raise ConfigError unless there is no dataset, or one that files may be added to."""
    url = shown(store)
    if adds is None:
        if store.exists(MANIFEST) or part_names(store):
            raise ConfigError(
                f"'{url}' holds a dataset already; choose another folder or remove it"
            )
        if waiting_files(store):
            raise ConfigError(
                f"files of an earlier recording wait in '{staging_folder(store)}' for '{url}'; "
                f"upload them with `qfleet data merge {url}`, or remove them"
            )
    elif (there := first_origin(store)) is not None:
        ours = env_fields(adds)
        if differing := [n for n in ours if there.env.get(n, ours[n]) != ours[n]]:
            raise ConfigError(
                f"'{url}' holds a dataset with another {', '.join(differing)}; record into a new "
                "folder"
            )


class Writer:
    def __init__(self, url: str, origin: Origin, name: str, part_bytes: int = PART_BYTES) -> None:
        """``name`` must differ from that of every other writer of this dataset."""
        self.url, self._origin, self._name = url, origin, name
        self._store, self._part_bytes = open_store(url, PATIENCE_S), part_bytes
        self._folder = staging_folder(self._store)
        self._folder.mkdir(parents=True, exist_ok=True)
        rows = GROUP_BYTES // row_bytes(origin.spec)
        self.group_rows = max(1, min(rows, MOST_GROUP_ROWS))
        self._pieces: list[Rows] = []
        self._waiting = 0
        """Rows of ``_pieces``."""
        self._file: Any = None
        self._groups: list[list[int]] = []
        self._parts = 0
        self.upload_failure = ""
        """Why finished files are not uploaded yet; empty if they are."""

    @property
    def first_episode(self) -> int:
        """A number from which this writer may number 2^32 episodes; other writers have others."""
        digest = hashlib.sha256(self._name.encode()).digest()
        return int.from_bytes(digest[:4], "little") >> 1 << 32

    def add(self, piece: Rows) -> None:
        """Add a piece of rows (see ``Rows``); one that is longer than a row group is cut."""
        total = len(piece.action)
        for start in range(0, total, self.group_rows):
            stop = min(start + self.group_rows, total)
            part = complete(piece, start, stop, self._origin.spec.frame_stack)
            if self._pieces and self._waiting + stop - start > self.group_rows:
                self._write_group()
            self._pieces.append(part)
            self._waiting += len(part.action)

    def _write_group(self) -> None:
        rows = concatenate(self._pieces)
        self._pieces, self._waiting = [], 0
        usable = rows.flags & SKIP == 0
        counts = (len(usable), usable.sum(), (usable & (rows.step == 0)).sum())
        if self._file is None:
            self._file = pyarrow("pyarrow.parquet").ParquetWriter(
                self._path, schema(self._origin.spec), compression="zstd", compression_level=1,
                use_dictionary=False, write_statistics=False, write_page_checksum=True,
            )  # fmt: skip
        table = to_table(rows, self._origin.spec)
        self._file.write_table(table, row_group_size=len(usable))
        self._groups.append([int(count) for count in counts])
        if self._path.stat().st_size >= self._part_bytes:
            self._finish_part()

    @property
    def _path(self) -> Path:
        """The file that is being written."""
        return self._folder / f"{TEMPORARY}{self._part_name}"

    @property
    def _part_name(self) -> str:
        return f"part-{self._name}-{self._parts:05}{SUFFIX}"

    def _finish_part(self) -> None:
        self._file.close()
        path = self._path.rename(self._folder / self._part_name)
        part = Part(path.name, *record_of(path), self._groups)
        atomic_write_text(path.with_suffix(".json"), sidecar(part, self._origin))
        self._file, self._groups = None, []
        self._parts += 1
        try:
            upload(self._store, waiting_files(self._store, f"{self._name}-")[:UPLOADS])
            self.upload_failure = ""
        except StorageError as error:
            self.upload_failure = str(error)

    def finish_file(self) -> None:
        """Finish the file of the rows so far: a process that is killed loses later rows only."""
        if self._pieces:
            self._write_group()
        if self._file is not None:
            self._finish_part()

    def close(self) -> Manifest | None:
        """Finish the last file and the manifest, which is returned; None if there are no rows."""
        self.finish_file()
        try:
            return merge(self.url, PATIENCE_S) if self._parts else None
        except StorageError as error:
            raise DataError(
                f"{error}; finished files are in '{self._folder}', and on this machine "
                f"`qfleet data merge {shown(self._store)}` completes the dataset"
            ) from None
