"""The manifest of a dataset: which files it has, and what their rows are.

A dataset is a folder or URL with ``manifest.json``, which is written last, and Parquet files
(``rows.py``). Every finished file has a small JSON file beside it, from which ``merge`` makes the
manifest: a recording that is killed loses only the files that it had not finished.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qfleet.config.config import OPTIONS, Config
from qfleet.core.errors import CheckpointError, DataError, one_line
from qfleet.core.types import EnvSpec
from qfleet.storage.remote import Store, is_url, public_url
from qfleet.storage.spec_json import spec_from_json, spec_to_json

FORMAT = "qfleet-data-1"
MANIFEST = "manifest.json"
SUFFIX = ".parquet"
LOCAL = "file://"
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

    def total(self, column: int) -> int:
        return sum(group[column] for group in self.groups)


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
        fields = json.loads(config.to_json())
        return cls(spec, {name: fields[name] for name in ENV_FIELDS}, policy)

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


def open_store(url: str) -> Store:
    """Return the folder at a URL, or a local folder given by its path."""
    return Store(url if is_url(url) else f"{LOCAL}{os.path.abspath(url)}")


def part_names(store: Store, suffix: str) -> list[str]:
    """Return the files of a dataset itself, without those of datasets in folders below."""
    return [n for n in store.names() if n.startswith("part-") and n.endswith(suffix)]


class Dataset:
    """A dataset that can be read: its manifest and its files."""

    def __init__(self, url: str) -> None:
        self.url, self.store = public_url(url), open_store(url)
        values = _read_json(self.store, MANIFEST)
        with _malformed(f"'{MANIFEST}' of '{self.url}'"):
            parts = [_part(each) for each in values["parts"]]
            self.manifest = Manifest(_origin(values), parts, values["statistics"])
        self._downloads: tempfile.TemporaryDirectory[str] | None = None
        self._downloaded = set[str]()
        self._downloading = threading.Lock()  # several readers may need the same file

    @property
    def spec(self) -> EnvSpec:
        return self.manifest.origin.spec

    def local(self, part: Part) -> Path:
        """Return the path of a file of the dataset; one at a URL is downloaded at first use."""
        if self.store.url.startswith(LOCAL):
            return Path(self.store.url.removeprefix(LOCAL)) / part.name
        with self._downloading:
            if self._downloads is None:
                self._downloads = tempfile.TemporaryDirectory(prefix="qfleet-data-")
            path = Path(self._downloads.name) / part.name
            if part.name not in self._downloaded:
                self.store.download(part.name, path)
                check_file(part, path)
                self._downloaded.add(part.name)
        return path

    def write_manifest(self, manifest: Manifest) -> None:
        self.store.write(MANIFEST, manifest.to_json().encode())
        self.manifest = manifest


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_file(part: Part, path: Path) -> None:
    """Raise DataError unless a file has the size and the checksum of the manifest."""
    try:
        size_bytes = path.stat().st_size
        if size_bytes == part.size_bytes and file_sha256(path) == part.sha256:
            return
    except OSError as error:
        raise DataError(f"file '{part.name}' of the dataset: {error.strerror}") from None
    raise DataError(
        f"file '{part.name}' of the dataset is damaged: its {size_bytes} bytes differ from the "
        f"{part.size_bytes} of the manifest; copy it again"
    )


def write_sidecar(store: Store, part: Part, origin: Origin) -> None:
    """Write the JSON file of a finished file, from which ``merge`` makes the manifest."""
    values = {"format": FORMAT, **origin.to_json(), "part": dataclasses.asdict(part)}
    store.write(part.name.removesuffix(SUFFIX) + ".json", json.dumps(values).encode())


def merge(url: str) -> Manifest:
    """Make the manifest of all finished files of a dataset.

    Several processes may do so at the same time: the last one finds the files of all.
    """
    store = open_store(url)
    names = part_names(store, ".json")
    while True:
        manifest = _merged(store, names)
        store.write(MANIFEST, manifest.to_json().encode())
        before, names = names, part_names(store, ".json")
        if names == before:
            return manifest


def _merged(store: Store, names: list[str]) -> Manifest:
    origins, parts = list[Origin](), list[Part]()
    for name in names:
        values = _read_json(store, name)
        with _malformed(f"'{name}' of '{store.shown}'"):
            parts.append(_part(values["part"]))
            origins.append(_origin(values))
    if not parts:
        raise DataError(f"'{store.shown}' holds no finished file of a dataset; record one there")
    for part, origin in zip(parts, origins, strict=True):
        if (origin.spec, origin.env) != (origins[0].spec, origins[0].env):
            raise DataError(
                f"'{part.name}' of '{store.shown}' is of another environment than "
                f"'{parts[0].name}'; record into a new folder"
            )
    return Manifest(origins[0], parts)


def _read_json(store: Store, name: str) -> dict[str, Any]:
    url = store.shown.removeprefix(LOCAL)
    if not store.exists(name):
        advice = "give the folder or URL of a dataset"
        if part_names(store, SUFFIX):
            advice = f"its recording was not finished; run: qfleet data merge {url}"
        raise DataError(f"'{url}' has no {name}; {advice}")
    try:
        values = json.loads(store.read(name))
    except (ValueError, RecursionError) as error:
        raise DataError(f"'{name}' of '{url}' is no JSON: {one_line(error)}") from None
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise DataError(f"'{name}' of '{url}' is not of format {FORMAT}; record or import it again")
    return values


@contextlib.contextmanager
def _malformed(what: str) -> Iterator[None]:
    try:
        yield
    except (KeyError, TypeError, AttributeError, ValueError, CheckpointError) as error:
        raise DataError(f"{what} is malformed: {one_line(error)}") from None


def _origin(values: dict[str, Any]) -> Origin:
    env = {name: values["env"][name] for name in ENV_FIELDS if name in values["env"]}
    return Origin(spec_from_json(values["spec"]), env, dict(values["policy"]))


def _part(values: dict[str, Any]) -> Part:
    part = Part(**values)
    groups = [[int(count) for count in group] for group in part.groups]
    if Path(part.name).name != part.name or any(len(group) != 3 for group in groups):
        raise ValueError(f"part {part.name!r}")
    return dataclasses.replace(part, groups=groups)
