"""Recordings that are killed, or whose store is away: what is kept, and how it comes together."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from qfleet.config.config import Config
from qfleet.core.errors import ConfigError, StorageOutage
from qfleet.core.types import SKIP, Block
from qfleet.data import recorder, writer
from qfleet.data.manifest import Dataset, Origin, merge
from qfleet.data.operations import validate
from qfleet.data.recorder import Recorder
from qfleet.data.writer import UPLOADS, Writer, check_target
from qfleet.storage.published import CACHE_DIR
from support.datasets import BOX, pieces_of, read_all, scripted_block
from support.waiting import wait_until
from support.webhdfs import NameNode, let_requests_take_long, name_node


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE_DIR, str(tmp_path / "cache"))
    monkeypatch.setattr(writer, "PATIENCE_S", 0.1)
    let_requests_take_long(monkeypatch)
    monkeypatch.setattr(recorder, "FINISH_S", 0.0)  # every piece is a file
    return tmp_path / "cache"


@pytest.fixture
def hdfs() -> Iterator[NameNode]:
    with name_node() as server:
        yield server


def make_recorder(url: str, faults: list[str]) -> Recorder:
    origin = Origin.of(Config(env=BOX.env_id), BOX, {})
    return Recorder(Writer(url, origin, "w"), BOX, 2, lambda _, fault: faults.append(fault))


def is_complete(dataset: Dataset, block: Block) -> bool:
    validate(dataset)
    usable = int((block.flags[:-1] & SKIP == 0).sum())
    return usable <= dataset.manifest.transitions <= usable + 2


def test_a_kill_loses_only_rows_of_the_last_moments(tmp_path: Path) -> None:
    faults, block = list[str](), scripted_block(BOX, 60, 2)
    one = make_recorder(str(tmp_path / "data"), faults)
    for piece in pieces_of(block, 20):
        one.add(piece)
    path = tmp_path / "data" / "part-w-00002.json"
    wait_until(path.exists, "the third file")  # nothing is closed
    assert not (tmp_path / "data" / "manifest.json").exists()
    merge(str(tmp_path / "data"))
    dataset = Dataset(str(tmp_path / "data"))
    validate(dataset)
    rows = read_all(dataset)
    assert (rows.flags & SKIP == 0).sum() >= int((block.flags[:-2] & SKIP == 0).sum())
    one.close()
    assert not faults


def test_files_are_kept_through_an_outage_and_uploaded_after_it(
    hdfs: NameNode, cache: Path
) -> None:
    url, faults, block = f"{hdfs.url}/data", list[str](), scripted_block(BOX, 60, 2)
    one = make_recorder(url, faults)
    first, second, third = pieces_of(block, 20)
    one.add(first)
    wait_until(lambda: "/data/part-w-00000.json" in hdfs.files, "the first file")
    hdfs.is_down = True
    one.add(second)
    wait_until(lambda: bool(one._writer.upload_failure), "the outage")
    assert list(cache.glob("recordings/*/part-w-00001.parquet"))
    hdfs.is_down = False
    one.add(third)
    one.close()
    assert is_complete(Dataset(url), block)
    (fault,) = faults  # one line for one outage
    assert "this machine" in fault
    assert not list(cache.glob("recordings/*/part-*"))


def test_what_an_outage_kept_back_at_the_end_is_merged_later(hdfs: NameNode) -> None:
    url, faults, block = f"{hdfs.url}/data", list[str](), scripted_block(BOX, 60, 2)
    one = make_recorder(url, faults)
    hdfs.is_down = True
    for piece in pieces_of(block, 20):
        one.add(piece)
    one.close()
    assert f"qfleet data merge {url}" in faults[-1]
    assert not hdfs.files
    hdfs.is_down = False
    merge(url)
    assert is_complete(Dataset(url), block)


def test_files_that_wait_for_an_earlier_recording_are_not_mixed_with_a_new_one(
    hdfs: NameNode,
) -> None:
    url, faults = f"{hdfs.url}/data", list[str]()
    hdfs.is_down = True
    one = make_recorder(url, faults)
    one.add(scripted_block(BOX, 20, 2))
    one.close()
    hdfs.is_down = False
    with pytest.raises(ConfigError, match=f"earlier recording.*qfleet data merge {url}"):
        check_target(url)
    check_target(url, Config(env=BOX.env_id))  # the run itself goes on
    check_target(f"{hdfs.url}/other")


def test_a_resumed_run_goes_on_without_the_store_of_its_recording(
    hdfs: NameNode, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("qfleet.storage.remote.Store._retried", _outage)
    with pytest.raises(StorageOutage):
        check_target(f"{hdfs.url}/data")
    check_target(f"{hdfs.url}/data", Config(env=BOX.env_id))
    assert "recorded files wait in" in capsys.readouterr().err


def _outage(*_: object) -> None:
    raise StorageOutage("it does not answer")


def test_a_killed_recording_of_another_environment_is_not_added_to(tmp_path: Path) -> None:
    one = make_recorder(str(tmp_path), [])
    one.add(scripted_block(BOX, 20, 2))
    one.close()
    (tmp_path / "manifest.json").unlink()
    check_target(str(tmp_path), Config(env=BOX.env_id))
    with pytest.raises(ConfigError, match="another env"):
        check_target(str(tmp_path), Config(env="CartPole-v1"))


def test_after_an_outage_a_file_takes_only_some_of_the_waiting_ones_along(
    hdfs: NameNode, cache: Path
) -> None:
    origin = Origin.of(Config(env=BOX.env_id), BOX, {})
    made = Writer(f"{hdfs.url}/data", origin, "w")
    pieces = [read_all(Dataset(str(_local(cache, number)))) for number in range(UPLOADS + 2)]
    hdfs.is_down = True
    for rows in pieces[:-1]:
        made.add(rows)
        made.finish_file()
    hdfs.is_down = False
    made.add(pieces[-1])
    made.finish_file()
    assert len(list(cache.glob("recordings/*/part-w-*.json"))) == 2
    made.close()
    assert len(Dataset(f"{hdfs.url}/data").manifest.parts) == len(pieces)


def _local(cache: Path, number: int) -> Path:
    folder = cache / f"local-{number}"
    one = make_recorder(str(folder), [])
    one.add(scripted_block(BOX, 8, 2, seed=number))
    one.close()
    return folder


def test_an_end_that_takes_too_long_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release, faults = threading.Event(), list[str]()
    monkeypatch.setattr(Writer, "close", lambda _: release.wait(60))
    monkeypatch.setattr(recorder, "WRITE_TIMEOUT_S", 0.2)
    one = make_recorder(str(tmp_path), faults)
    one.close()
    release.set()
    assert "qfleet data merge" in faults[-1]
