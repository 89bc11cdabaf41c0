"""Checkpoints of a run and its best policy, written atomically: a crash leaves no partial one.

In: named parts of state. Out: the same parts, from the newest intact checkpoint.

    <run>/checkpoints/<env_steps>/   one snapshot each (see `snapshot.py`)
    <run>/checkpoints/.tmp-*         being written or removed: never read; the next save removes it
    <run>/checkpoints/.old-<name>    renamed while its replacement is moved into its place; read
                                     only if the replacement does not exist
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qfleet.core import files
from qfleet.core.errors import CheckpointError, ConfigError
from qfleet.core.types import StateDict
from qfleet.storage.snapshot import MANIFEST, Manifest, read_manifest, read_snapshot, write_snapshot
from qfleet.storage.tensor_files import read_unverified, write_tensors

POLICY_SUFFIX = ".safetensors"
PUBLISHED_POLICY = "policy.safetensors"
"""File of a folder that holds a published policy (`qfleet pull`) in place of a run."""
_POLICY_FORMAT = "qfleet-policy-1"
_BUFFERS = "buffers/"
_TMP = ".tmp-"
_OLD = ".old-"

_lineage: dict[Path, tuple[int, str]] = {}
"""Checkpoints folder → number and manifest SHA-256 of the checkpoint last saved or loaded there.

