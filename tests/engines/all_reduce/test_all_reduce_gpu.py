"""Ranks on GPUs: NCCL inside recorded updates, and ranks that share one GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import qfleet
from qfleet.engines.all_reduce.mesh import Axis
from qfleet.storage.checkpoint import load_checkpoint
from support.configs import tiny_fields

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]
# All actions are random, so that the replay memories do not depend on the weights.
RANDOM = tiny_fields(
    envs=4, device="cuda", learning_starts=256, train_freq=8, block_rows=8, buffer_size=2000,
    target_update_interval=100, checkpoint_freq=10**6, steps=1024, optimizer="sgd",
    learning_rate=1e-2, exploration_initial_eps=1.0, exploration_final_eps=1.0,
    precision="fp32", compile="off",
)  # fmt: skip


def train(folder: Path, **fields: Any) -> tuple[qfleet.Trained, Tensor]:
    """Return a finished run and its weights."""
    trained = qfleet.train("CartPole-v1", run_dir=folder, **RANDOM | fields)
    state = load_checkpoint(folder / "checkpoints").parts["learner"]["weights"]
    assert isinstance(state, Tensor)
    return trained, state.cpu()


@pytest.mark.parametrize("fields", [{}, {"prioritized_replay": True}, {"compile": "on"}])
def test_one_rank_with_nccl_is_the_pipeline(tmp_path: Path, fields: dict[str, Any]) -> None:
    rank, ours = train(tmp_path / "rank", engine="all-reduce", workers=1, **fields)
    pipeline, theirs = train(tmp_path / "pipeline", engine="pipeline", env_groups=1, **fields)
    assert rank.result.updates == pipeline.result.updates > 0
    assert torch.equal(ours, theirs)


def test_the_exchange_is_part_of_the_recorded_updates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Tensor] = []
    reduce = Axis._reduce

    def doubled(axis: Axis, tensor: Tensor, operation: Any) -> None:
        calls.append(tensor)
        reduce(axis, tensor, operation)
        tensor.mul_(2)

    _, plain = train(tmp_path / "plain", engine="all-reduce", workers=1)
    monkeypatch.setattr(Axis, "_reduce", doubled)
    trained, other = train(tmp_path / "doubled", engine="all-reduce", workers=1)
    assert not torch.equal(plain, other)
    assert 0 < sum(tensor.is_cuda for tensor in calls) < trained.result.updates


@pytest.mark.parametrize("fields", [{}, {"gradient_compression": "top-k", "top_k_share": 0.2}])
def test_two_ranks_that_share_a_gpu_are_two_ranks_on_cpus(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    fields |= {"engine": "all-reduce", "workers": 2, "replay_device": "cpu"}
    on_gpu, ours = train(tmp_path / "gpu", **fields)
    on_cpu, theirs = train(tmp_path / "cpu", **fields | {"device": "cpu"})
    assert on_gpu.result.updates == on_cpu.result.updates > 0
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)
    _, alone = train(tmp_path / "one", engine="all-reduce", workers=1, replay_device="cpu")
    assert (alone - theirs).abs().max() > 100 * (ours - theirs).abs().max()


@pytest.mark.parametrize("kind", ["none", "powersgd"])
def test_ranks_on_a_gpu_resume(tmp_path: Path, kind: str) -> None:
    half = qfleet.RunOptions(stop_after=512)
    told = {"engine": "all-reduce", "workers": 2, "gradient_compression": kind}
    stopped, _ = train(tmp_path / "run", options=half, **told)
    for workers, steps in ((2, 1024), (1, 1280)):  # one rank records, with NCCL
        resumed = qfleet.resume(tmp_path / "run", steps=steps, workers=workers)
        assert isinstance(resumed, qfleet.Trained)
        assert resumed.result.env_steps == steps
        made = (steps - 512) // 8
        assert resumed.result.updates == stopped.result.updates + made
