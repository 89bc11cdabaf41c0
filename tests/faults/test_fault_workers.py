"""Faults 5, 18, 21 and 24 of docs/faults.md, for workers as real processes."""

from __future__ import annotations

import ast
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import qfleet
from qfleet.storage.checkpoint import load_checkpoint
from qfleet.training.callbacks import Callback
from qfleet.training.run import Run
from support.clusters import needs_ray, shared_cluster  # noqa: F401 (a fixture)
from support.configs import tiny_fields
from support.counting_network import COUNTERS
from support.faulty_networks import CLAIM, DAY_S
from support.waiting import deadline

RATE = 2.0**-10
SMALL = tiny_fields(
    engine="parameter-server", learning_starts=64, train_freq=8, threads=1, device="cpu",
    buffer_size=4000, target_update_interval=100, log_interval=50, checkpoint_freq=10**9,
    workers=2, steps=10**7, eval_freq=0, optimizer="sgd", learning_rate=RATE, max_grad_norm=0.0,
)  # fmt: skip
MORE_STEPS = 200
STANDSTILL_S = 3.0
"""A run that takes no step for so long waits for a worker; a busy machine may cause that too."""
WAITING = ("sync", "ssp", "local-sgd", "admm")
GOING_ON = ("async", "hybrid", "easgd")


class Until(Callback):
    """Stops the run when a condition holds; it is called about ten times a second."""

    def __init__(self, condition: Any) -> None:
        self._condition = condition

    def on_step(self, run: Run) -> bool | None:
        return False if self._condition(run) else None


def counted(folder: Path) -> set[float]:
    """How many gradients the counters among the weights are made of."""
    weights = load_checkpoint(folder / "checkpoints").parts["learner"]["weights"]
    return set((-weights[:COUNTERS] / RATE).tolist())


