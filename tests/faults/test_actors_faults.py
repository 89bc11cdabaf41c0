"""Faults 1, 15, 16, 34, 40 and 46 of docs/faults.md for actors and shards, on real processes."""

from __future__ import annotations

import functools
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

import qfleet
from qfleet.config.config import Config
from qfleet.core.errors import ClusterError
from qfleet.engines.actors import engine
from qfleet.engines.cluster.ray_cluster import open_cluster
from qfleet.engines.registry import build
from qfleet.storage.checkpoint import list_checkpoints
from qfleet.telemetry.faults import FaultLog
from support.clusters import RAY_MARKS
from support.faulty_envs import result_of, rude
from support.messages import holds
from support.processes import count_lines, descendants, is_alive, needs_proc, start_qfleet
from support.waiting import CLUSTER_S, finish, wait_until

pytestmark = [*RAY_MARKS, needs_proc]


def members(pid: int, kind: str) -> set[int]:
    return {child for child, title in descendants(pid).items() if title.startswith(f"ray::{kind}")}


def reports_of(metrics: Path, actor: int) -> int:
    """Count the different reports of an actor in the log; it has sent at least as many blocks."""
    lines = metrics.read_text().splitlines(keepends=True)
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    return len({row.get(f"actor_{actor}/time/share_computing") for row in rows} - {None})


@pytest.mark.slow
def test_killed_actors_and_shards_are_replaced_and_a_signal_leaves_nothing_behind(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "run"
    # Endless but for the signal.
    command = "train CartPole-v1 --preset none --engine actors --workers 2 --servers 2 --envs 2"
    command += " --steps 100000000 --net-arch 16 --log-interval 200 --no-tensorboard"
    command += " --buffer-size 4000 --prioritized-replay --eval-freq 0"
    run = start_qfleet(*command.split(), "--run-dir", str(folder), start_new_session=True)
    metrics = folder / "metrics.jsonl"

    def await_(condition: Callable[[], object], what: str) -> None:
        wait_until(condition, what, CLUSTER_S, run)

    def goes_on() -> None:
        already = count_lines(metrics)
        await_(lambda: count_lines(metrics) >= already + 3, "three more log lines")

    try:
        kinds = ("RemoteActor", "ReplayShard")

        def all_there() -> bool:
            return all(len(members(run.pid, kind)) == 2 for kind in kinds)

        goes_on()  # with the first actor that has come up
        await_(all_there, "two members of each kind")

        def all_stored() -> bool:
            # At most four calls of a shard are under way before the learner takes an answer, which
            # says what the shard holds.
            return min(reports_of(metrics, number) for number in (0, 1)) > 5

        await_(all_stored, "blocks of both actors in their shards")
        before = {kind: members(run.pid, kind) for kind in kinds}
        for there in before.values():
            os.kill(min(there), signal.SIGKILL)
        goes_on()
        for kind, there in before.items():
            fresh = functools.partial(lambda k, t: members(run.pid, k) - t, kind, there)
            await_(fresh, f"another {kind}")
        goes_on()
        await_(all_there, "two members of each kind again")
        started = descendants(run.pid)
        # To the whole group of a terminal, as Ctrl-C does.
        os.killpg(run.pid, signal.SIGINT)
        out, err = finish(run, "the end after the signal", CLUSTER_S)
    finally:
        run.kill()
        run.wait()
    assert run.returncode == 130, err
    assert "Traceback" not in err
    assert "raylet" not in out + err  # Ray has nothing to add to what we say
    assert f"qfleet resume {folder}" in out
    assert holds(err, "died", "replaced")
    assert holds(err, "transitions", "lost")
    result = result_of(folder)
    assert result["stopped_by"] == "SIGINT"
    assert result["faults"] == {"actor": 1, "replay_shard": 1}
    assert result["fleet"]["actors_replaced"] == result["fleet"]["shards_replaced"] == 1
    assert result["fleet"]["transitions_lost"] > 0
    assert list_checkpoints(folder / "checkpoints") == [result["env_steps"]]
    wait_until(lambda: not any(map(is_alive, started)), "the end of all processes", CLUSTER_S)


@pytest.mark.slow
def test_an_object_store_that_is_too_small_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        engine, "_open", lambda config, _: open_cluster(config.workers, store_bytes=80 * 2**20)
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
    assert holds(message, "object store", "--batch-size")
    assert [title for pid, title in descendants(os.getpid()).items() if pid not in before] == []


@pytest.mark.slow
def test_envs_of_actors_that_interrupt_or_give_bad_rewards_are_counted(tmp_path: Path) -> None:
    kwargs = {"fault": "large_reward", "every": 60}
    fields = {**rude("interrupt", "step", **kwargs), "engine": "actors"}
    trained = qfleet.train(**fields, workers=1, servers=1, envs=1, run_dir=tmp_path / "run")
    assert trained.result.stopped_by == "steps"
    # Each env crashes in its step 90, and has given one bad reward before.
    faults = trained.result.faults
    assert faults.keys() == {"env_crash", "env_reward"}
    assert 5 <= faults["env_crash"] <= 8
