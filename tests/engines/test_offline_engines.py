"""Offline training on several processes: shares of batches, shares of epochs, equal results."""

from __future__ import annotations

import heapq
import random
from pathlib import Path
from typing import Any

import pytest
import torch

import qfleet
from qfleet.core.types import EnvSpec
from qfleet.data.dataset_memory import BatchShare, DatasetMemory
from qfleet.data.manifest import Dataset
from qfleet.engines.parameter_server.row_shares import RowShares
from qfleet.storage.checkpoint import load_checkpoint
from support.clusters import RAY_MARKS
from support.configs import tiny_fields
from support.datasets import record_block, scripted_block

CARTPOLE = EnvSpec("CartPole-v1", (4,), "float32", 2)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("data")
    record_block(folder, scripted_block(CARTPOLE, 400, 2), CARTPOLE)
    return str(folder)


def train(data: str, run_dir: Path, **fields: Any) -> qfleet.Trained:
    fields = tiny_fields(**{"steps": 1600, "learning_rate": 1e-3, **fields})
    fields.pop("preset")
    trained = qfleet.train(data=data, run_dir=run_dir, **fields)
    assert isinstance(trained, qfleet.Trained)
    return trained


def weights_of(trained: qfleet.Trained) -> torch.Tensor:
    weights: torch.Tensor = load_checkpoint(trained.folder / "checkpoints").parts["learner"][
        "weights"
    ]
    return weights


# --- a share of every batch -------------------------------------------------------------------


def memory_of(data: str, share: BatchShare | None) -> DatasetMemory:
    host = torch.device("cpu")
    return DatasetMemory(Dataset(data), 1, 0.9, 10**9, 1, 0, host, lambda reward: reward, share)