@pytest.fixture(scope="module")
def claim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The file by which one worker says that its gradients are the bad ones."""
    with pytest.MonkeyPatch.context() as patch:
        path = tmp_path_factory.mktemp("bad") / "claim"
        patch.setenv(CLAIM, str(path))
        yield path


def steps_of_worker_1(run: Run) -> int:
    account = run.parts.collector.account()
    assert account is not None
    return account.workers[1].env_steps


class StopAndContinue:
    """Stops worker 1, waits for what the others do meanwhile, and lets it go on."""

    def __init__(self, waits: bool) -> None:
        self._waits, self._pid, self._phase = waits, 0, "start"
        self._began = self._own = self._steps = self.meanwhile = 0
        self._moved_s = 0.0

    def __call__(self, run: Run) -> bool:
        steps = run.parts.clock.env_steps
        fleet = run.parts.collector
        if self._phase == "start":
            if run.parts.clock.updates > 50 and len(fleet.pids()) == 3:
                self._pid = fleet.pids()["worker 1"]
                os.kill(self._pid, signal.SIGSTOP)
                self._phase, self._moved_s = "stopped", time.monotonic()
                self._began = self._steps = steps
        elif self._phase == "stopped":
            if steps != self._steps:
                self._steps, self._moved_s = steps, time.monotonic()
            self.meanwhile = steps - self._began
            stands_still = time.monotonic() - self._moved_s > STANDSTILL_S
            if (stands_still and self._waits) or self.meanwhile > 10 * MORE_STEPS:
                os.kill(self._pid, signal.SIGCONT)
                self._phase = "continued"
                self._own = steps_of_worker_1(run)
        else:
            others_go_on = steps > self._steps + MORE_STEPS
            return others_go_on and steps_of_worker_1(run) > self._own + MORE_STEPS // 4
        return False


@pytest.mark.slow
@needs_ray
@pytest.mark.usefixtures("claim", "shared_cluster")
@pytest.mark.parametrize("update", [*WAITING, *GOING_ON])
def test_a_stopped_worker_that_goes_on_costs_only_time(tmp_path: Path, update: str) -> None:
    """It is stopped for less than ``worker_timeout_s``: nobody takes its place."""
    script = StopAndContinue(waits=update in WAITING)
    own = {"hybrid": {"hybrid_workers": 1}}.get(update, {})
    result = qfleet.train(
        "CartPole-v1", run_dir=tmp_path / "run", callbacks=[Until(script)], update=update,
        worker_timeout_s=deadline(120.0), **SMALL, **own,
    ).result  # fmt: skip
    assert result.stopped_by == "callback"
    assert result.faults == {}
    assert result.fleet is not None
    assert [worker["restarts"] for worker in result.fleet["workers"]] == [0, 0]
    assert (script.meanwhile > 10 * MORE_STEPS) == (update in GOING_ON)


@pytest.mark.slow
@needs_ray
@pytest.mark.usefixtures("claim", "shared_cluster")
def test_gradients_whose_replies_are_lost_are_in_the_weights_once(tmp_path: Path) -> None:
    result = qfleet.train(
        "CartPole-v1", run_dir=tmp_path / "run", update="async", servers=2,
        network="support.faulty_networks:LosingReplies",
        callbacks=[Until(lambda run: run.parts.clock.updates > 300)], **SMALL,
    ).result  # fmt: skip
    assert result.faults == {}
    assert result.fleet is not None
    servers, workers = result.fleet["servers"], result.fleet["workers"]
    assert all(server["repeated"] > 10 for server in servers)
    applied = [server["applied"] for server in servers]
    assert counted(tmp_path / "run") == set(map(float, applied))
    fates = sum((Counter(worker["outcomes"]) for worker in workers), Counter())
    assert dict(fates) == {"applied": sum(applied)}


@pytest.mark.slow
@needs_ray
@pytest.mark.usefixtures("claim", "shared_cluster")
def test_gradients_of_one_worker_that_are_far_too_large_are_dropped(
    tmp_path: Path,
) -> None:
    def has_dropped(run: Run) -> bool:
        account = run.parts.collector.account()
        return account is not None and account.servers[0].dropped.get("outlier", 0) >= 3

    result = qfleet.train(
        "CartPole-v1", run_dir=tmp_path / "run", update="async", outlier_sigmas=5.0,
        network="support.faulty_networks:BadGradients", callbacks=[Until(has_dropped)], **SMALL,
    ).result  # fmt: skip
    assert result.faults == {}
    assert result.fleet is not None
    (server,), workers = result.fleet["servers"], result.fleet["workers"]
    assert counted(tmp_path / "run") == {float(server["applied"])}
    outcomes = [worker["outcomes"].get("outlier", 0) for worker in workers]
    assert sum(outcomes) == server["dropped"]["outlier"] >= 3


@pytest.mark.slow
@needs_ray
@pytest.mark.usefixtures("claim", "shared_cluster")
def test_a_wall_clock_that_jumps_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A day ahead in the driver, a day back in the workers."""
    wall, began_s = time.time, time.monotonic()

    def jumps(run: Run) -> bool:
        if run.parts.clock.updates > 20:
            monkeypatch.setattr(time, "time", lambda: wall() + DAY_S)
        return run.parts.clock.updates > 300

    result = qfleet.train(
        "CartPole-v1", run_dir=tmp_path / "run", update="sync", callbacks=[Until(jumps)],
        network="support.faulty_networks:ClockGoesBack", **SMALL,
    ).result  # fmt: skip
    assert result.stopped_by == "callback"
    assert result.faults == {}
    assert 0 < result.wall_s < time.monotonic() - began_s


def test_no_deadline_or_duration_is_of_the_wall_clock() -> None:
    """Fault 24: only names of runs, stamps of TensorBoard's events, and the leases and times of
    writing of runs at a URL are of the wall clock. Machines and files have no other in common;
    the owner of a lease that was taken too early notices it (tests/storage/test_lease.py)."""
    found = []
    for file in sorted(Path(qfleet.__file__).parent.rglob("*.py")):
        if file.name in ("event_file.py", "lease.py", "published.py"):
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                name = f"{node.value.id}.{node.attr}"
                if name in ("time.time", "time.time_ns", "datetime.now", "datetime.utcnow"):
                    found.append(f"{file.name}:{node.lineno}: {name}")
            elif isinstance(node, ast.ImportFrom) and node.module in ("time", "datetime"):
                names = {alias.name for alias in node.names} & {"time", "time_ns", "datetime"}
                found += [f"{file.name}:{node.lineno}: {name}" for name in names]
    assert found == []
