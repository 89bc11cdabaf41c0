"""A folder at a URL: the same on a disk, in memory, on S3 (moto) and on WebHDFS (a stand-in)."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from qfleet.core.errors import ConfigError, StorageError, StorageOutage
from qfleet.core.urls import is_url, public_url
from qfleet.storage import remote
from qfleet.storage.remote import Store
from support.messages import says
from support.s3 import BUCKET, FaultyS3, s3_server
from support.waiting import PHASE_S, deadline
from support.webhdfs import NameNode, name_node


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyS3]:
    with s3_server() as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        yield server


@pytest.fixture
def hdfs() -> Iterator[NameNode]:
    with name_node() as server:
        yield server


@pytest.fixture(params=["file", "memory", "s3", "webhdfs"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "s3":
        request.getfixturevalue("s3")
        return f"s3://{BUCKET}/run"
    if request.param == "webhdfs":
        return f"{request.getfixturevalue('hdfs').url}/user/run"
    return f"{request.param}://{tmp_path}/run"


@pytest.mark.parametrize("text", ["s3://bucket/run", "file:///a", "webhdfs://host:1/a"])
def test_a_url_is_known(text: str) -> None:
    assert is_url(text)


@pytest.mark.parametrize("text", ["runs/a", "/a", "C:\\a", "C://a", "a:b", "://a", ""])
def test_a_path_is_no_url(text: str) -> None:
    assert not is_url(text)


def test_secrets_of_a_url_are_not_shown() -> None:
    assert public_url("s3://me:secret@host/a?token=b") == "s3://host/a"


def test_objects_are_written_read_listed_and_removed(url: str, tmp_path: Path) -> None:
    store = Store(url, patience_s=deadline(PHASE_S))
    assert store.names() == []
    assert not store.exists("a/b")
    store.write("a/b", b"first")
    store.write("a/b", b"second")
    store.write("c", b"")
    assert (store.read("a/b"), store.read("c")) == (b"second", b"")
    (tmp_path / "local").write_bytes(b"x" * 100_000)
    store.upload(tmp_path / "local", "a/large")
    store.download("a/large", tmp_path / "new" / "copy")
    assert (tmp_path / "new" / "copy").read_bytes() == b"x" * 100_000
    assert store.names() == ["a/b", "a/large", "c"]
    assert store.names("a") == ["a/b", "a/large"]
    assert store.names("nosuch") == []
    assert store.names(is_deep=False) == ["c"]
    assert store.names("nosuch", is_deep=False) == []
    assert store.exists("a/b")
    store.remove("a")
    store.remove("nosuch")
    assert store.names() == ["c"]


def test_one_of_several_creators_succeeds(url: str) -> None:
    store, won = Store(url, patience_s=deadline(PHASE_S)), list[bytes]()

    def create(data: bytes) -> None:
        if store.create("lock", data):
            won.append(data)

    threads = [threading.Thread(target=create, args=(b"%d" % i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(deadline(PHASE_S))
    assert len(won) == 1
    assert store.read("lock") == won[0]
    assert store.names() == ["lock"]
    store.remove("lock")
    assert store.create("lock", b"again")


def test_what_is_missing_is_one_line_at_once(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "_FIRST_DELAY_S", 1e9)  # so that a retry is an outage at once
    store = Store(url)
    for call in (lambda: store.read("no"), lambda: store.download("no", tmp_path / "no")):
        with pytest.raises(StorageError, match=says("no", "does not exist")) as caught:
            call()
        assert "\n" not in str(caught.value)
        assert not isinstance(caught.value, StorageOutage)
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize("path", ["", "../a", "a/../b", "/a", "a//b", "a\\b", "."])
def test_a_path_that_leaves_the_folder_is_refused(path: str, tmp_path: Path) -> None:
    store = Store(f"file://{tmp_path}/run")
    for call in (store.read, store.exists, store.remove):
        with pytest.raises(StorageError, match="relative path"):
            call(path)


@pytest.mark.parametrize("url", ["nosuch://a/b", "file:///a/../b", "runs/a"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(StorageError, match=says(url)):
        Store(url)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = pytest.importorskip("fsspec.registry")
    monkeypatch.delitem(registry._registry, "s3", raising=False)  # of a test before
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(ConfigError, match=says("s3fs", "qfleet[data]")):
        Store("s3://bucket/run")


@pytest.mark.parametrize("status", [500, 503])
def test_errors_of_the_server_are_retried(s3: FaultyS3, status: int) -> None:
    store, failed = Store(f"s3://{BUCKET}/run", patience_s=deadline(PHASE_S)), list[str]()

    def fault(method: str, path: str) -> int:
        if method == "PUT" and len(failed) < 2:
            failed.append(path)
            return status
        return 0

    s3.fault = fault
    store.write("a", b"data")
    assert len(failed) == 2
    assert store.read("a") == b"data"


def test_a_create_whose_answer_was_lost_is_ours(s3: FaultyS3) -> None:
    """The second attempt finds the object of the first."""
    store = Store(f"s3://{BUCKET}/run", patience_s=deadline(PHASE_S))
    lost = [True]

    def fault(method: str, _path: str) -> int:
        if method == "PUT" and lost:
            lost.clear()
            Store(f"s3://{BUCKET}/run").write("lock", b"ours")
            return 500
        return 0

    s3.fault = fault
    assert store.create("lock", b"ours")
    lost.append(True)
    assert not store.create("lock", b"theirs")


def test_access_that_is_denied_fails_at_once(s3: FaultyS3) -> None:
    store = Store(f"s3://{BUCKET}/run")
    s3.fault = lambda *_: 403
    s3.seen.clear()
    for call in (lambda: store.write("a", b""), lambda: store.read("a"), lambda: store.names()):
        with pytest.raises(StorageError, match=says("run", "denied", "credentials")) as caught:
            call()
        assert not isinstance(caught.value, StorageOutage)
    assert len(s3.seen) <= 4


def test_a_store_that_never_recovers_is_an_outage(s3: FaultyS3) -> None:
    store = Store(f"s3://{BUCKET}/run", patience_s=0.5)
    s3.fault = lambda *_: 500
    for call in (lambda: store.read("a"), lambda: store.names(), lambda: store.exists("a")):
        with pytest.raises(StorageOutage, match=says("run", "0.5 s")):
            call()


def test_a_store_that_does_not_answer_is_an_outage(s3: FaultyS3) -> None:
    store, release = Store(f"s3://{BUCKET}/run", patience_s=0.5), threading.Event()

    def hold(*_: str) -> int:
        release.wait(deadline(PHASE_S))
        return 0

    s3.fault = hold
    try:
        with pytest.raises(StorageOutage, match=says("run", "0.5 s")):
            store.read("a")
    finally:
        release.set()


def test_hdfs_retries_refuses_and_gives_up(hdfs: NameNode) -> None:
    store = Store(f"{hdfs.url}/run", patience_s=deadline(PHASE_S))
    store.write("a", b"data")
    hdfs.fails = [500, 500]
    assert store.read("a") == b"data"
    hdfs.fails = [403]
    with pytest.raises(StorageError, match=says("denied")) as caught:
        store.read("a")
    assert not isinstance(caught.value, StorageOutage)
    assert hdfs.fails == []
    hdfs.fails = [500] * 100
    with pytest.raises(StorageOutage, match=says("1 s")):
        Store(f"{hdfs.url}/run", patience_s=1).names()  # not an empty list
    assert len(hdfs.fails) > 50


def test_a_backend_without_deadlines_gets_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any scheme but those that end by themselves, such as gs://."""
    release = threading.Event()
    monkeypatch.setattr(remote, "_TIMED", set())
    store = Store("memory://slow/run")
    store.write("a", b"data")
    assert store.read("a") == b"data"
    with pytest.raises(StorageError, match="does not exist"):
        store.read("b")  # errors of the thread are raised
    store = Store("memory://slow/run", patience_s=0.3)
    monkeypatch.setattr(remote, "REQUEST_TIMEOUT_S", 0.1)
    monkeypatch.setattr(store._system, "cat_file", lambda *_, **__: release.wait(60))
    try:
        with pytest.raises(StorageOutage, match=says("slow/run", "0.3 s")):
            store.read("a")
    finally:
        release.set()