Segment versions are only comparable along one history: after a return to an earlier checkpoint the
same version number means other contents, so segments are linked to this checkpoint only.
"""


@dataclass
class Policy:
    """A loaded policy; every file was verified."""

    parts: dict[str, StateDict]
    meta: dict[str, Any]
    path: Path


@dataclass
class Checkpoint(Policy):
    """A loaded checkpoint; every file was verified."""

    env_steps: int


def save_checkpoint(
    root: Path, env_steps: int, parts: Mapping[str, StateDict], meta: Mapping[str, Any], keep: int
) -> Path:
    """Commit a checkpoint in `root` (``<run>/checkpoints``), then remove all but the `keep` newest.

    Checkpoints with a higher number remain when a run was resumed from an earlier one. They are
    removed too: otherwise the next resume would load them. If CheckpointError is raised, the older
    checkpoints are unchanged.
    """
    if keep < 1:
        raise ConfigError(f"keep must be ≥ 1, got {keep}: the new checkpoint is always kept")
    if env_steps < 0:
        raise ConfigError(f"env_steps must be ≥ 0, got {env_steps}")
    final = root / str(env_steps)
    with _os_errors(f"checkpoint {env_steps} was not written"):
        if not root.exists():
            root.mkdir(parents=True)
            files.sync_folder(root.parent)
        for aside in root.glob(f"{_OLD}*"):
            _restore_one(aside)
        manifest = _commit(
            final, lambda tmp: write_snapshot(tmp, parts, meta, env_steps, _link_base(root))
        )
    _lineage[root.resolve()] = (env_steps, manifest.sha256)
    with _os_errors(f"checkpoint {env_steps} was written, but older ones cannot be removed"):
        _prune(root, env_steps, keep)
    return final


def list_checkpoints(root: Path) -> list[int]:
    """Return the numbers of the committed checkpoints, lowest first."""
    return [number for number in _numbers(root) if _is_committed(root, number)]


def has_checkpoint(root: Path) -> bool:
    """Return whether `root` has a committed checkpoint, which may be damaged."""
    return bool(_numbers(root))


def load_checkpoint(
    root: Path, env_steps: int | None = None, on_alert: Callable[[str], None] = warnings.warn
) -> Checkpoint:
    """Load the newest intact checkpoint in `root` (``<run>/checkpoints``), or number `env_steps`.

    A damaged checkpoint is reported to `on_alert` and the previous one is loaded. If `env_steps` is
    given and that checkpoint is damaged, CheckpointError is raised.
    """
    numbers = _numbers(root)
    if env_steps is not None:
        if env_steps not in numbers:
            known = ", ".join(map(str, numbers)) or "none"
            raise CheckpointError(f"no checkpoint {env_steps} in '{root}'; available: {known}")
        try:
            return _load(root, env_steps)
        except CheckpointError as error:
            raise CheckpointError(
                f"checkpoint {env_steps} is damaged: {error}; "
                "omit the number to load the newest intact one"
            ) from None
    for number in reversed(numbers):
        try:
            return _load(root, number)
        except CheckpointError as error:
            on_alert(f"checkpoint {number} is damaged: {error}; trying the previous one")
    what = "every checkpoint is damaged" if numbers else "there is no checkpoint"
    raise CheckpointError(f"{what} in '{root}'; start a new run")


def save_policy(folder: Path, parts: Mapping[str, StateDict], meta: Mapping[str, Any]) -> Path:
    """Replace the snapshot in `folder` (such as ``<run>/best``); readers find one at any time."""
    with _os_errors(f"policy '{folder}' was not written"):
        folder.parent.mkdir(parents=True, exist_ok=True)
        _restore_one(_aside(folder))
        _sweep(folder.parent, f"{_TMP}{folder.name}-")
        _commit(folder, lambda tmp: write_snapshot(tmp, parts, meta))
    return folder


def load_policy(folder: Path) -> Policy:
    """Load the policy in `folder`, even if another process is replacing it or died doing so."""
    while True:
        before = _stamp(folder)
        # Between a writer's two renames, or if the writer died there, only the old folder exists.
        source = folder if before else _aside(folder)
        try:
            manifest, parts = read_snapshot(source)
            return Policy(parts, manifest.meta, folder)
        except CheckpointError as error:
            # The folder was replaced while it was read, so this is not damage. A stamp never
            # repeats, so this loop ends when the writer does.
            if _stamp(folder) != before:
                continue
            if before is None and not source.exists():
                raise CheckpointError(f"no policy in '{folder}'") from None
            raise CheckpointError(f"policy '{folder}' is damaged: {error}") from None


def save_policy_file(path: Path, policy: StateDict, meta: Mapping[str, Any]) -> None:
    """Write weights, buffers and meta into one safetensors file, atomically."""
    buffers = {_BUFFERS + name: buffer for name, buffer in policy["buffers"].items()}
    metadata = {name: json.dumps(value) for name, value in meta.items()}
    with _os_errors(f"policy '{path}' was not written"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with files.atomic_file(path) as tmp:
            tensors = {"weights": policy["weights"], **buffers}
            write_tensors(tmp, tensors, {"format": _POLICY_FORMAT, **metadata})


def load_policy_file(path: Path) -> Policy:
    """Load a file that `save_policy_file` wrote. It may be anyone's: its contents are only data."""
    if not path.is_file():
        raise CheckpointError(f"no policy file '{path}'")
    tensors, metadata = read_unverified(path)
    if metadata.get("format") != _POLICY_FORMAT or "weights" not in tensors:
        raise CheckpointError(f"'{path}' is not a file that policy.save has written")
    try:
        meta = {name: json.loads(metadata[name]) for name in ("config", "spec")}
    except KeyError as error:
        raise CheckpointError(f"'{path}' has no metadata {error}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"'{path}' has damaged metadata: {error}") from None
    weights = tensors.pop("weights")
    buffers = {name.removeprefix(_BUFFERS): buffer for name, buffer in tensors.items()}
    return Policy({"policy": {"weights": weights, "buffers": buffers}}, meta, path)


def diff_meta(
    saved: Mapping[str, Any], current: Mapping[str, Any], ignore: set[str], prefix: str = ""
) -> list[str]:
    """Return one line per differing key, with dots for nested keys; keys in `ignore` may differ."""
    lines: list[str] = []
    for key in dict.fromkeys([*saved, *current]):
        name = f"{prefix}{key}"
        if name in ignore:
            continue
        if key in saved and key in current:
            old, new = saved[key], current[key]
            if isinstance(old, Mapping) and isinstance(new, Mapping):
                lines += diff_meta(old, new, ignore, f"{name}.")
                continue
            if _same(old, new):
                continue
        was = f"{saved[key]!r} in the checkpoint" if key in saved else "not in the checkpoint"
        now = f"{current[key]!r} now" if key in current else "gone now"
        lines.append(f"{name}: {was}, {now}")
    return lines


def _same(old: object, new: object) -> bool:
    # Compared as JSON, because a tuple is saved as a list and NaN is not equal to itself.
    plain_old, plain_new = json.dumps(old), json.dumps(new)
    return plain_old == plain_new or bool(json.loads(plain_old) == json.loads(plain_new))


def _commit(final: Path, write: Callable[[Path], Manifest]) -> Manifest:
    """Write into a temporary folder, then replace `final` with it."""
    tmp = final.parent / f"{_TMP}{final.name}-{os.getpid()}"
    try:
        shutil.rmtree(tmp, ignore_errors=True)
        files.write_point("make folder")
        tmp.mkdir()
        manifest = write(tmp)
        aside = _aside(final)
        if final.exists():
            files.rename(final, aside)
        try:
            files.rename(tmp, final)
        except BaseException:
            _restore_one(aside)
            raise
        files.sync_folder(final.parent)
        if aside.exists():
            files.remove_tree(aside)
    except BaseException:
        shutil.rmtree(tmp, ignore_errors=True)
        raise
    return manifest


def _aside(final: Path) -> Path:
    return final.parent / f"{_OLD}{final.name}"


def _restore_one(aside: Path) -> None:
    """Undo or complete a replacement that was interrupted."""
    final = aside.parent / aside.name.removeprefix(_OLD)
    if not aside.exists():
        return
    if final.exists():
        shutil.rmtree(aside)
    else:
        aside.rename(final)


def _prune(folder: Path, newest: int, keep: int) -> None:
    _sweep(folder, _TMP)
    committed = [n for n in _numbers(folder) if n <= newest and _is_committed(folder, n)]
    for number in _numbers(folder):
        if number not in committed[-keep:]:
            # Renamed first, so that a half-removed folder is never taken for a damaged checkpoint.
            removed = folder / f"{_TMP}{number}-removed"
            files.rename(folder / str(number), removed)
            files.remove_tree(removed)


def _sweep(folder: Path, prefix: str) -> None:
    """Remove the temporary folders of writers that were killed."""
    for path in [path for path in folder.iterdir() if path.name.startswith(prefix)]:
        files.remove_tree(path)


def _numbers(folder: Path) -> list[int]:
    """Return the numbers of all committed checkpoints, including damaged ones."""
    if not folder.is_dir():
        return []
    names = {path.name.removeprefix(_OLD) for path in folder.iterdir() if path.is_dir()}
    # Only names that qfleet writes: "007" or "７" is not one of them.
    return sorted(int(name) for name in names if name.isdecimal() and str(int(name)) == name)


def _place(folder: Path, number: int) -> Path:
    final = folder / str(number)
    return final if final.exists() else _aside(final)


def _is_committed(folder: Path, number: int) -> bool:
    try:
        read_manifest(_place(folder, number))
    except CheckpointError:
        return False
    return True


def _load(folder: Path, number: int) -> Checkpoint:
    path = _place(folder, number)
    manifest, parts = read_snapshot(path)
    if manifest.env_steps != number:
        raise CheckpointError(f"'{path / MANIFEST}' belongs to checkpoint {manifest.env_steps}")
    _lineage[folder.resolve()] = (number, manifest.sha256)
    return Checkpoint(parts, manifest.meta, path, number)


def _link_base(folder: Path) -> tuple[Path, Manifest] | None:
    number, digest = _lineage.get(folder.resolve(), (-1, ""))
    path = folder / str(number)
    try:
        manifest = read_manifest(path)
    except CheckpointError:
        return None
    return (path, manifest) if manifest.sha256 == digest else None


def _stamp(folder: Path) -> tuple[int, int] | None:
    try:
        status = folder.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


@contextmanager
def _os_errors(what: str) -> Iterator[None]:
    """Convert an OSError, such as a full disk, into a CheckpointError with a one-line message."""
    try:
        yield
    except OSError as error:
        where = f" ('{error.filename}')" if error.filename else ""
        raise CheckpointError(
            f"{what}: {error.strerror or error}{where}; free some space or check the disk"
        ) from error
