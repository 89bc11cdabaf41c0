"""Streaming from a dataset: every transition once per epoch, in an order that nothing disturbs."""

from __future__ import annotations

import shutil
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from qfleet.core.errors import ConfigError, DataError, StorageError
from qfleet.core.types import BATCH_FIELDS, SKIP, Block, EnvSpec
from qfleet.data import dataset_memory
from qfleet.data.dataset_memory import DatasetMemory
from qfleet.data.manifest import Dataset
from qfleet.data.rows import row_bytes
from qfleet.memory.ring import Ring
from qfleet.memory.samplers import UniformSampler
from qfleet.storage import published
from qfleet.storage.remote import Store
from support.datasets import BOX, STACK, record_block, scripted_block
from support.processes import python, start
from support.waiting import deadline, finish

HOST = torch.device("cpu")


@pytest.fixture(autouse=True)
def small_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading these small files needs less memory than the constant says."""
    monkeypatch.setattr(dataset_memory, "RESERVED_BYTES", 0)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return record_block(tmp_path_factory.mktemp("data"), scripted_block(BOX, 500, 2))


def memory_of(
    dataset: Dataset, rows: int = 120, readers: int = 1, seed: int = 0, n_steps: int = 1
) -> DatasetMemory:
    """Return a memory with windows of ``rows`` rows, or one window if that is enough for all."""
    memory_bytes = 2 * rows * (row_bytes(dataset.spec) + 16)
    return DatasetMemory(
        dataset, n_steps, 0.5, memory_bytes, readers, seed, HOST, lambda reward: reward
    )


def keys(obs: torch.Tensor) -> list[tuple[float, ...]]:
    return [tuple(one.reshape(-1).tolist()) for one in obs]


def draw(memory: DatasetMemory, count: int, batch: int = 7) -> list[tuple[float, ...]]:
    found = list[tuple[float, ...]]()
    while len(found) < count:
        found += keys(memory.sample(min(batch, count - len(found)), 0.0).obs)
    return found


def test_every_transition_comes_once_per_epoch_and_in_another_order(dataset: Dataset) -> None:
    memory = memory_of(dataset)
    total = dataset.manifest.transitions
    assert len(memory._plan) > 3
    epochs = [draw(memory, total) for _ in range(3)]
    for epoch in epochs:
        assert len(set(epoch)) == total
    assert set(epochs[0]) == set(epochs[1]) == set(epochs[2])
    assert epochs[0] != epochs[1] != epochs[2]
    memory.close()


@pytest.mark.parametrize("rows", [120, 10_000])
def test_the_order_does_not_depend_on_readers_batches_or_resuming(
    rows: int, dataset: Dataset
) -> None:
    count = dataset.manifest.transitions * 2 + 50
    memory = memory_of(dataset, rows)
    expected = draw(memory, count)
    for readers in (2, 4):
        assert draw(memory_of(dataset, rows, readers), count, batch=64) == expected
    for cut in (1, 333, dataset.manifest.transitions, count - 9):
        stopped = memory_of(dataset, rows)
        before = draw(stopped, cut)
        resumed = memory_of(dataset, rows, readers=2)
        resumed.load_state_dict(stopped.state_dict())
        assert before + draw(resumed, count - cut) == expected
    assert draw(memory_of(dataset, rows, seed=1), count) != expected  # the negative control


@pytest.mark.parametrize("spec", [BOX, STACK], ids=["box", "stack"])
@pytest.mark.parametrize("n_steps", [1, 3])
def test_batches_are_those_of_the_ring(spec: EnvSpec, n_steps: int, tmp_path: Path) -> None:
    """One chunk and one window: n-step returns, stacks and discounts equal the ring's."""
    block = scripted_block(spec, 200, 2)
    data = record_block(tmp_path, block, spec, chunk_rows=400, group_rows=400)
    block.flags[-1] |= SKIP
    ring = Ring(spec, 2, 402, n_steps, 0.5, UniformSampler(torch.Generator()), HOST)
    ring.extend(block)
    # The end of a recording is cut off: returns are shorter there.
    rows, envs = np.nonzero((block.flags.numpy()[: -2 - n_steps] & SKIP) == 0)
    ours = ring.gather(torch.from_numpy(rows), torch.from_numpy(envs))
    memory = memory_of(data, 10_000, n_steps=n_steps)
    theirs = memory.sample(data.manifest.transitions, 0.0)
    place = {key: i for i, key in enumerate(keys(theirs.obs))}
    order = [place[key] for key in keys(ours.obs)]
    assert len(ours) > 0.8 * len(theirs)
    for name in BATCH_FIELDS[:-1]:
        mine, other = getattr(ours, name), getattr(theirs, name)[order]
        if name == "next_obs":  # behind a terminated row there is none
            goes_on = ours.discount > 0
            mine, other = mine[goes_on], other[goes_on]
        assert torch.equal(mine, other), name


