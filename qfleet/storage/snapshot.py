"""Snapshots: a folder of safetensors files and a manifest with their checksums, written last.

In: named parts, each a nested dict whose leaves are tensors, Segments or JSON values.
Out: the same parts, verified. Checkpoints and policies are both snapshots; `checkpoint.py` decides
where they are stored, how they are replaced and which one is loaded.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from torch import Tensor

from qfleet.core import files
from qfleet.core.errors import CheckpointError
from qfleet.core.types import StateDict
from qfleet.storage.segments import Segments, Streamed
from qfleet.storage.tensor_files import FileRecord, check_storable, read_tensors, write_tensors

MANIFEST = "manifest.json"
FORMAT = "qfleet-snapshot"
FORMAT_VERSION = 1

_WORD = re.compile(r"[A-Za-z0-9_-]+")
_FILE_NAME = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*\.safetensors")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_SEGMENT_KEY = "data"
_LINK_REFUSED = {
    errno.EXDEV,
    errno.EPERM,
    errno.EACCES,
    errno.EMLINK,
    errno.ENOSYS,
    errno.EOPNOTSUPP,
    errno.ENOENT,
}


@dataclass(frozen=True)
class Manifest:
    """The manifest of a snapshot; every field was checked for type and safety."""

    env_steps: int | None
    """Number of the checkpoint; None in a policy's folder."""
    meta: dict[str, Any]
    parts: dict[str, Any]
    """JSON leaves of each part, in the part's nested dicts."""
    segments: dict[str, dict[str, list[int]]]
    """Part → path of a Segments leaf → versions."""
    files: dict[str, FileRecord]
    sha256: str
    """SHA-256 of the manifest itself."""


@dataclass
class _SplitPart:
    tree: dict[str, Any]
    tensors: dict[str, Tensor | Streamed]
    segments: dict[str, Segments]


def write_snapshot(
    folder: Path,
    parts: Mapping[str, StateDict],
    meta: Mapping[str, Any],
    env_steps: int | None = None,
    base: tuple[Path, Manifest] | None = None,
) -> Manifest:
    """Write a snapshot into an empty folder.

    Segments that the snapshot `base` has in the same version are hard-linked, not written.
    """
    split = {name: _split_part(name, part) for name, part in parts.items()}
    json_meta = _plain_meta(meta)
    records: dict[str, FileRecord] = {}
    for name, part in split.items():
        if part.tensors:
            file_name = f"{name}.safetensors"
            records[file_name] = write_tensors(folder / file_name, part.tensors)
        for path, pieces in part.segments.items():
            for i, tensor in enumerate(pieces.tensors):
                file_name = _segment_file(name, path, i)
                linked = _link(folder / file_name, base, (name, path, i, pieces.versions[i]))
                records[file_name] = linked or write_tensors(
                    folder / file_name, {_SEGMENT_KEY: tensor}
                )
    body = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "qfleet_version": _qfleet_version(),
        "env_steps": env_steps,
        "meta": json_meta,
        "parts": {name: part.tree for name, part in split.items()},
        "segments": {
            name: {path: pieces.versions for path, pieces in part.segments.items()}
            for name, part in split.items()
        },
        "files": {
            name: {"bytes": record.size_bytes, "sha256": record.sha256}
            for name, record in records.items()
        },
    }
    files.write_text(folder / MANIFEST, json.dumps({**body, "sha256": _digest(body)}, indent=1))
    files.sync_folder(folder)
    return read_manifest(folder)


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest, or raise CheckpointError if it is missing, damaged or malformed."""
    path = folder / MANIFEST
    try:
        body = json.loads(files.read_text(path))
        claimed = body.pop("sha256", None) if isinstance(body, dict) else None
        digest = _digest(body)
    except OSError as error:
        raise CheckpointError(f"'{path}' cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"'{path}' failed the JSON check: {error}") from None
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise CheckpointError(f"'{path}' is not the manifest of a qfleet checkpoint")
    if body.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(
            f"'{path}' has format version {body.get('format_version')!r}, this qfleet reads "
            f"{FORMAT_VERSION}; use the qfleet that wrote it ({body.get('qfleet_version')!r})"
        )
    if claimed != digest:
        raise CheckpointError(f"'{path}' failed the SHA-256 check of the manifest itself")
    try:
        return Manifest(
            env_steps=None if body["env_steps"] is None else _int(body["env_steps"]),
            meta=_dict(body["meta"]),
            parts={_word(name): _dict(tree) for name, tree in _dict(body["parts"]).items()},
            segments={
                _word(name): {path: _ints(v) for path, v in _dict(found).items()}
                for name, found in _dict(body["segments"]).items()
            },
            files={
                _file_name(name): _record(entry) for name, entry in _dict(body["files"]).items()
            },
            sha256=digest,
        )
    except KeyError as error:
        raise CheckpointError(f"'{path}' failed the contents check: {error} is missing") from None
    except ValueError as error:
        raise CheckpointError(f"'{path}' failed the contents check: {error}") from None


def read_snapshot(folder: Path) -> tuple[Manifest, dict[str, StateDict]]:
    """Return the manifest and all parts after a check of each file's size and SHA-256."""
    manifest = read_manifest(folder)
    contents = {
        name: read_tensors(folder / name, record) for name, record in manifest.files.items()
    }
    parts: dict[str, StateDict] = {}
    try:
        for name, tree in manifest.parts.items():
            for path, tensor in contents.pop(f"{name}.safetensors", {}).items():
                _insert(tree, path, tensor)
            for path, versions in manifest.segments.get(name, {}).items():
                stored = [contents.pop(_segment_file(name, path, i)) for i in range(len(versions))]
                tensors = [piece[_SEGMENT_KEY] for piece in stored]
                _insert(tree, path, Segments(tensors, versions))
            parts[name] = tree
    except KeyError as error:
        raise CheckpointError(f"'{folder / MANIFEST}' does not list {error}") from None
    except ValueError as error:
        raise CheckpointError(f"'{folder / MANIFEST}' failed the contents check: {error}") from None
    return manifest, parts


