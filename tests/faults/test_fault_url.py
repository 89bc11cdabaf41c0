"""Fault 32: a run at s3:// on a server (moto) that fails, is slow or refuses; and kill -9."""

from __future__ import annotations

import itertools
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import qfleet
from qfleet.cli.main import main
from qfleet.core.errors import StorageError, StorageOutage
from qfleet.data.manifest import Dataset
from qfleet.storage.published import CACHE_DIR, read_index
from qfleet.storage.remote import Store
from qfleet.training import publisher
from support.configs import tiny_fields
from support.messages import holds, says
from support.processes import python, start
from support.s3 import BUCKET, FaultyS3, s3_server
from support.waiting import wait_until

URL = f"s3://{BUCKET}/experiments/run"
FIELDS = tiny_fields(
    steps=600, learning_starts=50, buffer_size=500, eval_freq=150, checkpoint_freq=150,
    max_episode_steps=30,
)  # fmt: skip
TRAIN = """
import json, sys, time
import qfleet

def wait(run):
    if run.parts.clock.env_steps >= 400:
        time.sleep(600)

qfleet.train("CartPole-v1", **json.loads(sys.argv[1]), run_dir=sys.argv[2], callbacks=wait)
"""


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FaultyS3]:
    monkeypatch.setenv(CACHE_DIR, str(tmp_path / "cache"))
    with s3_server() as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        yield server


def every_seventh(status: int) -> Any:
    """Longer than the requests of one call, so that a call that is retried can succeed."""
    count = itertools.count(1)
    return lambda *_: 0 if next(count) % 7 else status


def has_checkpoint(store: Store) -> bool:
    index = read_index(store)
    return index is not None and index.newest_checkpoint() >= "checkpoints/300"


def kill_after_a_checkpoint(script: str, fields: dict[str, Any]) -> None:
    """Train in another process until a checkpoint is published, then kill -9."""
    process = start(python("-c", script, json.dumps(fields), URL))
    try:
        wait_until(lambda: has_checkpoint(Store(URL)), "a published checkpoint", process=process)
        os.kill(process.pid, signal.SIGKILL)
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_a_killed_run_is_resumed_elsewhere_from_a_failing_store(
    s3: FaultyS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Train, kill -9, resume with nothing but the URL, evaluate: as if it had never stopped."""
    s3.fault, s3.delay_s = every_seventh(500), 0.005
    kill_after_a_checkpoint(TRAIN, FIELDS)
    monkeypatch.setenv(CACHE_DIR, str(tmp_path / "another machine"))
    half = qfleet.load(URL, "last").weights.data
    resumed = qfleet.resume(URL)
    assert isinstance(resumed, qfleet.Trained)
    assert resumed.result.env_steps == 600
    whole = qfleet.train("CartPole-v1", **FIELDS, run_dir=tmp_path / "whole")
    last = {run: qfleet.load(run, "last").weights.data for run in (URL, whole.folder)}
    assert torch.equal(last[URL], last[whole.folder])
    assert not torch.equal(last[URL], half)
    capsys.readouterr()
    assert main(["evaluate", URL, "--episodes", "2", "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["episodes"] == 2
    assert holds(printed.err, URL, "from the cache")


def test_a_store_that_refuses_is_reported_at_once(s3: FaultyS3) -> None:
    s3.fault = lambda *_: 403
    with pytest.raises(StorageError, match=says(URL, "denied")) as caught:
        qfleet.train("CartPole-v1", **FIELDS, run_dir=URL)
    assert not isinstance(caught.value, StorageOutage)
    assert len(s3.seen) <= 4  # a retried request would be many


def test_a_store_that_refuses_later_does_not_stop_the_run(
    s3: FaultyS3, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(publisher, "END_S", 1.0)
    denied: list[str] = []

    def deny(_: str, path: str) -> int:
        denied.append(path)
        return 403

    def refuse(run: Any) -> None:
        if run.parts.clock.env_steps >= 200 and not denied:
            s3.fault = deny
            wait_until(lambda: denied, "a refusal")

    trained = qfleet.train("CartPole-v1", **FIELDS, run_dir=URL, callbacks=refuse)
    assert trained.result.env_steps == 600
    assert holds(capsys.readouterr().err, URL, "lacks", "denied")


CLONE = """
import json, sys, time
import qfleet

def wait(run):
    if run.parts.clock.env_steps >= 3000:
        time.sleep(600)

qfleet.train(**json.loads(sys.argv[1]), run_dir=sys.argv[2], callbacks=wait)
"""


@pytest.mark.slow
def test_data_becomes_a_policy_in_a_failing_store(
    s3: FaultyS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Record, split, train, kill -9, resume, evaluate: only URLs go from step to step."""
    s3.fault, s3.delay_s = every_seventh(500), 0.002
    data = f"s3://{BUCKET}/data"
    fields = {**FIELDS, "steps": 1500, "eval_freq": 0}
    qfleet.train("CartPole-v1", **fields, record=f"{data}/all", run_dir=tmp_path / "recorded")
    assert main(["data", "split", f"{data}/all", f"{data}/parts", "--json"]) == 0
    counts = json.loads(capsys.readouterr().out)
    recorded = Dataset(f"{data}/all").manifest.transitions
    assert sum(part["transitions"] for part in counts.values()) == recorded > 1000
    given = {
        "data": f"{data}/parts/train", "algo": "behaviour-cloning", "steps": 6000, "eval_freq": 0,
        "checkpoint_freq": 1000, "tensorboard": False, "net_arch": [8], "batch_size": 64,
    }  # fmt: skip
    kill_after_a_checkpoint(CLONE, given)
    monkeypatch.setenv(CACHE_DIR, str(tmp_path / "another machine"))
    resumed = qfleet.resume(URL)
    assert isinstance(resumed, qfleet.Trained)
    assert resumed.result.env_steps == 6000
    whole = qfleet.train(**given, run_dir=tmp_path / "whole")
    last = [qfleet.load(run, "last").weights.data for run in (URL, whole.folder)]
    assert torch.equal(*last)
    capsys.readouterr()
    assert main(["evaluate", URL, "--episodes", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["episodes"] == 2
