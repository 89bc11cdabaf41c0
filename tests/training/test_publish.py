"""At the end of a run its policy and configuration go to the tracker."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import qfleet

TINY: dict[str, Any] = {
    "preset": "none", "steps": 200, "learning_starts": 50, "net_arch": (8,), "batch_size": 8,
    "buffer_size": 500, "eval_freq": 0, "n_eval_episodes": 1, "max_episode_steps": 50,
    "engine": "serial", "device": "cpu",
}  # fmt: skip


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A tracker that keeps the names of what it was given."""
    module: Any = types.ModuleType("mlflow")
    run = types.SimpleNamespace(info=types.SimpleNamespace(run_id="abc"))
    module.uploaded = []
    module.set_experiment = module.log_params = lambda _: None
    module.log_metrics = lambda *_, **__: None
    module.start_run = lambda **_: run
    module.end_run = lambda: None
    module.log_artifacts = lambda path, **_: module.uploaded.append(Path(path))
    module.log_artifact = lambda path: module.uploaded.append(Path(path))
    monkeypatch.setitem(sys.modules, "mlflow", module)
    return module


def test_the_best_policy_and_the_configuration_are_uploaded(mlflow: Any, tmp_path: Path) -> None:
    trained = qfleet.train("CartPole-v1", run_dir=tmp_path / "run", track="mlflow", **TINY)
    assert mlflow.uploaded == [tmp_path / "run" / "best", tmp_path / "run" / "config.json"]
    assert "tracker" not in trained.result.faults


def test_without_a_best_policy_the_last_one_is_uploaded(
    mlflow: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qfleet.training.hooks.Evaluate.on_finish", lambda *_: None)
    qfleet.train("CartPole-v1", run_dir=tmp_path / "run", track="mlflow", **TINY)
    policy, _ = mlflow.uploaded
    assert policy.name == "last.safetensors"
    assert qfleet.load(policy).evaluate(1).returns


def test_a_failed_upload_is_counted_and_the_run_succeeds(mlflow: Any, tmp_path: Path) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ConnectionError("no route")

    mlflow.log_artifacts = fail
    trained = qfleet.train("CartPole-v1", run_dir=tmp_path / "run", track="mlflow", **TINY)
    assert trained.result.stopped_by == "steps"
    assert trained.result.faults["tracker"] == 1
    stored = json.loads((tmp_path / "run" / "result.json").read_text())
    assert stored["faults"]["tracker"] == 1


def test_nothing_is_uploaded_without_a_tracker(mlflow: Any, tmp_path: Path) -> None:
    trained = qfleet.train("CartPole-v1", run_dir=tmp_path / "run", **TINY)
    assert not mlflow.uploaded
    assert not (tmp_path / "run" / "last.safetensors").exists()
    assert not trained.result.faults
