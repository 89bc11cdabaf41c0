"""Faults 23, 42, 43 and 51 of docs/faults.md: Ray's own processes or the driver are lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from qfleet.engines.cluster.liveness import ANSWER_S, LOOK_S
from qfleet.storage.checkpoint import list_checkpoints
from support.clusters import RAY_MARKS, check_end
from support.configs import TINY
from support.processes import (
    count_lines,
    descendants,
    is_alive,
    needs_proc,
    python,
    start,
    start_qfleet,
)
from support.proxy import Proxy
from support.waiting import CLUSTER_S, finish, wait_until

pytestmark = [*RAY_MARKS, needs_proc, pytest.mark.slow]
ENDED_S = 30.0
"""The end of a run whose cluster is gone, as docs/faults.md promises."""
HOST = """
import os, sys
from qfleet.engines.cluster.ray_cluster import open_cluster
with open_cluster(3) as cluster:
    print(cluster.address, cluster.folder, os.environ["RAY_AUTH_TOKEN"], flush=True)
    sys.stdin.read()
"""
"""Starts a cluster and waits."""
SMALL: dict[str, Any] = TINY | {
    "steps": 10**8, "workers": 2, "learning_starts": 64, "train_freq": 8, "threads": 1,
    "device": "cpu", "buffer_size": 4000, "log_interval": 50, "checkpoint_freq": 10**9,
    "eval_freq": 0,
}  # fmt: skip
ENGINES = {"actors": {"envs": 2}, "parameter-server": {"snapshot_s": 1.0}}
TITLES = {"raylet": "/raylet/raylet ", "GCS": "/gcs/gcs_server "}


class Training:
    """A run in a process of its own, with a cluster of its own."""

    def __init__(self, folder: Path, engine: str, token: str = "", **fields: Any) -> None:
        self.folder = folder / "run"
        settings = folder / "config.json"
        settings.write_text(json.dumps({**SMALL, "engine": engine, **ENGINES[engine], **fields}))
        words = ["train", "CartPole-v1", "--preset", "none", "--config", str(settings), "--trust"]
        words += ["--run-dir", str(self.folder)]
        access = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token} if token else {}
        self.process = start_qfleet(*words, stderr=subprocess.STDOUT, env={**os.environ, **access})

    def learns(self) -> None:
        """Wait for the first updates."""
        metrics = self.folder / "metrics.jsonl"

        def has_updates() -> bool:
            lines = metrics.read_text().splitlines() if count_lines(metrics) else []
            return len(lines) > 1 and json.loads(lines[-2])["train/n_updates"] > 20

        wait_until(has_updates, "some updates", CLUSTER_S, self.process)

    def result(self) -> dict[str, Any]:
        result: dict[str, Any] = json.loads((self.folder / "result.json").read_text())
        return result


def pid_of(name: str, driver: int) -> int:
    found = descendants(driver).items()
    return next(pid for pid, title in found if TITLES[name] in title)


def folder_of(raylet: int) -> Path:
    """The temporary folder of the cluster."""
    words = Path(f"/proc/{raylet}/cmdline").read_text().split("\0")
    word = next(word for word in words if word.startswith("--raylet_socket_name="))
    return Path(word.partition("=")[2].partition("/ray/")[0])


@pytest.mark.parametrize(("engine", "victim"), [("actors", "GCS"), ("parameter-server", "raylet")])
def test_a_run_without_its_raylet_or_gcs_ends_with_a_checkpoint(
    tmp_path: Path, engine: str, victim: str
) -> None:
    run = Training(tmp_path, engine)
    try:
        run.learns()
        scratch = folder_of(pid_of("raylet", run.process.pid))
        family = [*descendants(run.process.pid)]
        os.kill(pid_of(victim, run.process.pid), signal.SIGKILL)
        output, _ = finish(run.process, "the end without Ray", ENDED_S)
    finally:
        run.process.kill()
        run.process.wait()
    check_end(run.folder, run.process.returncode, output, victim)
    wait_until(lambda: not any(map(is_alive, family)), "the end of all processes", CLUSTER_S)
    assert not scratch.exists()


@pytest.mark.parametrize("engine", ENGINES)
def test_a_signal_while_the_gcs_is_waited_for_ends_the_run(tmp_path: Path, engine: str) -> None:
    """The GCS is stopped, not dead: no connection is refused, and calls of Ray's wait for it."""
    run = Training(tmp_path, engine)
    try:
        run.learns()
        scratch = folder_of(pid_of("raylet", run.process.pid))
        family = [*descendants(run.process.pid)]
        os.kill(pid_of("GCS", run.process.pid), signal.SIGSTOP)
        time.sleep(LOOK_S + ANSWER_S)
        run.process.terminate()
        output, _ = finish(run.process, "the end by a signal", ENDED_S)
    finally:
        run.process.kill()
        run.process.wait()
    if run.result()["stopped_by"] != "SIGTERM":  # the last checkpoint needed the GCS
        check_end(run.folder, run.process.returncode, output, "GCS")
    else:
        assert run.process.returncode == 128 + signal.SIGTERM, output
        assert "Traceback" not in output
        assert list_checkpoints(run.folder / "checkpoints") == [run.result()["env_steps"]]
    wait_until(lambda: not any(map(is_alive, family)), "the end of all processes", CLUSTER_S)
    assert not scratch.exists()


