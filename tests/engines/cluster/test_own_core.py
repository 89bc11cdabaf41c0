"""A core of its own: taken once, by all threads, only for games, and free again after a kill."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from qfleet.config.config import Config
from qfleet.core.cores import usable_cores
from qfleet.engines.cluster import own_core
from qfleet.engines.cluster.own_core import take_core
from support.configs import tiny_config

PONG = tiny_config(env="ALE/Pong-v5", engine="parameter-server", workers=3, threads=0)
CORES = {1000, 1001, 1002}

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="cores are taken on Linux only")


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, set[int]]]:
    """Pretend to have other cores, and note what is bound to them."""
    calls: list[tuple[int, set[int]]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(CORES))
    monkeypatch.setattr(os, "sched_setaffinity", lambda *call: calls.append(call))
    monkeypatch.setattr(own_core, "CLAIM", f"\0qfleet-test-{os.getpid()}-")
    return calls


def test_every_core_but_the_first_is_taken_once(bound: list[tuple[int, set[int]]]) -> None:
    claims = [take_core(PONG) for _ in range(3)]
    assert [claim is not None for claim in claims] == [True, True, False]
    assert {min(core) for _, core in bound} == {1001, 1002}
    assert claims[0] is not None
    claims[0].close()
    bound.clear()
    again = take_core(PONG)
    assert again is not None
    assert {min(core) for _, core in bound} == {1001}
    for claim in (claims[1], again):
        assert claim is not None
        claim.close()


def test_all_threads_keep_to_it(bound: list[tuple[int, set[int]]]) -> None:
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    try:
        claim = take_core(PONG)
        assert claim is not None
        claim.close()
        threads = {number for number, _ in bound}
        assert {thread.native_id, threading.get_native_id()} <= threads
    finally:
        end.set()
        thread.join()


@pytest.mark.parametrize(
    "config",
    [
        PONG.replace(env="CartPole-v1"),
        PONG.replace(threads=2),
        PONG.replace(workers=4),
    ],
    ids=["no game", "several threads", "more workers than cores"],
)
def test_others_keep_all_cores(config: Config, bound: list[tuple[int, set[int]]]) -> None:
    assert take_core(config) is None
    assert not bound


def test_a_killed_process_keeps_no_core(bound: list[tuple[int, set[int]]]) -> None:
    program = (
        "import socket, sys, time\n"
        "claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
        "claim.bind(chr(0) + sys.argv[1])\n"
        "print('taken', flush=True)\n"
        "time.sleep(60)\n"
    )
    name = f"{own_core.CLAIM[1:]}1001"
    command = [sys.executable, "-c", program, name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "taken\n"
        beside = take_core(PONG)
        assert {min(core) for _, core in bound} == {1002}
        process.kill()
    bound.clear()
    after = take_core(PONG)
    assert {min(core) for _, core in bound} == {1001}
    for claim in (beside, after):
        assert claim is not None
        claim.close()


@pytest.mark.skipif(usable_cores() < 2, reason="a single core is left to the rest")
def test_the_system_binds_the_process() -> None:
    program = (
        "import os\n"
        "from qfleet.config.config import Config\n"
        "from qfleet.engines.cluster import own_core\n"
        "own_core.CLAIM = f'{chr(0)}qfleet-test-{os.getpid()}-'\n"
        "last = sorted(os.sched_getaffinity(0))[1]\n"
        "pong = Config(env='ALE/Pong-v5', engine='parameter-server', workers=2)\n"
        "claim = own_core.take_core(pong)\n"
        "tasks = os.listdir('/proc/self/task')\n"
        "assert all(os.sched_getaffinity(int(task)) == {last} for task in tasks), tasks\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
