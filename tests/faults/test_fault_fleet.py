"""Faults 15, 17, 21, 30 and 40 of docs/faults.md, for workers and servers as real processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import qfleet
from qfleet.data.manifest import Dataset
from qfleet.storage.checkpoint import list_checkpoints, load_checkpoint
from qfleet.telemetry.runs import read_metrics
from qfleet.telemetry.timers import KINDS
from qfleet.training.callbacks import Callback
from qfleet.training.run import Run
from support.clusters import RAY_MARKS, shared_cluster  # noqa: F401 (a fixture)
from support.configs import tiny_fields
from support.counting_network import COUNTERS
from support.processes import count_lines, descendants, is_alive, needs_proc, start_qfleet
from support.signing_envs import who_stepped
from support.waiting import CLUSTER_S, deadline, finish, wait_until

pytestmark = RAY_MARKS
SMALL = tiny_fields(
    engine="parameter-server", learning_starts=64, train_freq=8, threads=1, device="cpu",
    buffer_size=4000, target_update_interval=100, learning_rate=1e-3, log_interval=50,
    checkpoint_freq=10**9,
)  # fmt: skip


class Script(Callback):
    """Acts, one after another: each is tried at every log until it says that it was done."""

    def __init__(self, *acts: Callable[[Run], bool]) -> None:
        self.acts = list(acts)

    def on_log(self, run: Run, scalars: dict[str, float | None]) -> bool | None:
        del scalars
        if self.acts and self.acts[0](run):
            del self.acts[0]
        return None if self.acts else False


def kill(who: str, number: signal.Signals = signal.SIGKILL) -> Callable[[Run], bool]:
    def act(run: Run) -> bool:
        pid = run.parts.collector.pids().get(who)
        if pid is None:
            return False
        os.kill(pid, number)
        return True

    return act


def replaced(who: str, events: int, pid_is_known: bool = True) -> Callable[[Run], bool]:
    """So many faults of its kind were told, and the pid of the new one is known (a server's is
    known from its next snapshot on)."""

    def act(run: Run) -> bool:
        told = run.parts.faults.counts.get(who.split()[0], 0)
        return told >= events and (who in run.parts.collector.pids() or not pid_is_known)

    return act


def few_more_steps(steps: int) -> Callable[[Run], bool]:
    begun: list[int] = []

    def act(run: Run) -> bool:
        begun.append(run.parts.clock.env_steps)
        return begun[-1] >= begun[0] + steps

    return act


@pytest.mark.slow
@pytest.mark.usefixtures("shared_cluster")
def test_one_worker_is_serial_and_a_run_resumes_with_two(tmp_path: Path) -> None:
    """Across processes too; and what is resumed may have other workers and servers (fault 30)."""
    told = {**SMALL, "algo": "double-dqn", "steps": 600}
    serial = qfleet.train("CartPole-v1", run_dir=tmp_path / "a", **{**told, "engine": "serial"})
    sync = {"workers": 1, "servers": 2, "update": "sync"}
    fleet = qfleet.train("CartPole-v1", run_dir=tmp_path / "b", **told, **sync)
    assert fleet.result.env_steps == serial.result.env_steps
    assert fleet.result.updates == serial.result.updates
    assert fleet.result.eval_return_mean == serial.result.eval_return_mean
    ours, theirs = (load_checkpoint(tmp_path / name / "checkpoints") for name in "ab")
    assert torch.equal(ours.parts["learner"]["weights"], theirs.parts["learner"]["weights"])
    account = fleet.result.fleet
    assert account is not None
    # Nothing was applied twice, nothing was lost: what was pushed is in the weights.
    assert [server["applied"] for server in account["servers"]] == [fleet.result.updates] * 2
    assert fleet.result.communication["messages"] > 2 * fleet.result.updates
    driver, workers = (fleet.result.resources[name] for name in ("driver", "workers"))
    assert {"evaluate", "save"} <= driver.keys()
    assert {"env", "learn"} <= workers.keys()
    assert not {"evaluate", "save"} & workers.keys()
    assert sum(driver.values()) == pytest.approx(1.0)
    assert sum(workers.values()) == pytest.approx(1.0)
    rows = [row for row in read_metrics(tmp_path / "b" / "metrics.jsonl") if "time/fps" in row]
    shares = [sum(row[f"worker_0/time/share_{kind}"] for kind in KINDS) for row in rows]
    assert 0.5 < max(shares) <= 1.0 + 1e-9  # in others the driver may have been late

    again = qfleet.resume(tmp_path / "b", workers=2, servers=1, steps=900)
    assert again.result.env_steps >= 900
    assert again.result.updates > fleet.result.updates
    assert again.result.stopped_by == "steps"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("killed", "snapshot_s"),
    [(["server 0", "server 1"], 3600.0), (["server 0", "worker 1", "server 0"], 1.0)],
)
@pytest.mark.usefixtures("shared_cluster")
def test_the_weights_know_every_gradient_that_was_not_lost(
    tmp_path: Path, killed: list[str], snapshot_s: float
) -> None:
    """Each gradient moves a counter among the weights by the learning rate: they tell how many were
    applied, whatever the processes say that they did."""
    told: Counter[str] = Counter()
    acts = [few_more_steps(200)]
    for who in killed:
        told[who.split()[0]] += 1
        again = replaced(who, told[who.split()[0]], pid_is_known=snapshot_s < 60)
        acts += [kill(who), again, few_more_steps(200)]
    rate = 2.0**-10
    plain = {**SMALL, "optimizer": "sgd", "learning_rate": rate, "max_grad_norm": 0.0}
    result = qfleet.train(
        "CartPole-v1", run_dir=tmp_path / "run", callbacks=[Script(*acts)], workers=2, servers=2,
        steps=10**7, snapshot_s=snapshot_s, network="support.counting_network:Counting", **plain,
    ).result  # fmt: skip
    assert Counter(result.faults) == told
    assert result.stopped_by == "callback"
    weights = load_checkpoint(tmp_path / "run" / "checkpoints").parts["learner"]["weights"]
    counted = (-weights[:COUNTERS] / rate).tolist()
    assert result.fleet is not None
    servers, workers = result.fleet["servers"], result.fleet["workers"]
    assert [worker["restarts"] for worker in workers] == [
        killed.count(f"worker {n}") for n in (0, 1)
    ]
    assert [server["restores"] for server in servers] == [
        killed.count(f"server {n}") for n in (0, 1)
    ]
    applied, lost = ([server[name] for server in servers] for name in ("applied", "lost"))
    assert [counted[0], counted[-1]] == applied
    assert set(counted) == set(applied)
    if snapshot_s > 60:  # both went on from the start; a later snapshot may have missed nothing
        assert all(lost)
    assert not any(server["unknown"] for server in servers)
    fates = sum((Counter(worker["outcomes"]) for worker in workers), Counter())
    assert set(fates) <= {"applied", "heard", "server-lost"}
    sent = sum(applied) + sum(lost)
    if told["worker"]:  # it did not live to say what it sent last; the servers know
        assert sent >= sum(fates.values())
    else:
        assert sent == sum(fates.values())


def scale(workers: int) -> Callable[[Run], bool]:
    """As another process would; the run goes on meanwhile."""

    def act(run: Run) -> bool:
        threading.Thread(target=qfleet.scale, args=(run.folder, workers), daemon=True).start()
        return True

    return act


def at_work(*numbers: int) -> Callable[[Run], bool]:
    def act(run: Run) -> bool:
        workers = {who for who in run.parts.collector.pids() if who.startswith("worker")}
        account = run.parts.collector.account()
        learning = {worker.number for worker in account.workers if worker.updates}
        return workers == {f"worker {number}" for number in numbers} and learning >= {*numbers}

    return act


@pytest.mark.slow
@pytest.mark.usefixtures("shared_cluster")
def test_workers_join_and_leave_a_run_and_come_back(tmp_path: Path) -> None:
    script = Script(
        scale(3), at_work(0, 1, 2), few_more_steps(200),
        scale(1), at_work(0), few_more_steps(200),
        scale(2), at_work(0, 1), few_more_steps(200),
    )  # fmt: skip
    result = qfleet.train(
        "CartPole-v1", run_dir=tmp_path / "run", callbacks=[script], workers=2, update="sync",
        steps=10**7, record=str(tmp_path / "data"), **SMALL,
    ).result  # fmt: skip
    assert result.stopped_by == "callback"
    assert result.faults == {}
    recorded = Dataset(str(tmp_path / "data")).manifest
    # Also of the workers that were dismissed: 1 and 2, and 1 that came back.
    assert len({part.name.split("-")[1] for part in recorded.parts}) == 4
    assert recorded.transitions > 0.8 * result.env_steps
    assert result.fleet is not None
    workers = result.fleet["workers"]
    assert [worker["restarts"] for worker in workers] == [0, 0, 0]
    assert sum(worker["env_steps"] for worker in workers) == result.env_steps
    assert all(worker["updates"] > 0 for worker in workers)


@pytest.mark.slow
@pytest.mark.usefixtures("shared_cluster")
def test_a_stopped_worker_holds_sync_up_until_it_is_given_up(tmp_path: Path) -> None:
    script = Script(kill("worker 1", signal.SIGSTOP), replaced("worker 1", 1), few_more_steps(200))
    trained = qfleet.train(
        "CartPole-v1", run_dir=tmp_path / "run", callbacks=[script], workers=2, update="sync",
        steps=10**7, worker_timeout_s=deadline(10.0), **SMALL,
    )  # fmt: skip
    assert trained.result.stopped_by == "callback"
    assert trained.result.faults["worker"] == 1


@pytest.mark.slow
@needs_proc
@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)],
)
def test_a_killed_worker_is_one_line_and_a_signal_leaves_nobody_behind(
    number: signal.Signals, code: int, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    told = {**SMALL, "steps": 10**7, "workers": 2, "update": "sync"}
    # Not by the titles that Ray sets: once a worker that trained was not found for three minutes.
    signed = tmp_path / "signed"
    signed.mkdir()
    told["env_kwargs"] = json.dumps({"folder": str(signed)})
    config = {key: value for key, value in told.items() if key != "preset"}
    settings = tmp_path / "config.json"
    settings.write_text(json.dumps(config))
    env = "support.signing_envs:SigningCartPole"
    words = ["train", env, "--preset", "none", "--config", str(settings)]
    process = start_qfleet(*words, "--run-dir", str(folder), stderr=subprocess.STDOUT)
    try:
        metrics = folder / "metrics.jsonl"

        def await_(condition: Callable[[], bool], what: str) -> None:
            wait_until(condition, what, CLUSTER_S, process)

        await_(lambda: count_lines(metrics) >= 3, "three log lines")
        await_(lambda: len(who_stepped(signed)) == 2, "two workers")
        victim = min(who_stepped(signed))
        os.kill(victim, signal.SIGKILL)
        await_(lambda: len(who_stepped(signed) - {victim}) == 2, "another worker")
        already = count_lines(metrics)
        await_(lambda: count_lines(metrics) >= already + 3, "three more log lines")
        family = list(descendants(process.pid))
        assert len(family) >= 3
        # To all, as a terminal's Ctrl-C and the SIGTERM of a batch system come.
        for pid in [*family, process.pid]:
            with contextlib.suppress(ProcessLookupError):  # Ray ends idle processes
                os.kill(pid, number)
        output, _ = finish(process, "the end after the signal", CLUSTER_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == code, output
    assert "Traceback" not in output
    assert output.count("another takes its place") == 1
    assert "raylet" not in output  # Ray has nothing to add to what we say
    steps = list_checkpoints(folder / "checkpoints")[-1]
    result = json.loads((folder / "result.json").read_text())
    assert result["env_steps"] == steps
    assert result["faults"] == {"worker": 1}  # whom it was sent to did not die of it
    wait_until(lambda: not any(map(is_alive, family)), "the end of all processes", CLUSTER_S)