class Host:
    """A process with a cluster that others may join."""

    def __init__(self) -> None:
        self.process = start(python("-c", HOST), stdin=subprocess.PIPE)
        line = self.process.stdout.readline()
        self.address, folder, self.token = line.split() or finish(self.process, "a cluster")
        self.folder = Path(folder)

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.mark.parametrize(("engine", "victim"), [("actors", "raylet"), ("parameter-server", "GCS")])
def test_a_run_whose_joined_cluster_disappears_ends_with_a_checkpoint(
    tmp_path: Path, engine: str, victim: str
) -> None:
    """All of it at once, or its GCS, which is waited for: some clusters restart it."""
    host = Host()
    run = Training(tmp_path, engine, host.token, address=host.address)
    try:
        run.learns()
        os.kill(
            host.process.pid if victim == "raylet" else pid_of("GCS", host.process.pid),
            signal.SIGKILL,
        )
        output, _ = finish(run.process, "the end without Ray", ENDED_S)
    finally:
        run.process.kill()
        run.process.wait()
        host.end()
    check_end(run.folder, run.process.returncode, output, victim)


def test_a_half_open_connection_to_a_joined_cluster_ends_the_run(tmp_path: Path) -> None:
    """Nothing is closed: only an answer that does not come shows that the GCS is out of reach."""
    host = Host()
    proxy = Proxy(int(host.address.rpartition(":")[2]))
    run = Training(tmp_path, "parameter-server", host.token, address=proxy.address)
    try:
        run.learns()
        proxy.freeze()
        output, _ = finish(run.process, "the end without a GCS", ENDED_S)
    finally:
        run.process.kill()
        run.process.wait()
        proxy.close()
        host.end()
    check_end(run.folder, run.process.returncode, output, "GCS")


def test_the_next_start_removes_what_a_killed_driver_left(monkeypatch: pytest.MonkeyPatch) -> None:
    # Clusters that other tests start meanwhile would remove it, too. Short, because of the sockets.
    with tempfile.TemporaryDirectory(prefix="qf-", dir="/tmp") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        check_sweep()


def check_sweep() -> None:
    killed = Host()
    family = descendants(killed.process.pid)
    assert len(family) > len(TITLES)  # also those that the raylet has started, whatever their title
    killed.end()
    assert killed.folder.exists()
    following = Host()
    try:
        assert not killed.folder.exists()
        assert not any(map(is_alive, family))
        assert following.folder.exists()
        out, err = finish(following.process, "the end of the next one", CLUSTER_S)
    finally:
        following.end()
    assert following.process.returncode == 0, out + err
    assert not following.folder.exists()
