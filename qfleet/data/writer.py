"""The writer of a dataset. In: pieces of rows. Out: Parquet files of about ``PART_BYTES``.

A file is written to a local folder, moved to the dataset when it is full, and described by a JSON
file of its own; ``close`` merges all of these into the manifest.
"""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path
from typing import Any

from qfleet.core.types import SKIP
from qfleet.data.manifest import (
    SUFFIX,
    Manifest,
    Origin,
    Part,
    file_sha256,
    merge,
    open_store,
    write_sidecar,
)
from qfleet.data.rows import Rows, complete, concatenate, pyarrow, row_bytes, schema, to_table

GROUP_BYTES, MOST_GROUP_ROWS = 4 * 2**20, 4096
"""Most bytes, uncompressed, and rows of a row group. A reader loads whole groups and shuffles the
rows of several."""
PART_BYTES = 64 * 2**20
"""Compressed size at which a file is finished."""


class Writer:
    def __init__(self, url: str, origin: Origin, name: str, part_bytes: int = PART_BYTES) -> None:
        """``name`` must differ from that of every other writer of this dataset."""
        self._url, self._store, self._origin, self._name = url, open_store(url), origin, name
        self._part_bytes = part_bytes
        rows = GROUP_BYTES // row_bytes(origin.spec)
        self.group_rows = max(1, min(rows, MOST_GROUP_ROWS))
        self._pieces: list[Rows] = []
        self._waiting = 0
        """Rows of ``_pieces``."""
        self._folder = tempfile.TemporaryDirectory(prefix="qfleet-data-")
        self._file: Any = None
        self._groups: list[list[int]] = []
        self._parts = 0

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
        return Path(self._folder.name) / f"part-{self._name}-{self._parts:05}{SUFFIX}"

    def _finish_part(self) -> None:
        self._file.close()
        path = self._path
        part = Part(path.name, path.stat().st_size, file_sha256(path), self._groups)
        self._store.upload(path, path.name)
        write_sidecar(self._store, part, self._origin)
        path.unlink()
        self._file, self._groups = None, []
        self._parts += 1

    def close(self) -> Manifest | None:
        """Finish the last file and the manifest, which is returned; None if there are no rows."""
        if self._pieces:
            self._write_group()
        if self._file is not None:
            self._finish_part()
        self._folder.cleanup()
        return merge(self._url) if self._parts else None
