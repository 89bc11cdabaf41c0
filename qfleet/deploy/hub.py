"""Push and pull: a policy and its card, to and from the Hugging Face Hub or any fsspec URL.

``files.json`` lists every file with its size and SHA-256. It is written last, and what is pulled is
verified by it, so that an interrupted or concurrent push is noticed.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from qfleet.agent.policy import Policy
from qfleet.config.config import Config
from qfleet.config.trust import OUTWARD
from qfleet.core import files
from qfleet.core.errors import ConfigError, QfleetError, TransferError, one_line
from qfleet.core.urls import is_url, public_url
from qfleet.deploy.export import FOLDER
from qfleet.deploy.model_card import CARD, CONFIG, ONNX, VIDEOS, model_card, score_of
from qfleet.deploy.models import open_model, version_of
from qfleet.storage.checkpoint import PUBLISHED_POLICY as POLICY
from qfleet.storage.published import record_of
from qfleet.storage.remote import Store

FILE_LIST = "files.json"
OPTIONAL = (ONNX, *VIDEOS, "result.json")
"""Files that a push may leave out."""
MOST_LIST_BYTES, MOST_FILES = 10**6, 100
_FORMAT = "qfleet-files-1"
_HF = "hf://"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")
"""Names of files: no folders, so neither ``..`` nor an absolute path."""


class _Hub:
    """A model repository of the Hugging Face Hub: HF_ENDPOINT and HF_TOKEN say where and who."""

    def __init__(self, repo: str, private: bool) -> None:
        if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", repo) or ".." in repo:
            raise ConfigError(f"'{_HF}{repo}' must be {_HF}USER/REPOSITORY")
        self._hub, self._repo = _package("huggingface_hub"), repo
        endpoint, token = os.environ.get("HF_ENDPOINT"), os.environ.get("HF_TOKEN")
        self._api, self._private = self._hub.HfApi(endpoint=endpoint, token=token), private

    def put(self, folder: Path, names: list[str]) -> None:
        """Store all files in one commit: readers see all of them or none."""
        self._api.create_repo(self._repo, exist_ok=True, private=self._private or None)
        changes = [self._hub.CommitOperationAdd(name, folder / name) for name in names]
        for name in OPTIONAL:
            if name not in names and self._api.file_exists(self._repo, name):
                changes.append(self._hub.CommitOperationDelete(name))
        self._api.create_commit(self._repo, changes, commit_message="Push a policy of qfleet")

    def get(self, name: str, path: Path) -> None:
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            shutil.move(self._api.hf_hub_download(self._repo, name, local_dir=folder), path)


class _Files:
    """A folder by its URL: file, s3, gs …"""

    def __init__(self, url: str) -> None:
        if not is_url(url) or ".." in PurePosixPath(url).parts:
            raise ConfigError(
                f"'{public_url(url)}' must be {_HF}USER/REPOSITORY or a URL without '..' such as "
                "file:///models/pong or s3://bucket/pong"
            )
        self._store = Store(url)

    def put(self, folder: Path, names: list[str]) -> None:
        """Store files in this order: the list, which comes last, is of files that are there.

        Then delete files of an earlier push that are not listed any more.
        """
        for name in names:
            self._store.upload(folder / name, name)
        for name in OPTIONAL:
            if name not in names:
                self._store.remove(name)

    def get(self, name: str, path: Path) -> None:
        self._store.download(name, path)


def push(
    policy: Policy, run: Path | None, which: str, target: str, report: Callable[[str], None],
    private: bool = False,
) -> list[str]:  # fmt: skip
    """Store a policy, its card and what its run has; return the names of the files.

    ``report`` is called with a line about a file that is left out. ``private``: make a new
    repository of the Hugging Face Hub a private one.
    """
    with tempfile.TemporaryDirectory() as folder, _transfer_errors(target):
        store = _open(target, private)
        names = _collect(policy, run, which, public_url(target), Path(folder), report)
        records = {name: record_of(Path(folder) / name)._asdict() for name in names}
        text = json.dumps({"format": _FORMAT, "files": records}, indent=2)
        files.write_text(Path(folder) / FILE_LIST, text)
        store.put(Path(folder), [*names, FILE_LIST])
    return names


def pull(source: str, out: Path) -> None:
    """Fetch what ``push`` stored into the new folder ``out``, which the verbs take like a run's."""
    if out.exists():
        raise ConfigError(f"'{out}' exists already; choose another --out")
    with _transfer_errors(source), contextlib.ExitStack() as stack:
        store = _open(source)
        out.parent.mkdir(parents=True, exist_ok=True)
        prefix = tempfile.TemporaryDirectory(prefix=".pull-", dir=out.parent)
        listed = Path(stack.enter_context(prefix)) / FILE_LIST
        store.get(FILE_LIST, listed)
        if listed.stat().st_size > MOST_LIST_BYTES:
            raise TransferError(
                f"'{public_url(source)}' has a {FILE_LIST} of over {MOST_LIST_BYTES} bytes"
            )
        records = _read_list(files.read_text(listed), public_url(source))
        fetched = listed.with_name("files")
        fetched.mkdir()
        for name, record in records.items():
            store.get(name, fetched / name)
            if record_of(fetched / name)._asdict() != record:
                raise TransferError(
                    f"'{name}' of '{public_url(source)}' is not the file that {FILE_LIST} lists "
                    "(SHA-256); it is damaged or being replaced: pull again, or push it anew"
                )
        files.rename(fetched, out)


