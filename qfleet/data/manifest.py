"""The manifest of a dataset: which files it has, and what their rows are.

A dataset is a folder or URL with ``manifest.json``, which is written last, and Parquet files
(``rows.py``). Every finished file has a small JSON file beside it, from which ``merge`` makes the
manifest: a recording that is killed loses only the files that it had not finished. Files for a URL
are finished in a local folder, where they stay until they are uploaded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from qfleet.config.config import OPTIONS, Config, check_fields
from qfleet.core.errors import DataError, QfleetError, StorageMissing, one_line
from qfleet.core.files import MOST_JSON_BYTES
from qfleet.core.types import EnvSpec
from qfleet.core.urls import is_url
from qfleet.storage.published import CachedFiles, Record, local_folder, record_of
from qfleet.storage.remote import Store
from qfleet.storage.spec_json import spec_from_json, spec_to_json

FORMAT = "qfleet-data-1"
MANIFEST = "manifest.json"
SUFFIX = ".parquet"
LOCAL = "file://"
_PART = re.compile(r"part-[A-Za-z0-9_.-]+\.parquet")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_NOT_STORED = {"envs", "vectorize", "normalize_observations", "max_env_restarts", "env_timeout_s"}
ENV_FIELDS = tuple(
    name
    for name, option in OPTIONS.items()
    if option.group == "environment" and name not in _NOT_STORED
)
"""Fields of Config that a dataset stores: they decide what its rows mean."""


@dataclass(frozen=True)
class Part:
    """One Parquet file of a dataset."""

    name: str
    size_bytes: int
    sha256: str
    groups: list[list[int]]
    """Rows, transitions and first rows of episodes of each row group."""

    @property
    def record(self) -> Record:
        return Record(self.size_bytes, self.sha256)

    def total(self, column: int) -> int:
        return sum(group[column] for group in self.groups)


def env_fields(config: Config) -> dict[str, Any]:
    """Return the fields ``ENV_FIELDS`` of a configuration, as JSON values."""
    fields = json.loads(config.to_json())
    return {name: fields[name] for name in ENV_FIELDS}


@dataclass(frozen=True)
class Origin:
    """What the rows are: the environment that they are of and the policy that acted."""

    spec: EnvSpec
    env: dict[str, Any]
    """Fields of the configuration, ``ENV_FIELDS``."""
    policy: dict[str, Any] = field(default_factory=dict)
    """The policy that acted: its algorithm, ε, seed …"""

    @classmethod
    def of(cls, config: Config, spec: EnvSpec, policy: dict[str, Any]) -> Origin:
        return cls(spec, env_fields(config), policy)

    def to_json(self) -> dict[str, Any]:
        return {"spec": spec_to_json(self.spec), "env": self.env, "policy": self.policy}


@dataclass(frozen=True)
class Manifest:
    origin: Origin
    parts: list[Part]
    statistics: dict[str, Any] | None = None
    """What ``operations.fit_statistics`` found, of the training split if there are splits."""

    @property
    def rows(self) -> int:
        return sum(part.total(0) for part in self.parts)

    @property
    def transitions(self) -> int:
        """Rows that can be learnt from: all but those that only hold an observation."""
        return sum(part.total(1) for part in self.parts)

    @property
    def episodes(self) -> int:
        return sum(part.total(2) for part in self.parts)

    @property
    def sha256(self) -> str:
        """What identifies the rows and their order, wherever the dataset is."""
        files = [(part.name, part.sha256) for part in self.parts]
        body = [spec_to_json(self.origin.spec), self.origin.env, files]
        return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()

    def to_json(self) -> str:
        values = {
            "format": FORMAT,
            **self.origin.to_json(),
            "rows": self.rows,
            "transitions": self.transitions,
            "episodes": self.episodes,
            "statistics": self.statistics,
            "parts": [dataclasses.asdict(part) for part in self.parts],
        }
        return json.dumps(values, indent=1)


def open_store(url: str, patience_s: float = 30.0) -> Store:
    """Return the folder at a URL, or a local folder given by its path."""
    url = url if is_url(url) else f"{LOCAL}{os.path.abspath(url)}"
    return Store(url, patience_s=patience_s)


def shown(store: Store) -> str:
    """Return the URL, or the path of a local folder, as commands take it."""
    return store.shown.removeprefix(LOCAL)


def part_names(store: Store) -> list[str]:
    """Return the files of a dataset itself, without those of datasets in folders below."""
    return [name for name in store.names(is_deep=False) if name.startswith("part-")]


class Dataset:
    """A dataset that can be read: its manifest and its files."""

    def __init__(self, url: str) -> None:
        self.store = open_store(url)
        self.url = shown(self.store)
        values = _read_json(self.store, MANIFEST)
        with _malformed(f"'{MANIFEST}' of '{self.url}'"):
            origin, parts = _origin(values), [_part(each) for each in values["parts"]]
            statistics = _statistics(values["statistics"], origin.spec)
            listed = {part.name for part in parts}
            if len(listed) < len(parts):
                raise ValueError("it lists a file twice")
        self.manifest = Manifest(origin, parts, statistics)
        there = part_names(self.store)
        self.unlisted = len(set(_finished(there)) - listed)
        """Finished files that the manifest does not list."""
        if missing := sorted(listed - set(there)):
            raise DataError(
                f"'{self.url}' lacks {len(missing)} of {len(parts)} files of its manifest, e.g. "
                f"'{missing[0]}'; copy them, or leave them out with: qfleet data merge {self.url}"
            )
        self._cached = CachedFiles(self.store)

    @property
    def spec(self) -> EnvSpec:
        return self.manifest.origin.spec

    def check_same(self, sha256: str) -> None:
        """Raise DataError unless the manifest is the one that a checkpoint was written with."""
        if sha256 != self.manifest.sha256:
            raise DataError(
                f"'{self.url}' has other files than when the checkpoint was written; resume with "
                "the same data"
            )

    def local(self, part: Part) -> Path:
        """Return the path of a file of the dataset; one at a URL is downloaded at first use."""
        if self.store.url.startswith(LOCAL):
            return Path(self.store.url.removeprefix(LOCAL)) / part.name
        return self._cached.local(part.name, part.record)


def check_file(part: Part, path: Path) -> None:
    """Raise DataError unless a file has the size and the checksum of the manifest."""
    try:
        found = record_of(path)
    except OSError as error:
        raise DataError(f"file '{part.name}' of the dataset: {error.strerror}") from None
    if found != part.record:
        raise DataError(
            f"file '{part.name}' of the dataset is damaged: size or SHA-256 differ from the "
            "manifest; copy it again"
        )


# --- finished files and the manifest of them --------------------------------------------------


def staging_folder(store: Store) -> Path:
    """Return where files are finished: the local folder of a dataset, or one on the way to it."""
    if store.url.startswith(LOCAL):
        return Path(store.url.removeprefix(LOCAL))
    return local_folder("recordings", store.url)


def sidecar(part: Part, origin: Origin) -> str:
    """Return the JSON file of a finished file, from which ``merge`` makes the manifest."""
    return json.dumps({"format": FORMAT, **origin.to_json(), "part": dataclasses.asdict(part)})


def waiting_files(store: Store, writer: str = "") -> list[Path]:
    """Return the JSON files of finished files on this machine only, of one writer or of all."""
    if store.url.startswith(LOCAL):
        return []
    return sorted(staging_folder(store).glob(f"part-{writer}*.json"))


def upload(store: Store, waiting: list[Path]) -> None:
    """Upload finished files that wait for it."""
    for described in waiting:
        part = described.with_suffix(SUFFIX)
        try:
            for path in (part, described):  # in this order: what is described is there
                store.upload(path, path.name)
        except StorageMissing:
            if part.exists():
                raise  # otherwise another process has uploaded it
        for path in (part, described):
            path.unlink(missing_ok=True)


def merge(url: str, patience_s: float = 30.0) -> Manifest:
    """Make the manifest of all finished files of a dataset, also of those not uploaded yet.

    Several processes may do so at the same time: the last one finds the files of all.
    """
    store = open_store(url, patience_s)
    upload(store, waiting_files(store))
    names = _finished(part_names(store))
    while True:
        manifest = _merged(store, names)
        store.write(MANIFEST, manifest.to_json().encode())
        before, names = names, _finished(part_names(store))
        if names == before:
            return manifest


def _finished(names: list[str]) -> list[str]:
    """Return the Parquet files that have a JSON file beside them."""
    described = {name.removesuffix(".json") + SUFFIX for name in names}
    return sorted(described.intersection(names))


def first_origin(store: Store) -> Origin | None:
    """Return what the first finished file says of its rows; None if there is no file."""
    names = _finished(part_names(store))
    return _merged(store, names[:1]).origin if names else None


def _merged(store: Store, names: list[str]) -> Manifest:
    origins, parts = list[Origin](), list[Part]()
    for name in names:
        described = name.removesuffix(SUFFIX) + ".json"
        values = _read_json(store, described)
        with _malformed(f"'{described}' of '{shown(store)}'"):
            parts.append(_part(values["part"]))
            origins.append(_origin(values))
            if parts[-1].name != name:
                raise ValueError(f"it describes '{parts[-1].name}'")
    if not parts:
        raise DataError(f"'{shown(store)}' holds no finished file of a dataset; record one there")
    for part, origin in zip(parts, origins, strict=True):
        if (origin.spec, origin.env) != (origins[0].spec, origins[0].env):
            raise DataError(
                f"'{part.name}' of '{shown(store)}' is of another environment than "
                f"'{parts[0].name}'; record into a new folder"
            )
    return Manifest(origins[0], parts)


# --- reading: every value may be anyone's data ------------------------------------------------


def _read_json(store: Store, name: str) -> dict[str, Any]:
    url = shown(store)
    try:
        values = json.loads(store.read(name, MOST_JSON_BYTES))
    except StorageMissing:
        advice = "give the folder or URL of a dataset"
        if part_names(store):
            advice = f"its recording was not finished; run: qfleet data merge {url}"
        raise DataError(f"'{url}' has no {name}; {advice}") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"'{name}' of '{url}' is no JSON: {one_line(error)}") from None
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise DataError(f"'{name}' of '{url}' is not of format {FORMAT}; record or import it again")
    return values


@contextlib.contextmanager
def _malformed(what: str) -> Iterator[None]:
    try:
        yield
    except (
        LookupError,
        TypeError,
        AttributeError,
        ValueError,
        ArithmeticError,
        QfleetError,
    ) as error:
        raise DataError(f"{what} is malformed: {one_line(error)}") from None


def _origin(values: dict[str, Any]) -> Origin:
    env = {name: values["env"][name] for name in ENV_FIELDS if name in values["env"]}
    Config(**check_fields(env))
    spec = spec_from_json(values["spec"])
    if not isinstance(env["env"], str):
        raise ValueError("env")
    return Origin(spec, env, dict(values["policy"]))


def _part(values: dict[str, Any]) -> Part:
    part = Part(**values)
    counts = [(*group, 0) for group in part.groups]
    if (
        not _PART.fullmatch(part.name)
        or not _SHA256.fullmatch(part.sha256)
        or any(type(n) is not int for n in (part.size_bytes, *(n for one in counts for n in one)))
        or part.size_bytes < 1
        # Rows, transitions, episodes: each at most the one before.
        or any(len(one) != 4 or sorted(one, reverse=True) != list(one) for one in counts)
        or any(not 0 < one[0] < 2**31 for one in counts)
    ):
        raise ValueError(f"part {str(part.name)[:80]!r}")
    return part


def _statistics(values: dict[str, Any] | None, spec: EnvSpec) -> dict[str, Any] | None:
    """Return statistics whose numbers, where training uses them, are of the environment."""
    if values is not None and "obs_mean" in values:
        mean, variance = (np.asarray(values[name], float) for name in ("obs_mean", "obs_variance"))
        shape, count = spec.unmasked.frame_shape, values["obs_count"]
        is_finite = bool(np.isfinite(mean).all() and np.isfinite(variance).all())
        if mean.shape != shape or variance.shape != shape or not is_finite or variance.min() < 0:
            raise ValueError("obs_mean or obs_variance of its statistics")
        if type(count) is not int or count < 1:
            raise ValueError("obs_count of its statistics")
    return None if values is None else dict(values)
