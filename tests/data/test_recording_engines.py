"""``--record`` on every engine: all rows of training, with probabilities, and nothing else."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import qfleet
from qfleet.core.errors import StorageError
from qfleet.core.types import SKIP, TERMINATED
from qfleet.data import recorder
from qfleet.data.manifest import Dataset
from qfleet.data.operations import read_episodes, validate
from qfleet.data.writer import check_target
from qfleet.storage.checkpoint import load_checkpoint
from qfleet.storage.published import CACHE_DIR
from support.clusters import needs_ray
from support.configs import tiny_fields
from support.datasets import BOX, read_all, record_block, scripted_block
from support.s3 import BUCKET, s3_server


def train(tmp_path: Path, name: str, record: bool = True, **fields: Any) -> qfleet.Trained:
    chosen = {"engine": "serial", "envs": 2, "steps": 600, "learning_starts": 100} | fields
    if record:
        chosen["record"] = str(tmp_path / f"{name}-data")
    return qfleet.train(
        chosen.pop("env", "CartPole-v1"), run_dir=tmp_path / name, **tiny_fields(**chosen)
    )


def weights_of(trained: qfleet.Trained) -> torch.Tensor:
    checkpoint = load_checkpoint(trained.folder / "checkpoints", None)
    weights: torch.Tensor = checkpoint.parts["learner"]["weights"]
    return weights


def data_of(tmp_path: Path, name: str) -> Dataset:
    dataset = Dataset(str(tmp_path / f"{name}-data"))
    validate(dataset)
    return dataset


def test_recording_changes_nothing_and_holds_every_step(tmp_path: Path) -> None:
    plain = train(tmp_path, "plain", record=False)
    recorded = train(tmp_path, "recorded")
    assert torch.equal(weights_of(plain), weights_of(recorded))
    dataset = data_of(tmp_path, "recorded")
    rows = read_all(dataset)
    checkpoint = load_checkpoint(recorded.folder / "checkpoints", None)
    memory = checkpoint.parts["memory"]
    flags = memory["flags"].view(-1, 2).clone()
    flags[-1] |= torch.where(flags[-1] & TERMINATED != 0, 0, SKIP).to(torch.uint8)
    starts = (flags & SKIP == 0).numpy()
    assert dataset.manifest.transitions == starts.sum() == (rows.flags & SKIP == 0).sum()
    frames = torch.cat(list(memory["frames"].tensors)).numpy()[starts]
    usable = rows.obs[rows.flags & SKIP == 0]
    # A row of the ring is a step of both envs; pieces are of one env.
    assert sorted(map(tuple, frames.tolist())) == sorted(map(tuple, usable.tolist()))


def test_probabilities_are_those_of_the_greedy_policy_with_epsilon(tmp_path: Path) -> None:
    """A constant ε of 0.4 with 2 actions: 0.8 for the best action, 0.2 for the other."""
    train(
        tmp_path, "run", steps=2000, exploration_initial_eps=0.4, exploration_final_eps=0.4,
        learning_starts=1990,
    )  # fmt: skip
    rows = read_all(data_of(tmp_path, "run"))
    usable = rows.flags & SKIP == 0
    chances, counts = np.unique(rows.probability[usable].round(5), return_counts=True)
    assert chances.tolist() == pytest.approx([0.2, 0.8])
    assert counts[1] / counts.sum() == pytest.approx(0.8, abs=0.03)


def test_a_sampled_policy_has_unknown_probabilities(tmp_path: Path) -> None:
    train(tmp_path, "a3c", algo="a3c", envs=2, train_freq=20, batch_size=20, learning_starts=0)
    assert np.isnan(read_all(data_of(tmp_path, "a3c")).probability).all()


def test_the_pipeline_in_lockstep_records_what_serial_does(tmp_path: Path) -> None:
    train(tmp_path, "serial")
    train(tmp_path, "pipeline", engine="pipeline", lockstep=True)
    ours, theirs = (read_all(data_of(tmp_path, name)) for name in ("serial", "pipeline"))
    for name in ("obs", "action", "reward", "flags", "truncated", "step", "probability"):
        assert np.array_equal(getattr(ours, name), getattr(theirs, name)), name


def test_the_device_engine_records_tensor_environments(tmp_path: Path) -> None:
    trained = train(
        tmp_path, "device", engine="device", envs=4, exploration_initial_eps=0.4,
        exploration_final_eps=0.4,
    )  # fmt: skip
    rows = read_all(data_of(tmp_path, "device"))
    usable = rows.flags & SKIP == 0
    assert usable.sum() == pytest.approx(trained.result.env_steps, rel=0.1)
    assert np.unique(rows.probability[usable].round(5)).tolist() == pytest.approx([0.2, 0.8])


def test_a_resumed_run_adds_its_rows(tmp_path: Path) -> None:
    data = str(tmp_path / "data")
    options = qfleet.RunOptions(stop_after=300)
    fields = tiny_fields(engine="serial", steps=600, learning_starts=100, record=data)
    qfleet.train("CartPole-v1", run_dir=tmp_path / "run", options=options, **fields)
    first = Dataset(data).manifest
    with pytest.raises(qfleet.ConfigError, match="record"):
        qfleet.resume(tmp_path / "run")  # it writes outside of the run's folder
    qfleet.resume(tmp_path / "run", record=data)
    both = Dataset(data)
    validate(both)
    assert len(both.manifest.parts) == 2 * len(first.parts)
    assert both.manifest.transitions > 1.8 * first.transitions
    assert len(read_episodes(both)) >= both.manifest.episodes > first.episodes


@pytest.mark.parametrize("call", ["add", "close"])
def test_a_storage_that_fails_ends_the_recording_and_not_the_training(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(recorder.Writer, call, fail)
    monkeypatch.setattr(recorder, "MOST_CHUNK_ROWS", 32)
    trained = train(tmp_path, "run")
    assert trained.result.env_steps == 600
    assert trained.result.faults["record"] == 1
    assert not (tmp_path / "run-data" / "manifest.json").exists()


def test_a_target_that_cannot_be_written_stops_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(kind: type[Exception], words: str, record: str) -> None:
        fields = tiny_fields(engine="serial", steps=600, learning_starts=100, record=record)
        with pytest.raises(kind, match=words) as caught:
            qfleet.train("CartPole-v1", run_dir=tmp_path / "run", **fields)
        assert "\n" not in str(caught.value)
        assert not (tmp_path / "run").exists()

    with s3_server() as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        refused(StorageError, "nosuch", "s3://nosuch/data")
        server.fault = lambda method, _: 403 if method == "PUT" else 0
        refused(StorageError, "denied", f"s3://{BUCKET}/data")
    (tmp_path / "file").touch()
    monkeypatch.setenv(CACHE_DIR, str(tmp_path / "file" / "cache"))
    refused(qfleet.ConfigError, "--cache-dir", "memory://recorded/data")
    record_block(tmp_path / "data", scripted_block(BOX, 30, 1))
    refused(qfleet.ConfigError, "holds a dataset already", str(tmp_path / "data"))
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    refused(qfleet.ConfigError, "pyarrow", str(tmp_path / "new"))


def test_a_resumed_run_adds_to_a_dataset_of_its_own_environment_only(tmp_path: Path) -> None:
    config = train(tmp_path, "run", steps=200, frame_stack=2).config
    check_target(str(tmp_path / "run-data"), config)
    with pytest.raises(qfleet.ConfigError, match="another frame_stack"):
        check_target(str(tmp_path / "run-data"), config.replace(frame_stack=3))


@needs_ray
@pytest.mark.slow
@pytest.mark.parametrize("engine", ["parameter-server", "actors", "all-reduce"])
def test_every_process_records_its_own_part(engine: str, tmp_path: Path) -> None:
    trained = train(tmp_path, "run", engine=engine, workers=2, envs=2, steps=800)
    dataset = data_of(tmp_path, "run")
    assert len(dataset.manifest.parts) == 2
    done = dataset.manifest.transitions / trained.result.env_steps
    assert 0.8 < done < 1.3  # actors are ahead of what the learner has received
    manifest = json.loads((tmp_path / "run-data" / "manifest.json").read_text())
    assert manifest["policy"]["training"] is True