def _collect(
    policy: Policy, run: Path | None, which: str, target: str, folder: Path,
    report: Callable[[str], None],
) -> list[str]:  # fmt: skip
    """Write all files into ``folder``; return their names."""
    # What reaches outside the run's folder is private, and of no use elsewhere.
    policy = copy.copy(policy)
    own = {name: getattr(Config(), name) for name in (*OUTWARD, "baseline")}
    for name in ("data", "validation_data", "init_from"):  # not where they lie
        own[name] = PurePosixPath(public_url(getattr(policy.config, name))).name
    policy.config = policy.config.replace(**own)
    policy.save(folder / POLICY)
    files.write_text(folder / CONFIG, policy.config.to_json())
    score = None
    if run is not None:
        score = score_of(run, which)
        if (run / "result.json").is_file():
            shutil.copy(run / "result.json", folder)
        videos = [path for path in run.glob("videos/*") if f"replay{path.suffix}" in VIDEOS]
        if videos:
            newest = max(videos, key=lambda path: path.stat().st_mtime_ns)
            shutil.copy(newest, folder / f"replay{newest.suffix}")
        exported = run / FOLDER / ONNX
        try:
            if exported.is_file() and open_model(exported).version == version_of(policy):
                shutil.copy(exported, folder)
            elif exported.is_file():
                report(f"'{exported}' is of another policy and left out; export it again")
        except (QfleetError, OSError) as error:
            report(f"'{exported}' cannot be read and is left out: {one_line(error)}")
    names = sorted(path.name for path in folder.iterdir())
    files.write_text(folder / CARD, model_card(policy, score, names, target))
    return [*names, CARD]


def _open(url: str, private: bool = False) -> _Hub | _Files:
    if url.startswith(_HF):
        return _Hub(url.removeprefix(_HF), private)
    if private:
        raise ConfigError(f"--private is for {_HF}USER/REPOSITORY, got '{public_url(url)}'")
    return _Files(url)


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ConfigError(f"{name} is not installed: `pip install 'qfleet[hub]'`") from None


@contextlib.contextmanager
def _transfer_errors(url: str) -> Iterator[None]:
    """Turn the errors of storages, which have no common class, into TransferError."""
    try:
        yield
    except QfleetError:
        raise
    except Exception as error:
        text = one_line(error).replace(url, public_url(url))
        raise TransferError(f"'{public_url(url)}': {text[:300]}") from error


def _read_list(text: str, source: str) -> dict[str, Any]:
    """Return name → record of a list, which may be anyone's data."""
    try:
        stored = json.loads(text)
        records: dict[str, Any] = stored["files"]
        if stored["format"] != _FORMAT or POLICY not in records:
            raise ValueError(f"it lists no {POLICY}")
        if len(records) > MOST_FILES:
            raise ValueError(f"it lists over {MOST_FILES} files")
        for name in records:
            if not _NAME.fullmatch(name):
                raise ValueError(f"file name {name!r} is refused")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise TransferError(f"'{source}' has a malformed {FILE_LIST}: {one_line(error)}") from None
    return records
