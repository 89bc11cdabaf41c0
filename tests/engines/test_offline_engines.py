"""Offline training on several processes: shares of batches, shares of epochs, equal results."""

from __future__ import annotations

import heapq
import itertools
import json
import random
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import qfleet
from qfleet.core.errors import DataError
from qfleet.core.types import Batch, EnvSpec
from qfleet.data.dataset_memory import BatchShare, DatasetMemory
from qfleet.data.manifest import Dataset
from qfleet.engines import placement
from qfleet.engines.all_reduce import rank
from qfleet.engines.offline import Variant, with_dataset
from qfleet.engines.parameter_server.client import ServersLost
from qfleet.engines.parameter_server.row_shares import RowShares
from qfleet.engines.parameter_server.server import Server
from qfleet.engines.parameter_server.supervisor import WorkerState
from qfleet.engines.parameter_server.worker import Report, Worker, WorkOrder
from qfleet.engines.parts import LoopParts, Setup
from qfleet.engines.placement import Placement
from qfleet.engines.registry import build
from qfleet.storage.checkpoint import load_checkpoint
from qfleet.telemetry.faults import FaultLog
from support.clusters import RAY_MARKS
from support.configs import tiny_config, tiny_fields
from support.datasets import record_block, scripted_block
from support.server_cases import DirectLine
from support.server_runs import make_config

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


@pytest.mark.slow
def test_ranks_learn_what_one_process_learns(data: str, tmp_path: Path) -> None:
    """Also with dropout: each rank draws its own part of the masks."""
    fields: dict[str, Any] = {"algo": "cql", "dropout": 0.2}
    one = train(data, tmp_path / "one", **fields)
    two = train(data, tmp_path / "two", engine="all-reduce", workers=2, **fields)
    assert one.result.updates == two.result.updates == 100
    torch.testing.assert_close(weights_of(two), weights_of(one), atol=1e-5, rtol=1e-4)
    other = train(data, tmp_path / "other", seed=1, **fields)  # the negative control
    assert not torch.allclose(weights_of(other), weights_of(one), atol=1e-2)


@pytest.mark.slow
def test_a_run_of_ranks_resumes_where_it_stopped(data: str, tmp_path: Path) -> None:
    whole = train(data, tmp_path / "whole")
    cut = {"engine": "all-reduce", "options": qfleet.RunOptions(stop_after=800)}
    train(data, tmp_path / "cut", workers=2, **cut)
    resumed = qfleet.resume(tmp_path / "cut")
    assert isinstance(resumed, qfleet.Trained)
    torch.testing.assert_close(weights_of(resumed), weights_of(whole), atol=1e-5, rtol=1e-4)


