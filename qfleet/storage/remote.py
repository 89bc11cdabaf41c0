"""Folders at a URL (S3, HDFS, Google Cloud Storage, a local folder) through fsspec.

In: relative paths and bytes or local files. Out: the same, or StorageError. Every call ends:
failures that may pass are retried with backoff for ``patience_s``, all others are raised at once.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import importlib
import os
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from qfleet.core.errors import ConfigError, StorageError, StorageMissing, StorageOutage, one_line
from qfleet.core.urls import is_url, public_url

T = TypeVar("T")

REQUEST_TIMEOUT_S = 15.0
"""Longest wait for the answer to one request."""
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.1, 5.0
TRANSFER_S = 600.0
"""Longest time of one upload, download or listing, where the backend has no deadline of its own; it
is 20 times the patience, if that is less."""
_TIMED = {"file", "local", "memory", "s3", "s3a", "webhdfs"}
"""Schemes whose calls end by themselves."""
TEMPORARY = ".tmp-"
"""Names that begin so are not listed."""
_RENAMING = {"file", "local", "hdfs", "webhdfs"}
"""Schemes whose files appear while they are written; others show whole objects only."""
_PERMANENT = {
    errno.ENOENT, errno.EACCES, errno.EPERM, errno.EEXIST, errno.EISDIR, errno.ENOTDIR,
    errno.EINVAL, errno.ENOSPC, errno.EDQUOT, errno.EROFS,
}  # fmt: skip
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}
_PASSING_STATUS = {408, 409, 425, 429}
_PASSING_NAMES = {"HTTPClientError", "ConnectionError", "ResponseParserError", "ClientPayloadError"}
"""Errors of botocore and aiohttp, which may not be installed, that are no OSError."""


class Store:
    """One folder at a URL. Objects are named by their path below it, as ``best/manifest.json``."""

    def __init__(self, url: str, *, patience_s: float = 30.0) -> None:
        """``patience_s``: how long a call is retried while the store does not answer."""
        self.url, self._patience_s = url.rstrip("/"), patience_s
        self._scheme = url.partition("://")[0].lower()
        if not is_url(url) or ".." in PurePosixPath(url).parts:
            raise StorageError(
                f"'{public_url(url)}' must be a URL without '..', such as s3://bucket/folder"
            )
        try:
            self._system, self._root = _open(self.url, self._scheme, patience_s)
        except ImportError as error:
            raise ConfigError(
                f"'{public_url(url)}' needs a package that is not installed "
                f"({one_line(error)}): `pip install 'qfleet[data]'` has fsspec and s3fs"
            ) from None
        except Exception as error:  # fsspec's backends have no common class
            raise StorageError(f"cannot open '{public_url(url)}': {self._words(error)}") from error
        self._root = self._root.rstrip("/")

    def read(self, path: str, most_bytes: int | None = None) -> bytes:
        """Return the contents of an object, which may have at most ``most_bytes``."""
        whole = self._whole(path)
        part = {} if most_bytes is None else {"start": 0, "end": most_bytes + 1}
        data = bytes(self._retried("read", path, lambda: self._system.cat_file(whole, **part)))
        if most_bytes is not None and len(data) > most_bytes:
            raise StorageError(f"'{self.shown}/{path}' has more than {most_bytes} bytes")
        return data

    def write(self, path: str, data: bytes) -> None:
        """Write an object; readers see the old one or the new one, never a part."""
        self._place(path, lambda target: self._system.pipe_file(target, data))

    def create(self, path: str, data: bytes) -> bool:
        """Write an object unless it exists; return False if it does.

        Of several concurrent callers with different ``data``, one gets True.
        """
        try:
            self._retried("create", path, lambda: self._create(self._whole(path), data))
            return True
        except StorageError as error:
            if not isinstance(error.__cause__, FileExistsError):
                raise
        # The answer to an attempt that succeeded may have been lost.
        return self.read(path) == data

    def upload(self, local: Path, path: str) -> None:
        """Write an object with the contents of a local file."""
        self._place(path, lambda target: self._system.put_file(str(local), target))

    def download(self, path: str, local: Path) -> None:
        """Write a local file with the contents of an object, through a temporary name.

        Raise OSError if the file cannot be written.
        """
        whole, tmp = self._whole(path), local.with_name(f"{TEMPORARY}{secrets.token_hex(4)}")
        local.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._retried("read", path, lambda: self._system.get_file(whole, str(tmp)), True)
            tmp.replace(local)
        except StorageError as error:
            if isinstance(error.__cause__, OSError) and error.__cause__.errno in _NO_ROOM:
                raise error.__cause__ from None
            raise
        finally:
            tmp.unlink(missing_ok=True)

    def names(self, prefix: str = "", *, is_deep: bool = True) -> list[str]:
        """Return the paths of all objects below the folder ``prefix``, sorted.

        ``is_deep``: also of those in folders below it.
        """
        whole = self._whole(prefix) if prefix else self._root
        # Without it, fsspec's own walk returns no names when the store does not answer.
        how = {"on_error": "raise"} if self._scheme in _RENAMING else {}

        def find() -> list[str]:
            if is_deep:
                return list(self._system.find(whole, **how))
            entries = self._system.ls(whole, detail=True)
            return [entry["name"] for entry in entries if entry["type"] != "directory"]

        try:
            found = self._retried("list", prefix, find, True)
        except StorageMissing:
            return []
        below = [name.removeprefix(self._root).lstrip("/") for name in found]
        return sorted(name for name in below if not PurePosixPath(name).name.startswith(TEMPORARY))

    def exists(self, path: str) -> bool:
        """Return whether there is an object or a folder of this name."""
        whole = self._whole(path)
        try:
            self._retried("look up", path, lambda: self._system.info(whole))
        except StorageMissing:
            return False
        return True

    def remove(self, path: str) -> None:
        """Remove an object, or everything below a folder; what is not there is removed already."""
        whole = self._whole(path)
        with contextlib.suppress(StorageMissing):
            self._retried("remove", path, lambda: self._system.rm(whole, recursive=True), True)

    def _whole(self, path: str) -> str:
        parts = path.split("/")
        if not path or "" in parts or "." in parts or ".." in parts or "\\" in path:
            raise StorageError(f"'{path}' is no relative path without '..' in '{self.shown}'")
        return f"{self._root}/{path}"

    @property
    def shown(self) -> str:
        """The URL without what may be secret."""
        return public_url(self.url)

    def _place(self, path: str, write: Callable[[str], object]) -> None:
        """Let ``write`` write the object: under its own name, or renamed to it afterwards."""
        whole = self._whole(path)

        def replace() -> None:
            if self._scheme not in _RENAMING:
                write(whole)
                return
            tmp = self._temporary(whole)
            try:
                write(tmp)
                self._rename(tmp, whole, overwrite=True)
            except Exception:
                with contextlib.suppress(Exception):  # the first error counts
                    self._system.rm_file(tmp)
                raise

        self._retried("write", path, replace, True)

    def _create(self, whole: str, data: bytes) -> None:
        """Write an object or raise FileExistsError."""
        if self._scheme not in _RENAMING:
            try:
                self._system.pipe_file(whole, data, mode="create")
            except OSError as error:
                if _status(error) == 412:  # some servers do not name the condition that failed
                    raise FileExistsError(whole) from None
                raise
            return
        tmp = self._temporary(whole)
        self._system.pipe_file(tmp, data)
        try:
            self._rename(tmp, whole, overwrite=False)
        except FileExistsError:
            self._system.rm_file(tmp)
            raise

    def _temporary(self, whole: str) -> str:
        """Return a new name beside ``whole``, in a folder that exists."""
        folder = str(PurePosixPath(whole).parent)
        self._system.makedirs(folder, exist_ok=True)
        return f"{folder}/{TEMPORARY}{secrets.token_hex(8)}"

    def _rename(self, source: str, target: str, *, overwrite: bool) -> None:
        if self._scheme in ("file", "local"):
            if overwrite:
                os.replace(source, target)
            else:
                os.link(source, target)  # fails where a rename would replace
                os.unlink(source)
        elif self._scheme == "webhdfs":
            # Its mv() can neither replace nor tell whether it renamed.
            how = {"renameoptions": "OVERWRITE"} if overwrite else {}
            answer = self._system._call("RENAME", "put", source, destination=target, **how)
            if not overwrite and not answer.json()["boolean"]:
                raise FileExistsError(target)
        else:  # hdfs: its rename never replaces, so for a moment there is no file
            if self._system.exists(target):
                if not overwrite:
                    raise FileExistsError(target)
                self._system.rm_file(target)
            self._system.mv(source, target)

    def _retried(self, what: str, path: str, call: Callable[[], T], is_long: bool = False) -> T:
        """Return what ``call`` returns; every error of a backend becomes ours here.

        ``is_long``: an attempt may consist of many requests.
        """
        deadline, delay_s = time.monotonic() + self._patience_s, _FIRST_DELAY_S
        most_s = min(TRANSFER_S, 20 * self._patience_s) if is_long else REQUEST_TIMEOUT_S
        while True:
            try:
                if self._scheme in _TIMED:
                    return call()
                return _within(most_s, call)
            except Exception as error:
                where = f"'{self.shown}/{path}'"
                if not _may_pass(error):
                    is_missing = isinstance(error, FileNotFoundError)
                    raise (StorageMissing if is_missing else StorageError)(
                        f"cannot {what} {where}: {_advice(error)} ({self._words(error)})"
                    ) from error
                if time.monotonic() + delay_s > deadline:
                    raise StorageOutage(
                        f"cannot {what} {where}: the store has not answered for "
                        f"{self._patience_s:g} s ({self._words(error)}); check the network and "
                        "the address, then try again"
                    ) from error
            time.sleep(delay_s)
            delay_s = min(2 * delay_s, _LONGEST_DELAY_S)

    def _words(self, error: BaseException) -> str:
        return one_line(error).replace(self.url, self.shown)[:300]


def _open(url: str, scheme: str, patience_s: float) -> tuple[Any, str]:
    """Return fsspec's file system and the path of the folder in it."""
    timeout_s = max(1.0, min(REQUEST_TIMEOUT_S, patience_s))
    options: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
    if scheme in ("s3", "s3a"):
        # One attempt each: _retried repeats them, with one deadline for all.
        limits = {"connect_timeout": timeout_s, "read_timeout": timeout_s}
        options["config_kwargs"] = {**limits, "retries": {"total_max_attempts": 1}}
    system, root = importlib.import_module("fsspec").url_to_fs(url, **options)
    if scheme in ("s3", "s3a"):
        system.retries = 1
    elif scheme == "webhdfs":  # its requests have no deadline otherwise
        system.session.request = functools.partial(system.session.request, timeout=timeout_s)
    return system, str(root)


