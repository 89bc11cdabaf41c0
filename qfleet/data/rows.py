"""Rows of a dataset: their columns, a Parquet file of them, and the check of every value read.

In: columns as numpy arrays. Out: the same columns, or a DataError with file and row. A row holds
what a row of the replay ring holds (one frame, action, reward, flags), and besides the episode, its
step, whether it was truncated, and the probability with which the action was chosen.
"""

from __future__ import annotations

import contextlib
import importlib
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from qfleet.core.errors import ConfigError, DataError, one_line
from qfleet.core.types import FIRST, SKIP, TERMINATED, EnvSpec
from qfleet.data.manifest import Part

SCALARS = {
    "action": "int32", "reward": "float32", "terminated": "bool", "truncated": "bool",
    "skip": "bool", "episode": "int64", "step": "int32", "probability": "float32",
}  # fmt: skip
"""Columns besides the observation and its mask; only ``probability`` may be null."""


class Rows(NamedTuple):
    """Columns of consecutive rows. Pieces of several environments may follow each other.

    A piece is complete in itself: it begins with an episode or with earlier rows that frame stacks
    need, and it ends with a row that is TERMINATED or SKIP. Those earlier rows, and a last row that
    only holds the next observation, are SKIP copies of rows that are stored elsewhere.
    """

    obs: NDArray[Any]
    """``[rows, *frame_shape]``."""
    action: NDArray[Any]
    reward: NDArray[Any]
    flags: NDArray[Any]
    truncated: NDArray[Any]
    episode: NDArray[Any]
    """Number of the episode, unique in the dataset."""
    step: NDArray[Any]
    """Steps of the episode before this row."""
    probability: NDArray[Any]
    """Probability of the action under the policy that acted; NaN: unknown."""

    def take(self, which: Any) -> Rows:
        return Rows(*(column[which] for column in self))


def concatenate(pieces: Sequence[Rows]) -> Rows:
    if len(pieces) == 1:
        return pieces[0]
    return Rows(*(np.concatenate(columns) for columns in zip(*pieces, strict=True)))


def complete(rows: Rows, start: int, stop: int, frame_stack: int) -> Rows:
    """Return the rows ``start`` … ``stop`` − 1 of one environment as a piece, with copies."""
    before = min(frame_stack - 1, int(rows.step[start]), start)
    ends = stop == len(rows.step) or rows.flags[stop - 1] & (SKIP | TERMINATED) != 0
    piece = rows.take(slice(start - before, stop if ends else stop + 1))
    flags, reward = piece.flags.copy(), piece.reward.copy()
    flags[:before] |= SKIP
    flags[-1] |= 0 if ends else SKIP
    reward[flags & SKIP != 0] = 0.0
    return piece._replace(flags=flags, reward=reward)


