"""Fault 40 of docs/faults.md: Ctrl-C and SIGTERM leave a checkpoint and no process behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import qfleet
from qfleet.core import signals
from qfleet.storage.checkpoint import list_checkpoints
from qfleet.training.run_state import RunOptions
from support.faulty_envs import result_of
from support.messages import holds
from support.processes import children_of, count_lines, is_alive, needs_proc, start_qfleet
from support.waiting import PHASE_S, deadline, finish, wait_until


@needs_proc
@pytest.mark.parametrize(
    ("number", "code"),
    [
        pytest.param(signal.SIGINT, 130, id="SIGINT"),
        pytest.param(signal.SIGTERM, 143, id="SIGTERM", marks=pytest.mark.slow),
    ],
)
def test_a_signal_ends_a_run_in_good_order(
    number: signal.Signals, code: int, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    # Endless but for the signal; the envs live in processes of their own.
    command = "train CartPole-v1 --preset none --steps 100000000 --envs 2 --vectorize async"
    command += " --net-arch 16 --log-interval 200 --no-tensorboard --buffer-size 1000"
    run = start_qfleet(*command.split(), "--run-dir", str(folder))
    try:
        metrics = folder / "metrics.jsonl"
        wait_until(lambda: count_lines(metrics) >= 2, "two log lines", process=run)
        children = children_of(run.pid)
        assert len(children) >= 2
        # To all, as a terminal's Ctrl-C and the SIGTERM of a batch system come.
        for pid in [*children, run.pid]:
            os.kill(pid, number)
        out, err = finish(run, "the end after the signal")
    finally:
        run.kill()
        run.wait()
    assert run.returncode == code, err
    assert "Traceback" not in err
    assert holds(err, "stopping", "signal")
    assert f"qfleet resume {folder}" in out
    result = result_of(folder)
    assert result["stopped_by"] == number.name
    assert list_checkpoints(folder / "checkpoints") == [result["env_steps"]]
    assert result["faults"] == {}  # environments do not hear it
    wait_until(lambda: not any(map(is_alive, children)), "the end of the children")
    more = result["env_steps"] + 100
    resumed = qfleet.resume(folder, options=RunOptions(stop_after=more))
    assert resumed.result.env_steps >= more
    assert resumed.result.stopped_by == "stop_after"
    rows = [json.loads(line)["env_steps"] for line in metrics.open()]
    assert rows == sorted(rows)


@pytest.mark.usefixtures("default_signals")
def test_what_a_cluster_runs_does_not_hear_sigterm_but_what_environments_start_does() -> None:
    # Whether SIGTERM is blocked and what it does: in a child, and then in a child of that child.
    tell = (
        "import signal, subprocess, sys\n"
        "from qfleet.core import signals\n"
        "def tell():\n"
        "    blocked = signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ())\n"
        "    print(blocked, signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, flush=True)\n"
    )
    child = tell + (
        "tell()\n"
        "signals.ignore_sigterm_if_blocked()\n"
        "signal.raise_signal(signal.SIGTERM)\n"
        "subprocess.run([sys.executable, '-c', sys.argv[1]], check=True)\n"
    )
    command = [sys.executable, "-c", child, tell + "tell()\n"]
    with signals.blocked_in_children():
        told = subprocess.run(command, capture_output=True, text=True, timeout=deadline(PHASE_S))
    assert told.stdout.split() == ["True", "True", "False", "True"], told.stderr
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    signals.ignore_sigterm_if_blocked()  # where it is heard, as in this process, nothing changes
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.usefixtures("default_signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_a_request_and_the_second_is_not(number: signal.Signals) -> None:
    came: list[int] = []
    now_s = 100.0
    with signals.signals_request_stop(came.append, lambda: now_s):
        signal.raise_signal(number)
        signal.raise_signal(number)  # to the program, and to its group
        assert came == [number]
        now_s += 1.0
        with signals.signals_ignored():
            signal.raise_signal(number)  # while a cluster is ended
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
    assert came == [number]
