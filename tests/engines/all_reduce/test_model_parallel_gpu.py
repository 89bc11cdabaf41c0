"""Networks whose parts are on GPUs: ranks that share one, and ranks with one each (NCCL)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import qfleet
from qfleet.storage.checkpoint import load_checkpoint
from support.configs import tiny_fields

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="no two CUDA devices here")
# All actions are random, so that the replay memories do not depend on the weights.
RANDOM = tiny_fields(
    engine="all-reduce", envs=2, learning_starts=128, train_freq=8, buffer_size=2000,
    target_update_interval=100, checkpoint_freq=10**6, steps=512, optimizer="sgd",
    learning_rate=1e-2, exploration_initial_eps=1.0, exploration_final_eps=1.0, precision="fp32",
    net_arch=(32, 32), eval_freq=256, n_eval_episodes=2, batch_size=32,
    block_rows=4, env_groups=1,  # by default both depend on the device
)  # fmt: skip
MESHES: dict[str, dict[str, Any]] = {
    "tensor 2": {"workers": 2, "tensor_parallel": 2},
    "pipeline 2": {"workers": 2, "pipeline_parallel": 2},
    "gpipe": {"workers": 2, "pipeline_parallel": 2, "pipeline_schedule": "gpipe"},
    "prioritised": {"workers": 2, "tensor_parallel": 2, "prioritized_replay": True},
    "tensor 2 × pipeline 2": {"workers": 4, "tensor_parallel": 2, "pipeline_parallel": 2},
    "data 2 × tensor 2": {"workers": 4, "tensor_parallel": 2},
}


def train(folder: Path, **fields: Any) -> tuple[qfleet.Trained, Tensor]:
    """Return a finished run and its whole weights."""
    trained = qfleet.train("CartPole-v1", run_dir=folder, **RANDOM | fields)
    state = load_checkpoint(folder / "checkpoints").parts["learner"]["weights"]
    assert isinstance(state, Tensor)
    return trained, state.cpu()


def check_same_as_on_cpus(tmp_path: Path, fields: dict[str, Any]) -> qfleet.Trained:
    """The weights are those of ranks on CPUs; without any update they would not be."""
    on_gpu, ours = train(tmp_path / "gpu", device="cuda", **fields)
    on_cpu, theirs = train(tmp_path / "cpu", device="cpu", **fields)
    _, untrained = train(tmp_path / "untrained", device="cpu", **fields | {"learning_rate": 1e-12})
    assert on_gpu.result.updates == on_cpu.result.updates > 0
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)
    assert (untrained - theirs).abs().max() > 100 * (ours - theirs).abs().max()
    ranks = on_gpu.result.fleet["ranks"]
    assert all(rank["device"] for rank in ranks)
    assert not any(rank["device"] for rank in on_cpu.result.fleet["ranks"])
    assert qfleet.load(tmp_path / "gpu", device="cuda").evaluate(1).returns
    return on_gpu


@pytest.mark.parametrize("mesh", MESHES)
def test_ranks_that_share_a_gpu_are_ranks_on_cpus(
    tmp_path: Path, mesh: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    check_same_as_on_cpus(tmp_path, MESHES[mesh])


def test_convolutions_are_split_on_a_gpu(tmp_path: Path) -> None:
    """Nature's network, whose strides a GPU folds into channels, in parts and in stages."""
    fields = RANDOM | {"workers": 2, "device": "cuda", "steps": 160, "eval_max_steps": 64}
    fields |= {"network": "nature", "buffer_size": 400, "batch_size": 8, "net_arch": ()}
    for name, split in (("tensor", "tensor_parallel"), ("pipeline", "pipeline_parallel")):
        folder = tmp_path / name
        trained = qfleet.train("ALE/Pong-v5", run_dir=folder, **fields | {split: 2})
        assert trained.result.updates > 0
        learner = load_checkpoint(folder / "checkpoints").parts["learner"]
        assert torch.isfinite(learner["weights"]).all()


@needs_two
@pytest.mark.parametrize("mesh", ["tensor 2", "pipeline 2"])
def test_ranks_with_a_gpu_each_are_ranks_on_cpus(tmp_path: Path, mesh: str) -> None:
    trained = check_same_as_on_cpus(tmp_path, MESHES[mesh])
    assert len({rank["device"] for rank in trained.result.fleet["ranks"]}) == 2
