"""Faults 19, 20, 21 and 30 of docs/faults.md for the ranks of an all-reduce, as real processes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import qfleet
from qfleet.storage.checkpoint import list_checkpoints
from support.processes import (
    count_lines,
    descendants,
    is_alive,
    needs_proc,
    python,
    start,
    start_qfleet,
)
from support.waiting import CLUSTER_S, PHASE_S, deadline, finish, wait_until

pytestmark = [needs_proc, pytest.mark.slow]
ENDLESS = [
    "train", "CartPole-v1", "--preset", "none", "--engine", "all-reduce", "--device", "cpu",
    "--steps", "100000000", "--learning-starts", "64", "--buffer-size", "4000", "--eval-freq", "0",
    "--log-interval", "100", "--checkpoint-freq", "400", "--no-tensorboard",
]  # fmt: skip


def pids_of_ranks(parent: int) -> dict[int, int]:
    """Map the ranks that were started below a process to their pids."""
    found: dict[int, int] = {}
    for pid, title in descendants(parent).items():
        if "all_reduce.follower" in title or "-m qfleet train" in title:
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            ranks = [v.partition(b"=")[2] for v in variables if v.startswith(b"RANK=")]
            found |= {int(rank): pid for rank in ranks}
    return found


def start_ranks(folder: Path, workers: int = 3) -> tuple[subprocess.Popen[Any], dict[int, int]]:
    """Start a run and wait until it has trained for a while; return it and the pids of ranks."""
    run = folder / "run"
    words = ["--workers", str(workers), "--worker-timeout-s", str(deadline(12.0))]
    process = start_qfleet(*ENDLESS, *words, "--run-dir", str(run))
    wait_until(lambda: count_lines(run / "metrics.jsonl") > 8, "training", CLUSTER_S, process)
    return process, {0: process.pid, **pids_of_ranks(process.pid)}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_the_survivors_of_a_lost_rank_name_it(tmp_path: Path, number: signal.Signals) -> None:
    process, ranks = start_ranks(tmp_path)
    assert sorted(ranks) == [0, 1, 2]
    os.kill(ranks[2], number)
    _, errors = finish(process, "the end of rank 0", PHASE_S)
    assert process.returncode == 1
    assert re.search(r"^qfleet: rank 2 of 3 is lost: .*qfleet resume", errors, re.MULTILINE), errors
    assert re.search(r"^qfleet: rank 1: .*rank 2 of 3 is lost", errors, re.MULTILINE), errors
    assert "Traceback" not in errors
    wait_until(lambda: not any(is_alive(pid) for pid in ranks.values()), "the end of all ranks")
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert "rank 2 of 3 is lost" in result["stopped_by"]
    saved = list_checkpoints(tmp_path / "run" / "checkpoints")[-1]
    resumed = qfleet.resume(tmp_path / "run", steps=saved + 200, workers=2)
    assert isinstance(resumed, qfleet.Trained)
    assert resumed.result.env_steps >= saved + 200


GIVES_ORDERS = """
import os, signal, subprocess, sys, torch
from qfleet.core.errors import RankLost
from qfleet.engines.all_reduce.group import Group, Order, connect
from qfleet.engines.all_reduce.world import World, listen_locally
rank, port, listener = int(sys.argv[1]), int(sys.argv[2]), None
if rank == 0:
    listener = listen_locally()
    port = listener.getsockname()[1]
    other = subprocess.Popen([sys.executable, "-c", sys.argv[3], "1", str(port), ""])
world = World(rank, 2, rank, 2, "127.0.0.1", port)
group = Group(world, 0, 16.0, connect(world, rank == 0, listener and listener.detach()))
group.connect(torch.device("cpu"))
if rank:
    os.kill(os.getpid(), signal.SIGSTOP)
try:
    for _ in range(1000):
        group.give_order(Order.GO)
except RankLost as error:
    print(error, flush=True)
other.kill()
os._exit(0)
"""


def test_an_order_to_a_stopped_rank_has_a_deadline() -> None:
    process = start(python("-c", GIVES_ORDERS, "0", "0", GIVES_ORDERS))
    output, _ = finish(process, "the end of rank 0")
    assert "rank 1 of 2 is lost" in output


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_the_survivors_of_rank_0_name_it(tmp_path: Path, number: signal.Signals) -> None:
    process, ranks = start_ranks(tmp_path)
    os.kill(process.pid, number)
    try:
        followers = [ranks[1], ranks[2]]
        wait_until(lambda: not any(map(is_alive, followers)), "the end of ranks", PHASE_S)
    finally:
        process.kill()
    errors = finish(process, "its output", PHASE_S)[1]
    for rank in (1, 2):
        assert re.search(rf"^qfleet: rank {rank}: rank 0 .*is lost", errors, re.MULTILINE), errors
    assert "Traceback" not in errors


def test_a_signal_stops_all_ranks_with_a_checkpoint(tmp_path: Path) -> None:
    process, ranks = start_ranks(tmp_path, workers=2)
    process.send_signal(signal.SIGTERM)
    _, errors = finish(process, "the end of rank 0", CLUSTER_S)
    assert process.returncode == 128 + signal.SIGTERM, errors
    wait_until(lambda: not any(is_alive(pid) for pid in ranks.values()), "the end of all ranks")
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["stopped_by"] == "SIGTERM"
    assert list_checkpoints(tmp_path / "run" / "checkpoints")[-1] == result["env_steps"]


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ("FailsOnRank1", r"rank 1 of 2 is lost: .*broken on purpose"),
        ("ExitsOnRank1", r"rank 1 of 2 did not start: its process \d+ exited with 3"),
    ],
)
def test_an_environment_that_fails_on_one_rank_ends_all(
    tmp_path: Path, env: str, message: str
) -> None:
    words = [word.replace("CartPole-v1", f"support.ranked_envs:{env}") for word in ENDLESS]
    process = start_qfleet(
        *words, "--max-env-restarts", "1", "--workers", "2", "--run-dir", str(tmp_path / "run"),
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
    )  # fmt: skip
    _, errors = finish(process, "the end of rank 0", CLUSTER_S)
    assert process.returncode == 1
    assert re.search(rf"^qfleet: {message}", errors, re.MULTILINE), errors
    assert "Traceback" not in errors


def test_torchrun_starts_again_from_the_last_checkpoint(tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    words += ["--max-restarts", "1", "-m", "qfleet", *ENDLESS, "--run-dir", str(run), "--quiet"]
    process = start(words)
    checkpoints = run / "checkpoints"
    try:
        wait_until(
            lambda: checkpoints.exists() and list_checkpoints(checkpoints),
            "a checkpoint", CLUSTER_S, process,
        )  # fmt: skip
        first = pids_of_ranks(process.pid)
        os.kill(first[1], signal.SIGKILL)
        wait_until(lambda: not is_alive(first[0]), "the end of rank 0", CLUSTER_S)
        saved = list_checkpoints(checkpoints)[-1]
        wait_until(
            lambda: list_checkpoints(checkpoints)[-1] > saved + 400, "more", CLUSTER_S, process
        )
        assert set(pids_of_ranks(process.pid).values()).isdisjoint(first.values())
    finally:
        process.send_signal(signal.SIGTERM)
        finish(process, "the end of rank 0", CLUSTER_S)
    lines = (run / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["time/env_steps"] for line in lines]
    assert steps == sorted(steps)
