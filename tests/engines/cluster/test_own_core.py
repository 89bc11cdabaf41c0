"""A core of its own: taken once, by all threads, only for games, and free again after a kill."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from qfleet.config.config import Config
from qfleet.core.cores import usable_cores
from qfleet.engines.actors.remote_actor import RemoteActor
from qfleet.engines.cluster import own_core
from qfleet.engines.cluster.own_core import take_core
from qfleet.engines.parameter_server import worker
from qfleet.engines.parameter_server.server import Server
from support.configs import tiny_config
from support.server_cases import DirectLine
from support.server_runs import first_weights
from support.waiting import PHASE_S, deadline

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


@pytest.mark.parametrize(
    ("pairs", "first"),
    [(["1000-1001", "1002-1003"], 1002), (["1000,1002", "1001,1003"], 1001)],
    ids=["neighbours", "apart"],
)
def test_physical_cores_are_taken_before_their_second_threads(
    pairs: list[str],
    first: int,
    bound: list[tuple[int, set[int]]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(own_core, "TOPOLOGY", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1000, 1001, 1002, 1003})
    for pair in pairs:
        for core in pair.replace("-", ",").split(","):
            folder = tmp_path / f"cpu{core}" / "topology"
            folder.mkdir(parents=True)
            (folder / "thread_siblings_list").write_text(pair + "\n")
    claims = [take_core(PONG) for _ in range(3)]
    order = list(dict.fromkeys(min(core) for _, core in bound))
    assert order[0] == first
    assert sorted(order) == [1001, 1002, 1003]
    for claim in claims:
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
        PONG.replace(data="recording"),
        PONG.replace(threads=2),
        PONG.replace(workers=4),
        PONG.replace(workers=1),
    ],
    ids=["no game", "a recording", "several threads", "more than cores", "room for others"],
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


@pytest.mark.usefixtures("bound")
def test_a_refusal_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "not here")

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    assert take_core(PONG) is None
    for core in (1001, 1002):  # both are free
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as claim:
            claim.bind(f"{own_core.CLAIM}{core}")


def test_workers_and_actors_take_one_once_their_games_have_threads(
    bound: list[tuple[int, set[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    class HereLine(DirectLine):
        def __init__(self, _: object, server: Server, shard: int) -> None:
            super().__init__(server)

    class Here:
        def node_ip(self) -> str:
            return "127.0.0.1"

    monkeypatch.setattr(worker, "from_inside", lambda _: Here())
    monkeypatch.setattr(worker, "RemoteLine", HereLine)
    config = PONG.replace(update="async", learning_starts=50, buffer_size=500, envs=2)
    server = Server(config, first_weights(config).numpy())
    before = {str(thread) for thread in os.listdir("/proc/self/task")}
    one = worker.RemoteWorker(config, 0, [server])
    other = RemoteActor(config.replace(engine="actors"), 1)
    for member in (one, other):
        core = member._core
        assert core is not None
        core.close()
    numbers = [{number for number, core in bound if core == {own}} for own in (1001, 1002)]
    assert all(own - {0} - {int(thread) for thread in before} for own in numbers)
    one.close()


@pytest.mark.skipif(usable_cores() < 2, reason="a single core is left to the rest")
def test_the_system_binds_the_process() -> None:
    program = (
        "import os\n"
        "from qfleet.config.config import Config\n"
        "from qfleet.engines.cluster import own_core\n"
        "own_core.CLAIM = f'{chr(0)}qfleet-test-{os.getpid()}-'\n"
        "cores = sorted(os.sched_getaffinity(0))\n"
        "pong = Config(env='ALE/Pong-v5', engine='parameter-server', workers=len(cores))\n"
        "claim = own_core.take_core(pong)\n"
        "tasks = os.listdir('/proc/self/task')\n"
        "bound = {core for task in tasks for core in os.sched_getaffinity(int(task))}\n"
        "assert len(bound) == 1 and bound <= set(cores[1:]), bound\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=deadline(PHASE_S))