def test_rewards_are_mapped(dataset: Dataset) -> None:
    plain = memory_of(dataset, 10_000)
    mapped = DatasetMemory(dataset, 1, 0.5, 10**9, 1, 0, HOST, lambda reward: 2 * reward.sign())
    reward = plain.sample(100, 0.0).reward
    assert torch.equal(mapped.sample(100, 0.0).reward, 2 * reward.sign())


def test_a_bad_row_ends_sampling_with_file_and_row(tmp_path: Path) -> None:
    """Fault 33 of docs/faults.md."""
    data = record_block(tmp_path, scripted_block(BOX, 400, 1))
    part = data.manifest.parts[-1]
    path = data.local(part)
    table = pq.ParquetFile(path).read()
    actions = table["action"].to_pylist()
    actions[5] = 99
    kind = table.schema.field("action")
    index = table.schema.get_field_index("action")
    table = table.set_column(index, kind, pa.array(actions, type=kind.type))
    with pq.ParquetWriter(path, table.schema) as writer:
        start = 0
        for rows, *_ in part.groups:
            writer.write_table(table.slice(start, rows), row_group_size=rows)
            start += rows
    memory = memory_of(data)
    with pytest.raises(DataError, match=rf"'{part.name}', row 5: column 'action' is 99"):
        draw(memory, data.manifest.transitions)


def test_too_little_memory_and_other_data_are_refused(dataset: Dataset, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="data_memory_mb must be ≥"):
        memory_of(dataset, rows=5)
    other = record_block(tmp_path, scripted_block(BOX, 300, 1))
    with pytest.raises(DataError, match="other files"):
        memory_of(other).load_state_dict(memory_of(dataset).state_dict())


def test_a_checkpoint_knows_its_dataset_by_contents_and_not_by_counts(tmp_path: Path) -> None:
    block = scripted_block(BOX, 120, 1)
    record_block(tmp_path / "one", block)
    shutil.copytree(tmp_path / "one", tmp_path / "moved")
    block.reward[50] += 1
    record_block(tmp_path / "edited", block)
    one, moved, edited = (Dataset(str(tmp_path / name)) for name in ("one", "moved", "edited"))
    assert one.manifest.transitions == edited.manifest.transitions
    memory_of(moved).load_state_dict(memory_of(one).state_dict())
    with pytest.raises(DataError, match="other files"):
        memory_of(edited).load_state_dict(memory_of(one).state_dict())


def test_a_run_stopped_in_the_second_window_goes_on_there(dataset: Dataset) -> None:
    whole = memory_of(dataset)
    sizes = [sum(group.transitions for group in window) for window in whole._plan]
    assert len(sizes) > 3
    total, cut = sum(sizes), sizes[0] + sizes[1] // 2
    expected = draw(whole, 2 * total)
    for epoch in (expected[:total], expected[total:]):
        assert sorted(epoch) == sorted(set(expected))  # each once
    for readers in (1, 2, 4):
        stopped = memory_of(dataset, readers=readers)
        before = draw(stopped, cut)
        resumed = memory_of(dataset, readers=readers)
        resumed.load_state_dict(stopped.state_dict())
        assert before + draw(resumed, 2 * total - cut) == expected
    wrong = memory_of(dataset)
    wrong.load_state_dict(stopped.state_dict() | {"position": cut + 1})  # the negative control
    assert draw(wrong, 20) != expected[cut : cut + 20]


