"""Faults 3 and 4 of docs/faults.md, at the level of a whole run: bad batches, exploding values."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

import qfleet
from qfleet.core.errors import DivergedError, FaultRateError
from qfleet.core.types import Batch
from qfleet.memory.ring import Ring
from qfleet.storage.checkpoint import list_checkpoints, load_checkpoint
from qfleet.training.run_state import RunOptions
from support.faulty_envs import TINY, faulty, result_of
from support.messages import holds, says


def poison(monkeypatch: pytest.MonkeyPatch, which: Any) -> None:
    """Every batch for whose number ``which`` says yes has a NaN among its rewards."""
    drawn = 0
    sample = Ring.sample

    def poisoned(self: Ring, count: int, beta: float) -> Batch:
        nonlocal drawn
        drawn += 1
        batch = sample(self, count, beta)
        if not which(drawn):
            return batch
        reward = batch.reward.clone()
        reward[0] = torch.nan
        return dataclasses.replace(batch, reward=reward)

    monkeypatch.setattr(Ring, "sample", poisoned)


@pytest.mark.parametrize("algo", ["dqn", "rainbow"])
def test_a_poisoned_batch_is_skipped_and_counted(
    algo: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, lambda drawn: drawn in (20, 50))
    trained = qfleet.train("CartPole-v1", algo=algo, **TINY, run_dir=tmp_path / "run")
    assert trained.result.faults == {"gradient": 2}
    assert trained.result.stopped_by == "steps"
    state = load_checkpoint(trained.folder / "checkpoints").parts["learner"]
    assert state["weights"].isfinite().all()
    assert state["skipped"] == 2
    # A skipped update is no step of the optimiser.
    assert int(state["optimiser"]["steps"]) == trained.result.updates - 2


def test_skips_are_counted_once_across_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, lambda drawn: drawn in (20, 50, 120))
    folder = tmp_path / "run"
    qfleet.train("CartPole-v1", **TINY, run_dir=folder, options=RunOptions(stop_after=350))
    assert result_of(folder)["faults"] == {"gradient": 2}
    assert qfleet.resume(folder).result.faults == {"gradient": 3}


def test_too_many_poisoned_batches_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, lambda drawn: drawn % 3 == 0)
    with pytest.raises(FaultRateError, match=says("gradient", "faults")):
        qfleet.train("CartPole-v1", **TINY, run_dir=tmp_path / "run")
    assert result_of(tmp_path / "run")["stopped_by"].startswith("error: gradient")


def test_exploding_values_raise_the_alarm_then_stop_at_the_last_good_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rewards are sane until step 250 and 10¹² after it."""
    folder = tmp_path / "run"
    asked = faulty("huge_reward", after=250) | {
        "steps": 5000,
        "log_interval": 50,
        "checkpoint_freq": 100,
        "buffer_size": 300,
    }
    with pytest.raises(DivergedError) as caught:
        qfleet.train(**asked, run_dir=folder, options=RunOptions(display="plain"))
    assert holds(str(caught.value), "checkpoint", "200", "--max-abs-q", "1e+07")
    assert "exploding_q" in capsys.readouterr().err
    result = result_of(folder)
    assert result["stopped_by"].startswith("error: Q-values")
    assert result["faults"]["exploding_q"] == 3
    assert result["env_steps"] < 1000
    assert list_checkpoints(folder / "checkpoints")[-1] == 200
    good = load_checkpoint(folder / "checkpoints", 200).parts
    assert good["learner"]["weights"].abs().max() < 100
    assert good["memory"]["reward"].abs().max() <= 1


def test_the_checkpoint_called_good_is_good_however_rarely_the_run_logs(tmp_path: Path) -> None:
    """Checkpoints come more often than looks at the values: none may be taken of bad ones."""
    folder = tmp_path / "run"
    asked = faulty("huge_reward", after=250) | {
        "steps": 5000,
        "log_interval": 400,
        "checkpoint_freq": 50,
        "batch_size": 64,  # surely with some of the bad rewards in it
    }
    with pytest.raises(DivergedError):
        qfleet.train(**asked, run_dir=folder)
    newest = load_checkpoint(folder / "checkpoints").parts
    assert newest["memory"]["reward"].abs().max() <= 1


def test_clipped_rewards_of_any_size_are_no_explosion(tmp_path: Path) -> None:
    trained = qfleet.train(**faulty("huge_reward"), clip_rewards=True, run_dir=tmp_path / "run")
    assert trained.result.stopped_by == "steps"
    assert trained.result.faults == {}
