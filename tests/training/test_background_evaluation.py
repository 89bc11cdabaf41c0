"""Evaluations in the background: those of the same weights, counted when they are there.

Runs on accelerators have them; here they are forced on the CPU.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import qfleet
from qfleet.agent import background_evaluation
from qfleet.agent.background_evaluation import BackgroundEvaluator
from qfleet.agent.evaluation import Evaluation, GiveUp, HostEvaluator
from qfleet.agent.weights import FlatWeights
from qfleet.config.config import Config
from qfleet.core.errors import EnvironmentFault
from qfleet.core.types import EnvSpec
from qfleet.engines import device, evaluators
from qfleet.engines.factories import evaluates_in_background
from qfleet.networks.factory import make_network
from qfleet.storage.checkpoint import list_checkpoints, load_checkpoint
from qfleet.telemetry.timers import Timers
from support.configs import tiny_fields
from support.waiting import PHASE_S, deadline, wait_until

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
FIELDS = tiny_fields(
    steps=1200, eval_freq=200, n_eval_episodes=3, learning_starts=100, envs=4, train_freq=8,
    max_episode_steps=40, buffer_size=1000, device="cpu", precision="fp32",
)  # fmt: skip


def train(folder: Path, **changes: Any) -> qfleet.Trained:
    return qfleet.train("CartPole-v1", run_dir=folder, **FIELDS | changes)


def force(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (evaluators, device):
        monkeypatch.setattr(
            module, "evaluates_in_background", lambda config, _: config.eval_freq > 0
        )


def evaluations(folder: Path) -> list[tuple[int, float]]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [
        (row["env_steps"], row["eval/mean_reward"]) for row in lines if "eval/std_reward" in row
    ]


def weights_of(folder: Path) -> torch.Tensor:
    weights = load_checkpoint(folder / "checkpoints").parts["learner"]["weights"]
    assert isinstance(weights, torch.Tensor)
    return weights


def test_the_evaluations_are_those_of_a_run_that_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tmp_path / "waits", engine="pipeline")
    force(monkeypatch)
    train(tmp_path / "beside", engine="pipeline")
    assert len(evaluations(tmp_path / "waits")) == 6
    assert evaluations(tmp_path / "beside") == evaluations(tmp_path / "waits")
    assert weights_of(tmp_path / "beside").equal(weights_of(tmp_path / "waits"))
    best = [qfleet.load(tmp_path / name).weights.data for name in ("waits", "beside")]
    assert best[0].equal(best[1])
    # The control: with the weights of the start, all evaluations are the same.
    monkeypatch.setattr(FlatWeights, "mirror", lambda *_: None)
    train(tmp_path / "stale", engine="pipeline")
    assert len({mean for _, mean in evaluations(tmp_path / "stale")}) == 1


def test_training_goes_on_and_an_early_stop_counts_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    force(monkeypatch)
    go_on, play = threading.Event(), HostEvaluator.play

    def wait_first(evaluator: HostEvaluator, give_up: GiveUp) -> Evaluation | None:
        assert go_on.wait(deadline(PHASE_S))
        return play(evaluator, give_up)

    monkeypatch.setattr(HostEvaluator, "play", wait_first)

    class Release(qfleet.Callback):
        def on_step(self, run: Any) -> None:
            # 100 steps after the evaluation began.
            if run.parts.clock.env_steps >= 300 and not go_on.is_set():
                go_on.set()
                wait_until(lambda: run.parts.background.is_done, "the evaluation", 60)

    result = train(
        tmp_path / "run", engine="pipeline", target_return=1.0, callbacks=[Release()]
    ).result
    assert result.stopped_by == "target_return"
    assert 300 <= result.env_steps < 400
    assert [steps for steps, _ in evaluations(tmp_path / "run")] == [200]
    assert result.eval_return_mean == evaluations(tmp_path / "run")[0][1]
    manifest = json.loads((tmp_path / "run" / "best" / "manifest.json").read_text())
    assert manifest["meta"]["env_steps"] == 200


@pytest.mark.slow
def test_a_resume_repeats_an_evaluation_that_was_not_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    force(monkeypatch)
    runs, gave_up = list[Any](), list[bool]()

    class Keep(qfleet.Callback):
        def on_start(self, run: Any) -> None:
            runs.append(run)

    def never(_: HostEvaluator, give_up: GiveUp) -> None:
        wait_until(lambda: runs[0].parts.clock.env_steps >= 400, "the next evaluation")
        runs[0].started_s -= 3600.0
        wait_until(lambda: bool(give_up(0)), "a reason to give up", 60)
        gave_up.append(True)

    with monkeypatch.context() as patch:
        patch.setattr(HostEvaluator, "play", never)
        options = qfleet.RunOptions(max_wall_s=3600.0)
        # The evaluation never ends: the next one waits for it, until the time is over.
        first = train(tmp_path / "run", engine="pipeline", options=options, callbacks=Keep())
    assert first.result.stopped_by == "max_wall"
    assert gave_up
    assert first.result.eval_return_mean is None
    resumed = qfleet.resume(tmp_path / "run")
    assert isinstance(resumed, qfleet.Trained)
    seen = [steps for steps, _ in evaluations(tmp_path / "run")]
    assert first.result.env_steps == 400
    assert seen == [400, 600, 800, 1000, 1200]


def test_a_fault_of_the_environment_ends_the_run_with_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    force(monkeypatch)

    def fail(*_: object) -> None:
        raise EnvironmentFault("the evaluation's environment broke")

    monkeypatch.setattr(HostEvaluator, "play", fail)
    with pytest.raises(EnvironmentFault, match="environment broke"):
        train(tmp_path / "run", engine="pipeline")
    assert list_checkpoints(tmp_path / "run" / "checkpoints")


@pytest.mark.parametrize(
    ("changes", "device", "expected"),
    [
        ({}, CUDA, True),
        ({"engine": "device"}, CUDA, True),
        ({}, CPU, False),
        ({"engine": "serial"}, CUDA, False),
        ({"engine": "all-reduce"}, CUDA, False),
        ({"lockstep": True}, CUDA, False),
        ({"eval_freq": 0}, CUDA, False),
        ({"lr_plateau_patience": 2}, CUDA, False),
        ({"halving_interval": 100}, CUDA, False),
        ({"pbt_interval": 100}, CUDA, False),
    ],
    ids=str,
)
def test_only_an_accelerator_that_does_not_need_the_result_evaluates_in_background(
    changes: dict[str, Any], device: torch.device, expected: bool
) -> None:
    assert evaluates_in_background(Config(engine="pipeline").replace(**changes), device) is expected


def test_a_copy_has_the_buffers_and_closing_ends_an_evaluation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(background_evaluation, "CLOSE_S", deadline(PHASE_S))
    spec = EnvSpec("CartPole-v1", (4,), "float32", 2)
    config = Config(net_arch=(8,), normalize_observations=True)
    source, copy = (FlatWeights(make_network(config, spec, CPU, seed)) for seed in (0, 1))
    for buffer in source.buffers().values():
        buffer.copy_(torch.rand_like(buffer, dtype=torch.float32).to(buffer.dtype))
    given_up = threading.Event()

    def play(give_up: GiveUp) -> None:
        wait_until(lambda: bool(give_up(0)), "the end", 60)
        given_up.set()

    beside = BackgroundEvaluator(play, source, copy, Timers())
    beside.start(lambda _: False)
    assert copy.data.equal(source.data)
    for name, buffer in source.buffers().items():
        assert buffer.equal(copy.buffers()[name])
    assert not beside.is_done
    beside.close()
    assert given_up.is_set()
    assert beside.result() is None
    assert beside.timers.seconds["evaluate"] > 0