@pytest.mark.slow
def test_closing_does_not_wait_for_a_reader_that_hangs(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()
    monkeypatch.setattr(dataset_memory, "READ_TIMEOUT_S", 0.2)
    monkeypatch.setattr(DatasetMemory, "_read_group", lambda *_: release.wait(60))
    memory = memory_of(dataset)
    try:
        with pytest.raises(DataError, match=r"no rows for 0\.2 s"):
            memory.sample(5, 0.0)
        closing = threading.Thread(target=memory.close)
        closing.start()
        closing.join(30)
        assert not closing.is_alive()
    finally:
        release.set()


def test_the_limit_of_time_is_for_a_row_group(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A window of a large dataset has hundreds of them, and takes as long as it takes."""
    limits, result = dict[Future[Any], float | None](), Future.result

    def noted(self: Future[Any], timeout: float | None = None) -> Any:
        limits[self] = timeout
        return result(self, timeout)

    monkeypatch.setattr(Future, "result", noted)
    memory = memory_of(dataset, 10_000)
    own, start = list[Future[Any]](), memory._threads.start

    def started(function: Any) -> Future[Any]:
        own.append(start(function))
        return own[-1]

    monkeypatch.setattr(memory._threads, "start", started)  # another test's may still be read
    memory.sample(5, 0.0)
    memory.close()
    waits = [limits[future] for future in own]
    assert waits.count(dataset_memory.READ_TIMEOUT_S) == len(memory._groups) > 40
    assert waits.count(None) == 1


READING = """
import sys, threading, time, torch
from qfleet.data import dataset_memory
from qfleet.data.manifest import Dataset
host = torch.device("cpu")
memory = dataset_memory.DatasetMemory(
    Dataset(sys.argv[1]), 1, 0.5, 10**9, 2, 0, host, lambda reward: reward
)
dataset_memory.CLOSE_S = float(sys.argv[3])
memory._threads.start(lambda: (time.sleep(0.5), print("read", flush=True)))
if sys.argv[2] == "hangs":
    dataset_memory.READ_TIMEOUT_S = 0.2
    dataset_memory.DatasetMemory._read_group = lambda *_: threading.Event().wait()
    memory.sample(5, 0.0)
"""


@pytest.mark.parametrize("what", [pytest.param("hangs", marks=pytest.mark.slow), "reads"])
def test_a_process_exits_soon_but_not_while_rows_are_decoded(what: str, dataset: Dataset) -> None:
    """A daemon thread inside of pyarrow may abort Python as it ends."""
    process = start(python("-c", READING, dataset.url, what, str(deadline(3.0))))
    output, errors = finish(process, "the exit of a process with readers")
    assert output == "read\n"
    assert ("no rows for 0.2 s" in errors) == (what == "hangs")
    assert process.returncode == (what == "hangs")


def test_windows_bound_the_rows_in_memory(dataset: Dataset, monkeypatch: Any) -> None:
    rings = list[int]()
    original = Ring.__init__

    def noted(self: Ring, spec: EnvSpec, envs: int, capacity: int, *others: Any) -> None:
        rings.append(capacity)
        original(self, spec, envs, capacity, *others)

    monkeypatch.setattr(Ring, "__init__", noted)
    memory = memory_of(dataset, 120)
    draw(memory, dataset.manifest.transitions)
    assert len(rings) == 2
    assert max(rings) <= 120 < dataset.manifest.rows / 4


def test_extending_counts_rows_only(dataset: Dataset) -> None:
    memory = memory_of(dataset)
    empty = torch.empty(12, 0)
    memory.extend(Block(empty, empty, empty, empty))
    assert memory.state_dict()["total_rows"] == 12


def test_a_dataset_at_a_url_is_read_through_a_bounded_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(published.CACHE_DIR, str(tmp_path))
    monkeypatch.setattr(published, "_IN_USE", 4)
    url = "memory://datasets/streamed"
    remote = record_block(url, scripted_block(BOX, 900, 2))
    sizes = [part.size_bytes for part in remote.manifest.parts]
    assert len(sizes) > 8
    monkeypatch.setenv(published.CACHE_BYTES, str(4 * max(sizes)))
    downloads = list[str]()
    original = Store.download

    def noted(self: Store, path: str, local: Path) -> None:
        downloads.append(path)
        original(self, path, local)

    monkeypatch.setattr(Store, "download", noted)
    memory = memory_of(Dataset(url), readers=4)
    assert not downloads  # only what windows need
    assert len(set(draw(memory, remote.manifest.transitions))) == remote.manifest.transitions
    memory.close()
    kept = [path.stat().st_size for path in (tmp_path / "read").rglob("part-*")]
    assert sum(kept) <= 4 * max(sizes) < sum(sizes)
    monkeypatch.delenv(published.CACHE_BYTES)
    for _ in range(2):  # the second finds all in the cache
        downloads.clear()
        memory = memory_of(Dataset(url))
        draw(memory, remote.manifest.transitions)
        memory.close()
    assert not downloads
    part = remote.manifest.parts[0]
    remote.store.write(part.name, remote.store.read(part.name)[:-1])
    shutil.rmtree(tmp_path / "read")
    with pytest.raises(StorageError, match=f"{part.name}' is damaged"):
        draw(memory_of(Dataset(url)), remote.manifest.transitions)
