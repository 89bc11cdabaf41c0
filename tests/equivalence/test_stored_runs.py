"""Runs that an earlier qfleet has stored (version 0.1.0, commit 9097aa5) still resume and load.

Each was stopped before the last of its 240 env steps. Checkpoint keys, names of environments and
admission policies inside the state, and configuration fields are therefore fixed.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest

import qfleet
from qfleet.core.errors import CheckpointError
from qfleet.engines.parameter_server import servers
from support.clusters import needs_ray
from support.waiting import CLUSTER_S, deadline

STORED = Path(__file__).parents[1] / "fixtures" / "stored_runs"
ON_RAY = ("parameter-server", "actors")
NAMES = ("serial", "serial-rollout", "pipeline", "device")


def resume(name: str, tmp_path: Path) -> qfleet.Trained:
    folder = tmp_path / name
    shutil.copytree(STORED / name, folder)
    before = json.loads((folder / "result.json").read_text())
    # Processes start slowly on a busy machine. This field may differ from the checkpoint's.
    config = json.loads((folder / "config.json").read_text())
    config["worker_timeout_s"] = deadline(CLUSTER_S)
    if config["engine"] in ON_RAY:
        (folder / "config.json").write_text(json.dumps(config))
    trained = qfleet.resume(folder)
    assert before["env_steps"] < 240 <= trained.result.env_steps
    assert trained.result.updates > before["updates"]
    assert trained.result.stopped_by == "steps"
    assert trained.result.faults == before["faults"] == {}
    return trained


def test_every_stored_run_is_resumed_by_a_test() -> None:
    assert {path.name for path in STORED.iterdir()} == {*NAMES, *ON_RAY}


@pytest.mark.parametrize("name", NAMES)
def test_a_stored_run_resumes(name: str, tmp_path: Path) -> None:
    resume(name, tmp_path)


@pytest.mark.slow
@needs_ray
@pytest.mark.parametrize("name", ON_RAY)
def test_a_stored_run_on_ray_resumes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "TIMEOUT_S", deadline(CLUSTER_S))
    resume(name, tmp_path)


@pytest.mark.parametrize("name", [*NAMES, *ON_RAY])
def test_the_best_policy_of_a_stored_run_acts(name: str) -> None:
    policy = qfleet.load(STORED / name)
    assert policy.evaluate(episodes=1, seed=3).mean > -1.0


def test_a_run_with_another_key_in_its_state_does_not_resume(tmp_path: Path) -> None:
    """Negative control: these tests notice a renamed part of a checkpoint."""
    folder = tmp_path / "serial"
    shutil.copytree(STORED / "serial", folder)
    (checkpoint,) = (folder / "checkpoints").iterdir()
    body = json.loads((checkpoint / "manifest.json").read_text())
    del body["sha256"]
    body["parts"]["run"]["positions"] = body["parts"]["run"].pop("standings")
    body["sha256"] = hashlib.sha256(json.dumps(body).encode()).hexdigest()
    (checkpoint / "manifest.json").write_text(json.dumps(body))
    with pytest.raises(CheckpointError, match="standings"):
        qfleet.resume(folder)
