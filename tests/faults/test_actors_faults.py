"""Rows 15, 16, 34 and 40 of the fault list for actors and replay shards, on real processes."""

from __future__ import annotations

import functools
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from faulty_envs import result_of

from qfleet.apex import building
from qfleet.build import build
from qfleet.cluster import open_cluster
from qfleet.config import Config
from qfleet.errors import ClusterError
from qfleet.storage.checkpoint import list_checkpoints
from qfleet.telemetry.faults import FaultLog

DEADLINE_S = 120.0

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason="needs Ray: pip install 'qfleet[ray]'"
    ),
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="lists processes by /proc"),
]


def wait_for(what: str, condition: Callable[[], object]) -> None:
    """Until ``condition()`` holds; the deadline only ends a test that has failed anyway."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come about"
        time.sleep(0.05)


def descendants(pid: int) -> dict[int, str]:
    """Process → its title, of all that this one has started; zombies have ended."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if state != "Z":
            parents[int(stat.parent.name)] = int(parent)
    found: dict[int, str] = {}
    generation = {pid}
    while generation:
        generation = {child for child, parent in parents.items() if parent in generation}
        for child in generation:
            try:
                found[child] = Path(f"/proc/{child}/cmdline").read_text().replace("\0", " ").strip()
            except OSError:
                continue
    return found


def members(pid: int, kind: str) -> set[int]:
    return {child for child, title in descendants(pid).items() if title.startswith(f"ray::{kind}")}


def test_killed_actors_and_shards_are_replaced_and_a_signal_leaves_nothing_behind(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "run"
    # Endless but for the signal.
    command = "train CartPole-v1 --preset none --engine actors --workers 2 --servers 2 --envs 2"
    command += " --steps 100000000 --net-arch 16 --log-interval 200 --no-tensorboard"
    command += " --buffer-size 4000 --prioritized-replay --eval-freq 0"
    run = subprocess.Popen(
        [sys.executable, "-m", "qfleet.cli.main", *command.split(), "--run-dir", str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    metrics = folder / "metrics.jsonl"

    def logged() -> int:
        return metrics.read_text().count("\n") if metrics.exists() else 0

    def goes_on() -> None:
        already = logged()
        wait_for("more training", lambda: run.poll() is not None or logged() >= already + 3)
        assert run.poll() is None, run.communicate()

    try:
        kinds = ("RemoteActor", "ReplayShard")

        def all_there() -> bool:
            return all(len(members(run.pid, kind)) == 2 for kind in kinds)

        goes_on()  # with the first actor that has come up
        wait_for("two of each", all_there)
        at_work: set[int] = set()

        def all_work() -> bool:
            # Ray adds what a process does to its title, while it does it.
            titles = descendants(run.pid).items()
            at_work.update(pid for pid, title in titles if title.startswith("ray::RemoteActor."))
            return len(at_work) == 2

        wait_for("both actors at work", all_work)
        goes_on()  # so that either shard has something to lose
        before = {kind: members(run.pid, kind) for kind in kinds}
        for there in before.values():
            os.kill(min(there), signal.SIGKILL)
        goes_on()
        for kind, there in before.items():
            fresh = functools.partial(lambda k, t: members(run.pid, k) - t, kind, there)
            wait_for(f"another {kind}", fresh)
        goes_on()
        wait_for("two of each, again", all_there)
        started = descendants(run.pid)
        # To the whole group of a terminal, as Ctrl-C does.
        os.killpg(run.pid, signal.SIGINT)
        out, err = run.communicate(timeout=DEADLINE_S)
    finally:
        run.kill()
        run.wait()
    assert run.returncode == 130, err
    assert "Traceback" not in err
    assert "raylet" not in out + err  # Ray has nothing to add to what we say
    assert f"qfleet resume {folder}" in out
    assert "died (The actor died unexpectedly before finishing this task.); replaced" in err
    assert "transitions lost, refilling" in err
    result = result_of(folder)
    assert result["stopped_by"] == "SIGINT"
    assert result["faults"] == {"actor": 1, "replay_shard": 1}
    assert result["fleet"]["actors_replaced"] == result["fleet"]["shards_replaced"] == 1
    assert result["fleet"]["transitions_lost"] > 0
    assert list_checkpoints(folder / "checkpoints") == [result["env_steps"]]
    wait_for(
        "the end of all processes",
        lambda: not any(Path(f"/proc/{pid}").exists() for pid in started),
    )


def test_an_object_store_that_is_too_small_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        building, "_open", lambda config, _: open_cluster(config.workers, store_bytes=80 * 2**20)
    )
    config = Config(
        engine="actors", workers=1, envs=2, batch_size=1_000_000, buffer_size=2_000_000,
        block_rows=8,
    )  # fmt: skip
    before = set(descendants(os.getpid()))
    with pytest.raises(ClusterError) as caught:
        build(config, FaultLog())
    message = str(caught.value)
    assert "\n" not in message
    assert "object store" in message
    assert "lower --batch-size" in message
    assert [title for pid, title in descendants(os.getpid()).items() if pid not in before] == []
