"""``qfleet lab mapreduce`` as a process of its own that joins a cluster, if it is let in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qfleet.cli import lab, lab_mapreduce
from qfleet.core.errors import ClusterError, ConfigError
from qfleet.engines.cluster.ray_cluster import Cluster, open_cluster
from qfleet.lab.mapreduce import Problem
from qfleet.lab.mapreduce_ray import Descent, Span
from qfleet.telemetry.timers import COMPUTING, KINDS
from support.clusters import needs_ray
from support.messages import holds, says
from support.waiting import CLUSTER_S, deadline


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with open_cluster(2) as opened:
        yield opened


def join(cluster: Cluster, token: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Join from a shell that has the token, but not RAY_AUTH_MODE: Ray 2.60 does not need it."""
    command = ["lab", "mapreduce", "--address", cluster.address, *words]
    environment = {**os.environ, "RAY_AUTH_TOKEN": token}
    del environment["RAY_AUTH_MODE"]
    return subprocess.run(
        [sys.executable, "-m", "qfleet.cli.main", *command],
        env=environment,
        capture_output=True,
        text=True,
        timeout=deadline(CLUSTER_S),
        check=False,
    )


@pytest.mark.slow
@needs_ray
def test_the_report_adds_up(cluster: Cluster, tmp_path: Path) -> None:
    words = ["--workers", "2", "--samples", "300", "--features", "5", "--steps", "60"]
    words += ["--straggler", "1ms", "--compare", "--json", "--out", str(tmp_path)]
    done = join(cluster, os.environ["RAY_AUTH_TOKEN"], *words)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report == json.loads((tmp_path / "result.json").read_text())
    assert report["traffic"]["bytes_received"] == report["formula"]["bytes_received"] == 4800
    assert report["traffic"]["bytes_sent"] == report["formula"]["bytes_sent"] == 60 * 2 * 5 * 8
    assert report["losses"] == sorted(report["losses"], reverse=True)
    assert report["losses"][-1] > report["least_loss"]
    # 60 rounds at this rate are too few for the tolerance, and it says so.
    assert report["distance"] > report["tolerance"]
    assert report["reached"] is False
    assert report["speed_up"] == report["wall_s_of_one"] / report["wall_s"]
    assert report["efficiency"] == report["speed_up"] / 2
    assert [set(share) for share in report["time_share"]] == [set(KINDS)] * 2
    assert Path(report["picture"]).exists()
    said = "\n".join(lab_mapreduce._lines(report))
    assert "closed form   NOT reached" in said
    assert "4,800 bytes in 120 messages (m·d·8 a round make 4,800)" in said


@pytest.mark.slow
@needs_ray
def test_several_numbers_of_workers_make_a_curve(cluster: Cluster, tmp_path: Path) -> None:
    words = ["--workers", "1,2", "--samples", "300", "--features", "5", "--steps", "5"]
    words += ["--json", "--out", str(tmp_path)]
    done = join(cluster, os.environ["RAY_AUTH_TOKEN"], *words)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    curve = {point["workers"]: point for point in report["curve"]}
    assert list(curve) == [1, 2, 4, 8, 16, 32]
    assert (curve[1]["speed_up"], curve[1]["model"]) == (1.0, pytest.approx(1.0))
    assert curve[2]["speed_up"] == report["speed_up"] == report["wall_s_of_one"] / report["wall_s"]
    assert curve[32]["wall_s"] is curve[32]["speed_up"] is None
    assert 0 < curve[32]["model"] < 32
    assert (tmp_path / "speedup.png").exists()
    said = "\n".join(lab_mapreduce._lines(report))
    assert " 32 workers   not measured  model" in said


@pytest.mark.slow
@needs_ray
def test_a_wrong_token_is_refused(cluster: Cluster) -> None:
    refused = join(cluster, "wrong")
    assert refused.returncode == ClusterError.exit_code
    assert refused.stderr.startswith("qfleet: ")
    assert cluster.address in refused.stderr
    assert refused.stderr.count("\n") == 1
    assert refused.stdout == ""


@pytest.mark.slow
@needs_ray
def test_more_workers_than_processors_are_refused(cluster: Cluster) -> None:
    crowded = join(cluster, os.environ["RAY_AUTH_TOKEN"], "--workers", "3")
    assert crowded.returncode == ClusterError.exit_code
    assert holds(crowded.stderr, "2 processors", "3 workers")
    assert crowded.stderr.count("\n") == 1


def descent_of(workers: int) -> Descent:
    """A descent of one round, without a cluster: as long as it has workers."""
    spans = [[Span(COMPUTING, 0.0, workers / 2)]] * workers
    return Descent(workers, "sync", True, [np.zeros(50)] * 2, [0.0, float(workers)], spans)


@pytest.mark.parametrize("fails_at", [4, 2])
def test_numbers_of_workers_that_do_not_start_are_left_out(
    fails_at: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def descend(_cluster: None, _problem: Problem, workers: int, **_: Any) -> Descent:
        if workers >= fails_at:
            raise ClusterError("worker 3 did not answer within 120 s")
        return descent_of(workers)

    monkeypatch.setattr(lab_mapreduce, "open_cluster", lambda *_, **__: nullcontext())
    monkeypatch.setattr(lab_mapreduce, "descend_on", descend)
    words = ["mapreduce", "--workers", "1,2,4,8", "--samples", "100", "--out", str(tmp_path)]
    if fails_at == 2:  # nothing to compare with
        with pytest.raises(ClusterError, match=says("worker 3")):
            lab.run(words)
        return
    lab.run(words)
    said = capsys.readouterr().out
    assert holds(said, "left out", "from 4 workers on", "worker 3 did not answer")
    assert "  4 workers   not measured  model" in said
    # The model: half of the time of one worker is computing, the rest is messages.
    assert "  2 workers   0.50          model 0.80" in said


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--workers 0", "workers 0"),
        ("--workers four", "workers four"),
        ("--workers 2,4", "workers 2,4 1"),
        ("--workers 1,2,5 --samples 4 --features 2", "workers 5 samples 4"),
        ("--workers 5 --samples 4 --features 2", "workers 5 samples 4"),
        ("--straggler slow", "straggler slow"),
        ("--tolerance 0", "tolerance 0"),
        ("--timeout-s -1", "timeout_s -1"),
        ("--samples 3 --features 9", "samples 3"),
        ("--samples 100000000000", "samples 100000000000 50 features --samples"),
        ("--samples 100000000000000000000 --workers 10000000000", "memory"),
        ("--samples 10000000 --features 10000000", "--features"),
        ("--noise inf", "noise inf"),
        ("--steps 0", "steps 0"),
        ("--learning-rate nan", "learning_rate nan"),
        ("--learning-rate inf", "learning_rate inf"),
        ("--address :6379", "address :6379"),
    ],
)
def test_bad_numbers_are_refused_before_a_cluster_starts(
    words: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(*_: object, **__: object) -> None:
        raise AssertionError("a cluster was asked for")

    monkeypatch.setattr(lab_mapreduce, "open_cluster", start)
    with pytest.raises(ConfigError, match=says(*named.split())):
        lab.run(["mapreduce", *words.split()])