def test_ranks_on_gpus_place_no_ring(data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dataset has none, so that it needs no memory, and ranks need not agree on its place."""
    gpu = torch.device("cuda", 0)
    group: Any = SimpleNamespace(
        rank=0, size=1, has_nccl=True, shares_gpus=False, connect=lambda _: None,
        meet=lambda *_: pytest.fail("ranks were compared"),
    )  # fmt: skip
    monkeypatch.setattr(rank, "learner_device", lambda *_: gpu)
    monkeypatch.setattr(placement, "learner_device", lambda *_: gpu)
    monkeypatch.setattr(placement, "has_streams", lambda _: True)
    monkeypatch.setattr(placement, "free_device_bytes", lambda _: 0)
    placed = list[Placement]()

    def stop(setup: Setup, variant: Variant) -> None:
        placed.append(variant.place(setup.config, CARTPOLE, False))
        raise KeyboardInterrupt

    monkeypatch.setattr(rank.offline, "build", stop)
    config = with_dataset(tiny_config(data=data, engine="all-reduce", workers=1))
    with pytest.raises(KeyboardInterrupt):
        rank.build_rank(Setup(config, FaultLog()), group, 1, axis=lambda *_: None)
    assert placed[0].device == gpu
    assert placed[0].notes == ("gradients are added up by NCCL",)


# --- shares of an epoch -----------------------------------------------------------------------


def simulate(
    shares: RowShares,
    rates: dict[int, float],
    lost: dict[int, float] | None = None,
    share_read: Callable[[], float] = lambda: 1.0,
    joins: Mapping[int, float] = {},
) -> tuple[list[range], dict[int, float]]:
    """Let workers with these rows per second read all rows; return the pieces and each end time.

    ``lost``: the time at which a worker is gone, with the piece that it is reading.
    ``share_read``: of the batches of the next piece, before its worker loses a server.
    ``joins``: the time at which a worker begins.
    """
    speeds, finished = dict.fromkeys(rates.keys() - joins.keys(), 0.0), dict[int, float]()
    events = sorted((joins.get(worker, 0.0), worker) for worker in rates)
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
        speeds.setdefault(worker, 0.0)
        if worker in busy:
            piece, share = busy.pop(worker), share_read()
            done = len(piece) if share == 1 else int(share * len(piece) / shares._batch_size)
            read.append(piece if share == 1 else piece[: done * shares._batch_size])
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
@pytest.mark.parametrize("done", [0, 1000])
def test_every_row_is_read_exactly_once(seed: int, done: int) -> None:
    """Also after a run of 1000 rows, no multiple of 64, is resumed for more of them."""
    draw = random.Random(seed)
    transitions, workers = draw.randint(5, 3000), draw.randint(1, 5)
    batch = 64 if done else draw.randint(1, 64)
    rows = done + transitions * draw.randint(1, 4)
    rates = {worker: draw.uniform(20, 4000) for worker in range(workers)}
    lost = {0: draw.uniform(0, 1)} if workers > 1 else None
    shares = RowShares(transitions, batch, rows, done)
    read, _ = simulate(shares, rates, lost, lambda: draw.choice((1.0, 1.0, draw.random())))
    assert sorted(row for piece in read for row in piece) == list(range(done, rows))
    # Only the piece at the end may hold a part of a batch.
    assert all(len(piece) % batch == 0 for piece in read if piece.stop < rows)


def test_a_worker_of_half_the_speed_does_not_hold_up_an_epoch() -> None:
    """Ideal: 1.5 workers read 4 epochs of 6000 rows at 1000 rows/s in 16 s."""
    read, finished = simulate(RowShares(6000, 32, 24_000), {0: 500.0, 1: 1000.0})
    assert sum(map(len, read)) == 24_000
    assert max(finished.values()) <= 1.05 * 16

    class EqualShares(RowShares):
        """The negative control: half of every epoch for each, and no worker takes another's."""

        def take(self, worker: int, speeds: Mapping[int, float], slice_s: float) -> range | None:
            return super().take(worker, dict.fromkeys(speeds, 1000.0), slice_s)

        def _take_from_slowest(self, *_: Any) -> bool:
            return False

    _, finished = simulate(EqualShares(6000, 32, 24_000), {0: 500.0, 1: 1000.0})
    assert max(finished.values()) > 1.15 * 16


def test_a_worker_that_joins_gets_rows_although_its_speed_is_unknown() -> None:
    """Ideal: one worker reads 500 of 2400 rows in 0.5 s, and two the others until 1.45 s."""
    rates = {0: 1000.0, 1: 1000.0}
    read, finished = simulate(RowShares(2400, 32, 2400), rates, joins={1: 0.5})
    assert sum(map(len, read)) == 2400
    assert max(finished.values()) <= 1.1 * 1.45


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


def test_a_piece_that_was_not_begun_is_given_out_again() -> None:
    shares = RowShares(1000, 10, 1000)
    piece = shares.take(0, {0: 0.0}, 1.0)
    shares.report(0, -10)  # a gradient of the piece before was lost too
    assert shares.state_dict()["left"][0] == [0, 80] == [piece.start, piece.stop]


def test_speeds_are_those_of_the_last_pieces_without_the_time_between_them() -> None:
    worker, empty = WorkerState(number=0), Report(*[None] * len(Report._fields))
    for env_steps, slice_s, speed in ((1000, 10.0, 100.0), (1000, 9.0, 100.0), (1300, 1.0, 200.0)):
        # wall_s: an hour without rows to read is not slow reading
        report = empty._replace(env_steps=env_steps, slice_s=slice_s, wall_s=3600.0 * env_steps)
        worker.measure_rows(report)
        worker.report = report
        assert worker.rows_per_s == speed
    worker.forget_life()
    assert worker.rows_per_s == 0


def test_a_fleet_resumes_with_the_same_files_only(data: str, tmp_path: Path) -> None:
    record_block(tmp_path / "other", scripted_block(CARTPOLE, 400, 2, seed=1), CARTPOLE)
    parts = [
        build(with_dataset(make_config(data=one, learning_starts=0, algo="dqn")), FaultLog())
        for one in (data, str(tmp_path / "other"))
    ]
    states = [one.state_dict() for one in parts]
    parts[0].load_state_dict(states[0])
    with pytest.raises(DataError, match="other files"):
        parts[0].load_state_dict(states[1])
    for one in parts:
        one.close()


# --- a worker that loses its server -----------------------------------------------------------


def test_a_worker_learns_from_every_row_once_although_servers_are_lost(data: str) -> None:
    """Servers die inside of pieces: of a push, of its receipt, and before the first push."""
    config = with_dataset(make_config(data=data, learning_starts=0, algo="dqn", steps=1600))
    parts = build(config.replace(engine="offline"), FaultLog())
    parts.close()
    assert isinstance(parts, LoopParts)
    server = Server(config, parts.learner.weights.data.numpy())
    calls = itertools.count()

    class DyingNowAndThen(DirectLine):
        def finish(self, started: Any) -> Any:
            if next(calls) in (1, 20, 21, 47, 80):
                raise ServersLost([0])
            return super().finish(started)

    worker = Worker(config, 0, [DyingNowAndThen(server)])
    learner, drawn, read = worker._parts.learner, list[list[int]](), list[int]()
    step = learner.step

    def noted(batch: Batch, terms: Any) -> None:
        drawn.append(batch.index.tolist())
        step(batch, terms)

    learner.step = noted  # type: ignore[method-assign]
    transitions, batch = Dataset(data).manifest.transitions, config.batch_size
    rows = 2 * transitions // batch * batch
    shares, env_steps, updates, losses = RowShares(transitions, batch, rows), 0, 0, 0
    while (piece := shares.take(0, {0: 1000.0}, 0.3)) is not None:
        drawn.clear()
        report = worker.work(WorkOrder(0, env_steps + len(piece), 600.0, rows=piece))
        read += itertools.chain(*drawn[: report.updates - updates])
        shares.report(0, report.env_steps - env_steps)
        env_steps, updates, losses = (
            report.env_steps,
            report.updates,
            losses + bool(report.lost_servers),
        )
    worker.close()
    assert losses >= 4
    assert (env_steps, updates) == (rows, rows // batch)
    assert len(read) == rows
    assert max(Counter(read).values()) == 2  # in two epochs
    assert len(set(read)) == transitions


class TestWithRay:
    pytestmark = RAY_MARKS

    @pytest.mark.slow
    def test_workers_share_an_epoch_by_their_speeds(self, data: str, tmp_path: Path) -> None:
        """Worker 0 needs ten times as long for a row, which is most of what a row costs."""
        trained = train(
            data, tmp_path / "run", algo="bcq", engine="parameter-server", workers=2, steps=3200,
            step_latency_s=2e-3, straggler=10.0,
        )  # fmt: skip
        assert trained.result.env_steps == 3200
        assert trained.result.updates == 200
        assert trained.result.fleet is not None
        slow, fast = (worker["env_steps"] for worker in trained.result.fleet["workers"])
        assert slow + fast == 3200
        assert slow < 0.8 * fast
        lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
        epochs = [line["data/epoch"] for line in lines if "data/epoch" in line]
        assert epochs[-1] == 3200 / Dataset(data).manifest.transitions

    @pytest.mark.slow
    def test_a_resumed_run_reads_the_rest(self, data: str, tmp_path: Path) -> None:
        fields = {"engine": "parameter-server", "workers": 2, "step_latency_s": 4e-3}
        options = qfleet.RunOptions(stop_after=1000)
        cut = train(data, tmp_path / "run", steps=3200, options=options, **fields)
        assert 1000 <= cut.result.env_steps < 3200
        resumed = qfleet.resume(tmp_path / "run")
        assert isinstance(resumed, qfleet.Trained)
        assert resumed.result.env_steps == 3200
        assert resumed.result.updates == 200