def pyarrow(module: str) -> Any:
    """Return a module of pyarrow, which is imported at first use."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ConfigError(
            "datasets need the package pyarrow, which is not installed; pip install 'qfleet[data]'"
        ) from None


def row_bytes(spec: EnvSpec) -> int:
    """Return the bytes of a row in memory."""
    return math.prod(spec.frame_shape) * spec.torch_dtype.itemsize + 30


def schema(spec: EnvSpec) -> Any:
    """Return the Parquet schema of rows of an environment."""
    pa, bare = pyarrow("pyarrow"), spec.unmasked
    frame_bytes = math.prod(bare.frame_shape) * spec.torch_dtype.itemsize
    fields = [pa.field("obs", pa.binary(frame_bytes), nullable=False)]
    if spec.is_masked:
        fields.append(pa.field("action_mask", pa.binary(spec.num_actions), nullable=False))
    types = {"bool": pa.bool_(), "float32": pa.float32(), "int32": pa.int32(), "int64": pa.int64()}
    for name, kind in SCALARS.items():
        fields.append(pa.field(name, types[kind], nullable=name == "probability"))
    return pa.schema(fields)


def to_table(rows: Rows, spec: EnvSpec) -> Any:
    """Return rows as an Arrow table."""
    pa, count, obs = pyarrow("pyarrow"), len(rows.action), rows.obs.reshape(len(rows.action), -1)
    columns = {}
    if spec.is_masked:
        columns["action_mask"] = _fixed(pa, (obs[:, -spec.num_actions :] != 0).astype(np.uint8))
        obs = obs[:, : -spec.num_actions]
    columns["obs"] = _fixed(pa, obs)
    values = {
        **rows._asdict(),
        "terminated": rows.flags & TERMINATED != 0,
        "skip": rows.flags & SKIP != 0,
    }
    kinds = schema(spec)
    for name, kind in SCALARS.items():
        array = np.ascontiguousarray(values[name], dtype=kind)
        unknown = np.isnan(array) if name == "probability" else None
        columns[name] = pa.array(array, type=kinds.field(name).type, mask=unknown)
    assert all(len(column) == count for column in columns.values())
    return pa.table([columns[name] for name in kinds.names], schema=kinds)


def _fixed(pa: Any, array: NDArray[Any]) -> Any:
    array = np.ascontiguousarray(array)
    kind = pa.binary(array.nbytes // max(len(array), 1))
    return pa.FixedSizeBinaryArray.from_buffers(kind, len(array), [None, pa.py_buffer(array)])


class PartFile:
    """A Parquet file of a dataset, opened for reading."""

    def __init__(self, part: Part, path: Path, spec: EnvSpec) -> None:
        self._part, self._spec = part, spec
        with self._reading():
            self._file = pyarrow("pyarrow.parquet").ParquetFile(
                path, page_checksum_verification=True
            )
            found = self._file.schema_arrow
            counts = [
                self._file.metadata.row_group(i).num_rows for i in range(self._file.num_row_groups)
            ]
        for field in schema(spec):
            kind = found.field(field.name).type if field.name in found.names else "missing"
            if kind != field.type:
                self._raise(0, f"column '{field.name}' is {kind}, and must be {field.type}")
        if counts != [rows for rows, *_ in part.groups]:
            self._raise(0, f"row groups of {counts} rows differ from the manifest")

    def read(self, group: int) -> Rows:
        """Return the rows of a row group after a check of every value."""
        spec, table = self._spec, self._columns(group)
        n = len(table["action"])
        bare, dtype = spec.unmasked, np.dtype(spec.obs_dtype)
        obs = np.frombuffer(table["obs"], dtype).reshape(n, *bare.frame_shape)
        skip, step, chance = table["skip"], table["step"], table["probability"]
        last = spec.num_actions - 1
        wrong = (table["action"] < 0) | (table["action"] > last)
        self._refuse(group, "action", wrong, table["action"], f"≥ 0 and ≤ {last}")
        self._refuse(group, "step", step < 0, step, "≥ 0")
        self._refuse(group, "probability", (chance < 0) | (chance > 1), chance, "≥ 0 and ≤ 1")
        wrong = ~np.isfinite(table["reward"]) & ~skip
        self._refuse(group, "reward", wrong, table["reward"], "finite")
        if spec.num_obs_values:
            right = (obs >= 0) & (obs < spec.num_obs_values)
            wrong = ~np.all(right.reshape(n, -1), axis=1)
            self._refuse(group, "obs", wrong, obs, f"≥ 0 and < {spec.num_obs_values}")
        elif dtype.kind == "f":
            wrong = ~np.isfinite(obs.reshape(n, -1)).all(axis=1)
            self._refuse(group, "obs", wrong, obs, "finite")
        if spec.is_masked:
            mask = np.frombuffer(table["action_mask"], np.uint8).reshape(n, -1)
            wrong = (mask[np.arange(n), table["action"]] == 0) & ~skip
            self._refuse(group, "action", wrong, table["action"], "an action that its mask allows")
            obs = np.concatenate((obs.reshape(n, -1), mask.astype(dtype)), axis=1)
        flags = table["terminated"] * np.uint8(TERMINATED) + skip * np.uint8(SKIP)
        flags += (step == 0) * np.uint8(FIRST)
        return Rows(
            obs, table["action"], table["reward"], flags, table["truncated"], table["episode"],
            step, chance,
        )  # fmt: skip

    def read_columns(self, group: int, names: Sequence[str]) -> list[NDArray[Any]]:
        """Return some of the scalar columns of a row group, unchecked."""
        table = self._columns(group, names)
        return [table[name] for name in names]

    def _columns(self, group: int, names: Sequence[str] | None = None) -> dict[str, Any]:
        """Return scalar columns as arrays and the others as buffers; raise if there is a null."""
        with self._reading():
            table = self._file.read_row_group(group, columns=names, use_threads=False)
        columns = dict[str, Any]()
        for name in table.column_names:
            column = table[name]
            chunk = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
            if chunk.null_count and name != "probability":
                row = int(np.flatnonzero(chunk.is_null().to_numpy(zero_copy_only=False))[0])
                self._raise(self._first_row(group) + row, f"column '{name}' is null")
            if name in SCALARS:
                columns[name] = chunk.to_numpy(zero_copy_only=False)
            else:
                width = chunk.type.byte_width
                columns[name] = chunk.buffers()[1].slice(chunk.offset * width, len(chunk) * width)
        return columns

    def _refuse(
        self, group: int, name: str, wrong: NDArray[np.bool_], values: NDArray[Any], must: str
    ) -> None:
        """Raise DataError at the first row that is wrong, if there is one."""
        if wrong.any():
            row = int(np.flatnonzero(wrong)[0])
            problem = f"column '{name}' is {values[row]}, and must be {must}"
            self._raise(self._first_row(group) + row, problem)

    def _first_row(self, group: int) -> int:
        return sum(rows for rows, *_ in self._part.groups[:group])

    def _raise(self, row: int, problem: str) -> None:
        raise DataError(
            f"file '{self._part.name}', row {row}: {problem}; record or import it again"
        )

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError, pyarrow("pyarrow").ArrowException) as error:
            raise DataError(
                f"file '{self._part.name}' cannot be read: {one_line(error)[:200]}; check the "
                "dataset with: qfleet data validate DATASET"
            ) from None
