"""Runs in bf16 on a CPU, on every engine of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import qfleet
from qfleet.storage.checkpoint import load_checkpoint
from support.configs import tiny_fields

SMALL = tiny_fields(
    steps=400, learning_starts=64, train_freq=8, device="cpu", buffer_size=1000, eval_freq=0,
    n_eval_episodes=1, checkpoint_freq=10**9,
)  # fmt: skip


def weights_after(folder: Path, **fields: Any) -> torch.Tensor:
    result = qfleet.train("CartPole-v1", run_dir=folder, **SMALL | fields).result
    assert result.faults == {}
    assert result.updates > 0
    weights: torch.Tensor = load_checkpoint(folder / "checkpoints").parts["learner"]["weights"]
    assert weights.dtype == torch.float32
    return weights


@pytest.mark.parametrize(
    "fields",
    [
        {"engine": "serial"},
        {"engine": "serial", "dueling": True, "noisy": True},
        {"engine": "pipeline"},
        {"engine": "device", "envs": 8},
        {"engine": "device", "envs": 8, "population": 2, "algo": "pqn", "train_freq": 32},
    ],
    ids=lambda fields: " ".join(map(str, fields.values())),
)
def test_bf16_learns_almost_the_same(tmp_path: Path, fields: dict[str, Any]) -> None:
    exact = weights_after(tmp_path / "fp32", **fields)
    rough = weights_after(tmp_path / "bf16", precision="bf16", **fields)
    assert not torch.equal(rough, exact)
    assert float((rough - exact).norm() / exact.norm()) < 0.1


def test_in_lockstep_the_pipeline_is_serial_in_bf16_too(tmp_path: Path) -> None:
    told = {"precision": "bf16", "threads": 1}
    serial = weights_after(tmp_path / "serial", engine="serial", **told)
    pipeline = weights_after(tmp_path / "pipeline", engine="pipeline", lockstep=True, **told)
    assert torch.equal(serial, pipeline)