def _split_part(name: str, part: StateDict) -> _SplitPart:
    if not _WORD.fullmatch(name):
        raise CheckpointError(f"part name {name!r} must consist of letters, digits, _ and -")
    result = _SplitPart({}, {}, {})
    result.tree = _split_dict(part, "", result)
    for path, value in result.tensors.items():
        check_storable(path, value.like if isinstance(value, Streamed) else value)
    for path, pieces in result.segments.items():
        if not all(_WORD.fullmatch(word) for word in path.split("/")):
            raise CheckpointError(
                f"the path of segments '{name}/{path}' becomes a file name: it must consist of "
                "letters, digits, _ and -"
            )
        for tensor in pieces.tensors:
            check_storable(path, tensor)
    return result


def _split_dict(node: StateDict, prefix: str, result: _SplitPart) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in node.items():
        _check_key(key, prefix)
        path = prefix + key
        if isinstance(value, Tensor | Streamed):
            result.tensors[path] = value
        elif isinstance(value, Segments):
            result.segments[path] = value
        elif isinstance(value, dict):
            tree[key] = _split_dict(value, path + "/", result)
        else:
            _check_json(value, path)
            tree[key] = value
    return tree


def _check_key(key: object, prefix: str) -> None:
    # JSON would silently turn an int key into a string.
    if not isinstance(key, str) or "/" in key:
        raise CheckpointError(f"state key {key!r} under '{prefix}' must be a string without '/'")


def _check_json(value: object, path: str) -> None:
    if isinstance(value, list):
        for i, element in enumerate(value):
            _check_json(element, f"{path}[{i}]")
    elif isinstance(value, dict):
        for key, element in value.items():
            _check_key(key, path)
            _check_json(element, f"{path}.{key}")
    elif value is not None and not isinstance(value, (bool, int, float, str)):
        raise CheckpointError(
            f"state '{path}' is a {type(value).__name__}; store a tensor, number, string or list"
        )


def _insert(tree: StateDict, path: str, leaf: object) -> None:
    *parents, key = path.split("/")
    for parent in parents:
        tree = _dict(tree.get(parent))
    if key in tree:
        raise ValueError(f"'{path}' occurs twice")
    tree[key] = leaf


def _link(
    target: Path, base: tuple[Path, Manifest] | None, segment: tuple[str, str, int, int]
) -> FileRecord | None:
    """Hard-link an unchanged segment from the base snapshot; return None if it must be written."""
    if base is None:
        return None
    folder, manifest = base
    part, path, i, wanted = segment
    versions = manifest.segments.get(part, {}).get(path, [])
    record = manifest.files.get(target.name)
    if i >= len(versions) or versions[i] != wanted or record is None:
        return None
    source = folder / target.name
    try:
        files.write_point(f"link {target.name}")
        if source.lstat().st_size != record.size_bytes:
            return None
        os.link(source, target, follow_symlinks=False)
    except OSError as error:
        # If the file system refuses links, the segment is written from the tensor in memory.
        if error.errno not in _LINK_REFUSED:
            raise
        return None
    return record


def _segment_file(part: str, path: str, i: int) -> str:
    return f"{part}.{path.replace('/', '.')}.{i}.safetensors"


def _plain_meta(meta: Mapping[str, Any]) -> dict[str, Any]:
    try:
        plain: dict[str, Any] = json.loads(json.dumps(dict(meta)))
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"checkpoint meta is not JSON: {error}") from None
    return plain


def _digest(body: object) -> str:
    return hashlib.sha256(json.dumps(body).encode()).hexdigest()


def _qfleet_version() -> str:
    try:
        return version("qfleet")
    except PackageNotFoundError:  # a source tree that was never installed
        return "unknown"


def _dict(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"expected an object, found {str(value)[:40]!r}")
    return value


def _word(value: str) -> str:
    if not _WORD.fullmatch(value):
        raise ValueError(f"{value[:40]!r} is not a part name")
    return value


def _file_name(value: str) -> str:
    # Only plain names: no entry of a manifest may refer to a file outside its folder.
    if not _FILE_NAME.fullmatch(value):
        raise ValueError(f"{value[:40]!r} is not a plain .safetensors file name")
    return value


def _int(value: object) -> int:
    # isinstance would accept a bool as an int.
    if type(value) is not int:
        raise ValueError(f"{str(value)[:40]!r} is not an integer")
    return value


def _ints(value: object) -> list[int]:
    if not isinstance(value, list):
        raise ValueError(f"expected a list, found {str(value)[:40]!r}")
    return [_int(element) for element in value]


def _record(value: object) -> FileRecord:
    entry = _dict(value)
    digest = entry["sha256"]
    if not isinstance(digest, str) or not _SHA256.fullmatch(digest):
        raise ValueError(f"{str(digest)[:40]!r} is not a SHA-256")
    return FileRecord(_int(entry["bytes"]), digest)