def _within(most_s: float, call: Callable[[], T]) -> T:
    """Return what ``call`` returns; if that takes longer, leave its thread: TimeoutError."""
    results, errors = list[T](), list[BaseException]()

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:  # raised below
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True, name="storage")
    thread.start()
    thread.join(most_s)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"no answer for {most_s:g} s")
    return results[0]


def _status(error: BaseException) -> int | None:
    """Return the HTTP status of an error of botocore or requests, or of its cause."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        response = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        return response if isinstance(response, int) else None
    status = getattr(response, "status_code", None)
    if status is None and error.__cause__ is not None:
        return _status(error.__cause__)
    return status


def _may_pass(error: Exception) -> bool:
    """Return whether the same call may succeed later."""
    if (status := _status(error)) is not None:
        return status >= 500 or status in _PASSING_STATUS
    known = FileNotFoundError | PermissionError | FileExistsError | NotImplementedError
    if isinstance(error, known):
        return False  # those of fsspec have no errno
    if isinstance(error, OSError) and error.errno in _PERMANENT:
        return False
    # RuntimeError: what WebHDFS calls an error of the server.
    names = {base.__name__ for base in type(error).__mro__}
    return isinstance(error, OSError | RuntimeError) or bool(names & _PASSING_NAMES)


def _advice(error: Exception) -> str:
    """Return what is wrong and what to do about it."""
    if isinstance(error, FileNotFoundError):
        return "it does not exist; check the URL"
    if isinstance(error, PermissionError) or _status(error) in (401, 403):
        return "access is denied; check the credentials and their permissions"
    if "Credentials" in type(error).__name__:
        return "there are no credentials; set those of this store, e.g. AWS_ACCESS_KEY_ID"
    return "the store refuses; check the URL and its settings"