def test_shares_of_a_batch_are_the_batch(data: str) -> None:
    """Three ranks with 3, 3 and 2 of 8 samples, in bursts, across the end of an epoch."""
    whole = memory_of(data, None)
    shares = [BatchShare(0, 3, 8), BatchShare(3, 3, 8), BatchShare(6, 2, 8)]
    ranks = [memory_of(data, share) for share in shares]
    for updates in (1, 5, whole.transitions // 8, 3):
        together = whole.sample(8 * updates, 0.0).obs.view(updates, 8, 4)
        parts = [
            rank.sample(share.size * updates, 0.0).obs.view(updates, share.size, 4)
            for rank, share in zip(ranks, shares, strict=True)
        ]
        assert torch.equal(torch.cat(parts, dim=1), together)
    assert {rank.position for rank in ranks} == {whole.position}
    for memory in (whole, *ranks):
        memory.close()


def test_ranks_learn_what_one_process_learns(data: str, tmp_path: Path) -> None:
    one = train(data, tmp_path / "one", algo="cql")
    two = train(data, tmp_path / "two", algo="cql", engine="all-reduce", workers=2)
    assert one.result.updates == two.result.updates == 100
    torch.testing.assert_close(weights_of(two), weights_of(one), atol=1e-5, rtol=1e-4)
    other = train(data, tmp_path / "other", algo="cql", seed=1)  # the negative control
    assert not torch.allclose(weights_of(other), weights_of(one), atol=1e-2)


@pytest.mark.slow
def test_a_run_of_ranks_resumes_where_it_stopped(data: str, tmp_path: Path) -> None:
    whole = train(data, tmp_path / "whole")
    cut = {"engine": "all-reduce", "options": qfleet.RunOptions(stop_after=800)}
    train(data, tmp_path / "cut", workers=2, **cut)
    resumed = qfleet.resume(tmp_path / "cut")
    assert isinstance(resumed, qfleet.Trained)
    torch.testing.assert_close(weights_of(resumed), weights_of(whole), atol=1e-5, rtol=1e-4)


# --- shares of an epoch -----------------------------------------------------------------------


def simulate(
    shares: RowShares, rates: dict[int, float], lost: dict[int, float] | None = None
) -> tuple[list[range], dict[int, float]]:
    """Let workers with these rows per second read all rows; return the pieces and each end time.

    ``lost``: the time at which a worker is gone, with the piece that it is reading.
    """
    speeds, finished = dict.fromkeys(rates, 0.0), dict[int, float]()
    events = [(0.0, worker) for worker in rates]
    read, busy = list[range](), dict[int, range]()
    while events:
        now_s, worker = heapq.heappop(events)
        if lost and now_s >= lost.get(worker, 1e9):
            shares.lose(worker)
            del speeds[worker]
            busy.pop(worker, None)
            events += [(now_s, idle) for idle in finished if idle in speeds]
            heapq.heapify(events)
            continue
        if worker in busy:
            read.append(busy.pop(worker))
            shares.report(worker, len(read[-1]))
            speeds[worker] = rates[worker]
        piece = shares.take(worker, speeds, 0.1)
        if piece is None:
            finished[worker] = now_s
            continue
        finished.pop(worker, None)
        busy[worker] = piece
        heapq.heappush(events, (now_s + len(piece) / rates[worker], worker))
    return read, finished


@pytest.mark.parametrize("seed", range(20))
def test_every_row_is_read_exactly_once(seed: int) -> None:
    draw = random.Random(seed)
    transitions, batch, workers = draw.randint(5, 3000), draw.randint(1, 64), draw.randint(1, 5)
    rows = transitions * draw.randint(1, 4)
    rates = {worker: draw.uniform(20, 4000) for worker in range(workers)}
    lost = {0: draw.uniform(0, 1)} if workers > 1 else None
    read, _ = simulate(RowShares(transitions, batch, rows), rates, lost)
    assert sorted(row for piece in read for row in piece) == list(range(rows))
    # Only the piece at the end may hold a part of a batch.
    assert all(len(piece) % batch == 0 for piece in read if piece.stop < rows)


def test_a_worker_of_half_the_speed_does_not_hold_up_an_epoch() -> None:
    """Ideal: 1.5 workers read 4 epochs of 6000 rows at 1000 rows/s in 16 s."""
    read, finished = simulate(RowShares(6000, 32, 24_000), {0: 500.0, 1: 1000.0})
    assert sum(map(len, read)) == 24_000
    assert max(finished.values()) <= 1.05 * 16
    equal = 2 * 6000  # the negative control: half of the rows for the slower worker
    assert equal / 500 > 1.15 * 16


def test_shares_are_contiguous_and_in_proportion_once_speeds_are_known() -> None:
    shares = RowShares(9000, 10, 18_000, done=9000)
    piece = shares.take(0, {0: 500.0, 1: 1000.0}, 1.0)
    assert piece == range(9000, 9500)
    assert shares.take(1, {0: 500.0, 1: 1000.0}, 1.0) == range(12_000, 13_000)


def test_rows_that_are_not_read_are_in_the_state() -> None:
    shares = RowShares(1000, 10, 3000)
    speeds = {0: 1000.0, 1: 1000.0}
    for worker in speeds:
        shares.take(worker, speeds, 0.1)
    shares.report(0, 100)
    resumed = RowShares(1000, 10, 3000)
    resumed.load_state_dict(shares.state_dict())
    read, _ = simulate(resumed, {0: 1000.0, 1: 700.0, 2: 300.0})
    assert sorted(row for piece in read for row in piece) == list(range(100, 3000))


class TestWithRay:
    pytestmark = RAY_MARKS

    @pytest.mark.slow
    def test_workers_share_an_epoch_by_their_speeds(self, data: str, tmp_path: Path) -> None:
        """Worker 0 needs twice as long for a row; both are slow enough for this to be all."""
        trained = train(
            data, tmp_path / "run", algo="bcq", engine="parameter-server", workers=2, steps=3200,
            step_latency_s=2e-3, straggler=2.0,
        )  # fmt: skip
        assert trained.result.env_steps == 3200
        assert trained.result.updates == 200
        assert trained.result.fleet is not None
        slow, fast = (worker["env_steps"] for worker in trained.result.fleet["workers"])
        assert slow + fast == 3200
        assert slow < 0.8 * fast

    @pytest.mark.slow
    def test_a_resumed_run_reads_the_rest(self, data: str, tmp_path: Path) -> None:
        fields = {"engine": "parameter-server", "workers": 2, "step_latency_s": 1e-3}
        options = qfleet.RunOptions(stop_after=1000)
        cut = train(data, tmp_path / "run", steps=3200, options=options, **fields)
        assert 1000 <= cut.result.env_steps < 3200
        resumed = qfleet.resume(tmp_path / "run")
        assert isinstance(resumed, qfleet.Trained)
        assert resumed.result.env_steps == 3200
        assert resumed.result.updates == 200
