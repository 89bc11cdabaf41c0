"""Recordings that are killed, or whose store is away: what is kept, and how it comes together."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from qfleet.config.config import Config
from qfleet.core.types import SKIP, Block
from qfleet.data import recorder, writer
from qfleet.data.manifest import Dataset, Origin, merge
from qfleet.data.operations import validate
from qfleet.data.recorder import Recorder
from qfleet.data.writer import Writer
from qfleet.storage.published import CACHE_DIR
from support.datasets import BOX, pieces_of, read_all, scripted_block
from support.waiting import wait_until
from support.webhdfs import NameNode, name_node


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE_DIR, str(tmp_path / "cache"))
    monkeypatch.setattr(writer, "PATIENCE_S", 0.1)
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
