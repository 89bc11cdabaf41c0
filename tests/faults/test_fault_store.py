"""Fault 34 of docs/faults.md, for workers and servers: the object store is too small, or full.

A run that is started sizes its store, so that nothing is written to the disk; a store that is too
small is refused before anybody works; one that is full, with the disk full too, ends the run. Each
is one line, and nothing is left behind.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import qfleet
from qfleet.config.config import Config
from qfleet.core.errors import ClusterError, StoreFullError
from qfleet.engines.cluster.ray_cluster import open_cluster
from qfleet.engines.parameter_server import fleet
from qfleet.engines.parameter_server.server import Server
from qfleet.engines.parameter_server.store import snapshot_bytes, store_bytes
from qfleet.engines.parameter_server.wire import Exchange, Join, Pull, Push
from support.clusters import needs_ray
from support.configs import tiny_fields
from support.messages import holds
from support.processes import descendants, needs_proc
from support.waiting import CLUSTER_S, wait_until

SIZE = 1000
SMALL_BYTES = 80 * 2**20
NO_DISK = "RAY_local_fs_capacity_threshold", "0.0001"
"""So little of a disk is always in use: Ray writes nothing to it."""


def small(*net_arch: int) -> dict[str, Any]:
    return tiny_fields(
        engine="parameter-server", workers=1, threads=1, device="cpu", steps=120,
        learning_starts=60, train_freq=10, batch_size=8, snapshot_s=0.2, buffer_size=1000,
        checkpoint_freq=100, net_arch=net_arch,
    )  # fmt: skip


def nbytes(state: Any) -> int:
    if isinstance(state, dict):
        return sum(nbytes(value) for value in state.values())
    return state.nbytes if isinstance(state, np.ndarray) else 0


def make_config(**fields: Any) -> Config:
    return Config(engine="parameter-server", **fields)


@pytest.mark.parametrize("optimizer", ["adam", "rmsprop", "sgd"])
@pytest.mark.parametrize("update", ["sync", "async", "ssp", "hybrid", "local-sgd", "admm"])
def test_no_snapshot_is_larger_than_was_reckoned_with(update: str, optimizer: str) -> None:
    """When all but one wait, the server keeps what they have sent."""
    config = make_config(
        workers=3, update=update, optimizer=optimizer, staleness=0, hybrid_workers=3
    )
    weights = torch.zeros(SIZE)
    server = Server(config, weights.numpy())
    for worker in range(3):
        server.join(Join(worker))
    stamp = server.pull(Pull()).stamp
    for worker in range(2):
        server.push(Push(worker, 0, *stamp, np.ones(SIZE, dtype=np.float32), 1e-3))
    assert weights.nbytes <= nbytes(server.snapshot()) <= snapshot_bytes(config, weights)


def test_differences_that_may_be_asked_for_again_are_reckoned_with() -> None:
    config = make_config(workers=3, update="easgd")
    weights = torch.zeros(SIZE)
    server = Server(config, weights.numpy())
    for worker in range(3):
        server.join(Join(worker))
        server.exchange(Exchange(worker, 0, 0, np.ones(SIZE, dtype=np.float32), 0.1))
    assert nbytes(server.snapshot()) == snapshot_bytes(config, weights) == 4 * weights.nbytes


def test_the_store_has_room_for_every_gradient_and_answer_under_way() -> None:
    weights = torch.zeros(SIZE)
    few, many = (store_bytes(make_config(workers=m, update="async"), weights) for m in (2, 6))
    assert many - few >= 4 * 2 * weights.nbytes


@pytest.fixture
def nobody_left() -> Iterator[None]:
    before = set(descendants(os.getpid()))
    yield
    wait_until(
        lambda: not set(descendants(os.getpid())) - before, "the end of all processes", CLUSTER_S
    )


def start_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        fleet,
        "open_cluster",
        lambda workers, *_, **__: open_cluster(workers, store_bytes=SMALL_BYTES),
    )


@pytest.mark.slow
@needs_ray
@needs_proc
@pytest.mark.usefixtures("nobody_left")
def test_a_store_that_is_too_small_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    start_small(monkeypatch)
    with pytest.raises(ClusterError) as caught:
        qfleet.train("CartPole-v1", run_dir=tmp_path / "run", **small(2048, 2048))
    message = str(caught.value)
    assert "\n" not in message
    assert holds(message, "80 MiB", "--workers", "--net-arch")


@pytest.mark.slow
@needs_ray
@needs_proc
@pytest.mark.usefixtures("nobody_left")
def test_a_store_and_a_disk_that_are_full_end_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    start_small(monkeypatch)
    monkeypatch.setattr(fleet, "check_store", lambda *_: None)
    monkeypatch.setenv(*NO_DISK)
    with pytest.raises(StoreFullError) as caught:
        qfleet.train("CartPole-v1", run_dir=tmp_path / "run", **small(3072, 3072))
    message = str(caught.value)
    assert "\n" not in message
    assert holds(message, "ray start --object-store-memory")


@pytest.mark.slow
@needs_ray
@needs_proc
@pytest.mark.usefixtures("nobody_left")
def test_a_run_never_fills_the_store_that_it_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No more is given than was reckoned with, and there is no disk to go on with."""
    monkeypatch.setattr(fleet, "STORE_BYTES", SMALL_BYTES)
    monkeypatch.setenv(*NO_DISK)
    trained = qfleet.train("CartPole-v1", run_dir=tmp_path / "run", **small(2048, 2048))
    assert (trained.result.stopped_by, trained.result.faults) == ("steps", {})
