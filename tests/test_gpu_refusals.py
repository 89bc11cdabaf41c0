"""GPUs that are not like ours: kernels, graphs or compiling are refused, and the run goes on.

And evaluations in the background, which only accelerators have.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import qfleet
from qfleet.accelerator.graphs import record, why_not_recorded
from qfleet.engines import device, evaluators
from qfleet.networks import fused_cnn
from qfleet.storage.checkpoint import load_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]
SHORT: dict[str, Any] = {
    "preset": "none", "device": "cuda", "steps": 20_000, "eval_freq": 5_000, "n_eval_episodes": 8,
    "learning_starts": 1280, "tensorboard": False, "checkpoint_freq": 10**9, "compile": "off",
    "precision": "fp32", "max_episode_steps": 200,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "pqn": {
        "engine": "device", "algo": "pqn", "envs": 64, "train_freq": 512, "gradient_steps": 8,
        "batch_size": 128, "optimizer": "radam", "td_lambda": 0.65,
    },
    "dqn": {"engine": "device", "algo": "dqn", "envs": 64, "train_freq": 64, "buffer_size": 10_000},
    "pipeline": {
        "engine": "pipeline", "algo": "dqn", "envs": 16, "train_freq": 16, "buffer_size": 10_000,
        "inference_device": "cuda",
    },
}  # fmt: skip


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


class Notes(qfleet.Callback):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def on_start(self, run: Any) -> None:
        self.lines = list(run.parts.notes)


def train(folder: Path, kind: str, **changes: Any) -> tuple[qfleet.Result, str, torch.Tensor]:
    notes = Notes()
    fields = {**SHORT, **KINDS[kind], **changes}
    result = qfleet.train("MinAtar/Breakout-v1", run_dir=folder, callbacks=[notes], **fields).result
    assert result.updates > 0
    assert result.faults == {}
    weights = load_checkpoint(folder / "checkpoints").parts["learner"]["weights"]
    assert isinstance(weights, torch.Tensor)
    return result, "\n".join(notes.lines), weights.cpu()


def evaluations(folder: Path) -> list[tuple[int, float]]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [
        (row["env_steps"], row["eval/mean_reward"]) for row in lines if "eval/std_reward" in row
    ]


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        *((kind, {}) for kind in KINDS),
        # With as many episodes as environments, both use qfleet's kernels, or one compiled step.
        ("pqn", {"n_eval_episodes": 64}),
        ("pqn", {"n_eval_episodes": 48, "compile": "on"}),
    ],
    ids=str,
)
def test_evaluations_in_the_background_are_those_that_training_waits_for(
    kind: str, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, weights = train(tmp_path / "background", kind, **changes)
    for module in (evaluators, device):
        monkeypatch.setattr(module, "evaluates_in_background", lambda *_: False)
    _, _, others = train(tmp_path / "waits", kind, **changes)
    assert weights.equal(others)
    assert len(evaluations(tmp_path / "waits")) == 4
    assert evaluations(tmp_path / "background") == evaluations(tmp_path / "waits")


@pytest.mark.parametrize("kind", KINDS)
def test_a_gpu_that_records_no_graphs_trains_as_well(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, told, weights = train(tmp_path / "recorded", kind)
    assert "a launch" in told
    assert "not recorded" not in told

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("graphs are not supported\nby this driver")

    monkeypatch.setattr(torch.cuda, "graph", refuse)
    _, told, others = train(tmp_path / "plain", kind)
    assert "not recorded (graphs are not supported)" in told
    moved = float((weights - others).norm() / weights.norm())
    assert moved < 0.05


def recorded_draws(on_call: Callable[[], object]) -> tuple[list[float], str | None]:
    """Record a function that draws a number; return the numbers of three launches."""
    gpu = torch.device("cuda")
    generator = torch.Generator(gpu)
    drawn = torch.zeros((), device=gpu)

    def draw() -> None:
        drawn.copy_(torch.rand((), device=gpu, generator=generator))
        if torch.cuda.is_current_stream_capturing():
            on_call()

    launch = record(draw, gpu, [generator], "test")
    generator.manual_seed(3)
    numbers = []
    for _ in range(3):
        launch()
        numbers.append(float(drawn))
    return numbers, why_not_recorded(True, gpu, "test")


def test_a_refused_recording_leaves_the_random_numbers_usable() -> None:
    expected, reason = recorded_draws(lambda: None)
    assert reason is None
    assert len(set(expected)) == 3
    numbers, reason = recorded_draws(lambda: torch.zeros((), device="cuda").item())
    assert reason is not None
    assert numbers == expected


def test_the_garbage_of_an_earlier_run_does_not_end_a_recording() -> None:
    class Run:
        def __init__(self) -> None:
            self.itself = self
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                torch.ones((), device="cuda")

    runs, objects = [Run()], []

    def forget_the_run() -> None:
        runs.clear()
        objects.extend([] for _ in range(200_000))  # so many that the collector starts by itself

    numbers, reason = recorded_draws(forget_the_run)
    assert reason is None
    assert len(set(numbers)) == 3


def test_a_gpu_without_our_kernels_uses_those_of_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, told, _ = train(tmp_path / "ours", "pqn")
    assert "torch's kernels" not in told
    for module in (device, fused_cnn):
        monkeypatch.setattr(module, "why_no_kernels", lambda _: "Triton is missing")
    _, told, _ = train(tmp_path / "torchs", "pqn")
    assert "torch's kernels instead of our own: Triton is missing" in told


@pytest.mark.parametrize("kind", KINDS)
def test_a_gpu_that_compiles_nothing_trains_as_well(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("no compiler for this GPU")

    monkeypatch.setattr(torch, "compile", refuse)
    _, told, _ = train(tmp_path / "plain", kind, compile="on")
    assert "not compiled (RuntimeError: no compiler for this GPU)" in told
