"""Row 40 of the fault list: Ctrl-C and SIGTERM leave a checkpoint and no process behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from faulty_envs import result_of

import qfleet
from qfleet import signals
from qfleet.run import Sitting
from qfleet.storage.checkpoint import list_checkpoints

DEADLINE_S = 60.0


def wait_for(what: str, condition: object, deadline_s: float = DEADLINE_S) -> None:
    """Until ``condition()`` holds; the deadline only ends a test that has failed anyway."""
    assert callable(condition)
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come about"
        time.sleep(0.02)


def children_of(pid: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            found.append(int(stat.parent.name))
    return found


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"  # a zombie has ended; whoever inherited it has yet to look


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="lists processes by /proc")
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["SIGINT", "SIGTERM"]
)
def test_a_signal_ends_a_run_in_good_order(
    number: signal.Signals, code: int, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    # Endless but for the signal; the envs live in processes of their own.
    command = "train CartPole-v1 --preset none --steps 100000000 --envs 2 --vectorize async"
    command += " --net-arch 16 --log-interval 200 --no-tensorboard --buffer-size 1000"
    run = subprocess.Popen(
        [sys.executable, "-m", "qfleet.cli.main", *command.split(), "--run-dir", str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        metrics = folder / "metrics.jsonl"
        wait_for("a log line", lambda: metrics.exists() and metrics.read_text().count("\n") >= 2)
        children = children_of(run.pid)
        assert len(children) >= 2
        # To all, as a terminal's Ctrl-C and the SIGTERM of a batch system come.
        for pid in [*children, run.pid]:
            os.kill(pid, number)
        out, err = run.communicate(timeout=DEADLINE_S)
    finally:
        run.kill()
        run.wait()
    assert run.returncode == code, err
    assert "Traceback" not in err
    assert f"qfleet resume {folder}" in out
    result = result_of(folder)
    assert result["stopped_by"] == number.name
    assert list_checkpoints(folder / "checkpoints") == [result["env_steps"]]
    # Environments may die of a SIGTERM of their own; the run ends in good order all the same.
    assert set(result["faults"]) <= ({"env_process"} if number == signal.SIGTERM else set())
    wait_for("the children's end", lambda: not any(map(is_alive, children)))
    more = result["env_steps"] + 100
    resumed = qfleet.resume(folder, sitting=Sitting(stop_after=more))
    assert resumed.result.env_steps >= more
    assert resumed.result.stopped_by == "stop_after"
    rows = [json.loads(line)["env_steps"] for line in metrics.open()]
    assert rows == sorted(rows)


def test_what_a_cluster_runs_does_not_hear_sigterm_but_what_environments_start_does() -> None:
    # Whether SIGTERM is blocked and what it does: in a child, and then in a child of that child.
    tell = (
        "import signal, subprocess, sys\n"
        "from qfleet import signals\n"
        "def tell():\n"
        "    blocked = signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ())\n"
        "    print(blocked, signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, flush=True)\n"
    )
    child = tell + (
        "tell()\n"
        "signals.shrug_if_unheard()\n"
        "signal.raise_signal(signal.SIGTERM)\n"
        "subprocess.run([sys.executable, '-c', sys.argv[1]], check=True)\n"
    )
    command = [sys.executable, "-c", child, tell + "tell()\n"]
    with signals.unheard_by_children():
        told = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    assert told.stdout.split() == ["True", "True", "False", "True"], told.stderr
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    signals.shrug_if_unheard()  # where it is heard, as in this process, nothing changes
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_a_request_and_the_second_is_not(number: signal.Signals) -> None:
    came: list[int] = []
    now_s = 100.0
    with signals.Signals(came.append, lambda: now_s):
        signal.raise_signal(number)
        signal.raise_signal(number)  # to the program, and to its group
        assert came == [number]
        now_s += 1.0
        with signals.undisturbed():
            signal.raise_signal(number)  # while a cluster is ended
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
    assert came == [number]
