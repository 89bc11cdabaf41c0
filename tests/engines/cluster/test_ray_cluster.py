"""Clusters are refused in one line, and leave nothing behind however they end."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import socket
import stat
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from qfleet.cli import main
from qfleet.core import signals
from qfleet.core.errors import ClusterError, UserError
from qfleet.engines.cluster import ray_cluster as clusters
from qfleet.engines.cluster.ray_cluster import open_cluster
from support.clusters import needs_ray
from support.messages import says
from support.processes import count_lines, is_alive, needs_proc, python, start
from support.waiting import CLUSTER_S, finish, wait_until


def open_and_close(address: str) -> None:
    with open_cluster(1, address):
        raise AssertionError("there is no such cluster")


def test_without_ray_it_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec

    def find_spec(name: str, *rest: str) -> object:
        return None if name == "ray" else find(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    assert main.main(["lab", "mapreduce"]) == UserError.exit_code
    assert capsys.readouterr().err.strip().endswith("pip install 'qfleet[ray]'")


@needs_ray
@pytest.mark.parametrize("address", ["somewhere", "ray://127.0.0.1:1", "127.0.0.1:port", ""])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(UserError, match=says("host:port")):
        open_and_close(address)


@needs_ray
def test_an_address_where_nobody_listens_is_refused() -> None:
    with socket.socket() as held:
        # Bound but not listening: nobody else can come to answer there.
        held.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{held.getsockname()[1]}"
        with pytest.raises(ClusterError, match=says(address)):
            open_and_close(address)


@needs_ray
@pytest.mark.parametrize("reply", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_an_address_of_something_else_is_refused(
    reply: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clusters, "PROBE_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"

        def answer() -> None:
            line, _ = server.accept()
            # The other side may leave in the middle of it.
            with line, contextlib.suppress(ConnectionError):
                line.sendall(reply)
                line.recv(1000)  # the greeting
                line.recv(1)  # until the other side leaves

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ClusterError, match=says(address)):
            open_and_close(address)
        thread.join()


def test_the_environment_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QFLEET_A", "before")
    monkeypatch.delenv("QFLEET_B", raising=False)
    with clusters._environment({"QFLEET_A": "within", "QFLEET_B": "within"}):
        assert os.environ["QFLEET_A"] == os.environ["QFLEET_B"] == "within"
    assert os.environ["QFLEET_A"] == "before"
    assert "QFLEET_B" not in os.environ


def test_signals_are_left_alone_outside_the_main_thread() -> None:
    before = signal.getsignal(signal.SIGTERM)
    passed = []

    def enter() -> None:
        with signals.signals_ignored():
            passed.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert passed == [before]


@needs_ray
def test_more_workers_than_memory_has_room_for_are_refused() -> None:
    with pytest.raises(UserError, match=says("1000000000", "processes")):
        open_cluster(10**9)


def test_who_handles_sigterm_goes_on_doing_so() -> None:
    """A run does, and writes its checkpoint; connecting puts a handler of Ray's in between."""
    heard: list[int] = []

    def theirs(number: int, _frame: object) -> None:
        heard.append(number)

    before = signal.signal(signal.SIGTERM, theirs)
    try:
        with signals.handling({signal.SIGTERM: signal.SIG_IGN}):
            with signals.sigterm_unwinds(theirs):
                signal.raise_signal(signal.SIGTERM)
                assert heard == [signal.SIGTERM]
            assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
        with (
            pytest.raises(SystemExit) as left,
            signals.sigterm_unwinds(signal.SIG_DFL),
        ):
            signal.raise_signal(signal.SIGTERM)
        assert (left.value.code, len(heard)) == (143, 1)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_sigterm_while_ray_connects_ends_with_the_usual_code(tmp_path: Path) -> None:
    def init(**_: object) -> None:
        raise SystemExit(signal.SIGTERM)

    with pytest.raises(SystemExit) as left:
        clusters._connect(SimpleNamespace(init=init), 1.0, tmp_path)
    assert left.value.code == 143


@pytest.mark.parametrize(
    ("mode", "has_token", "error", "tries"),
    [
        (None, True, ConnectionError("Failed to connect"), 2),
        (None, True, PermissionError("no token"), 2),  # stands for Ray's AuthenticationError
        (None, True, RuntimeError("Version mismatch"), 1),
        (None, False, ConnectionError("Failed to connect"), 1),
        ("disabled", True, ConnectionError("Failed to connect"), 1),
        ("token", True, ConnectionError("Failed to connect"), 1),
    ],
)
def test_a_refused_process_uses_its_token_unless_a_mode_is_set(
    mode: str | None, has_token: bool, error: Exception, tries: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    if mode is not None:
        monkeypatch.setenv("RAY_AUTH_MODE", mode)
    modes: list[str | None] = []

    def init(**_: object) -> None:
        modes.append(os.environ.get("RAY_AUTH_MODE"))
        raise error

    token = SimpleNamespace(has_token=lambda **_: has_token)
    raylet = SimpleNamespace(
        AuthenticationTokenLoader=SimpleNamespace(instance=lambda: token),
        Config=SimpleNamespace(initialize=lambda _: None),
    )
    errors = SimpleNamespace(AuthenticationError=PermissionError)
    ray = SimpleNamespace(init=init, _raylet=raylet, exceptions=errors)
    refused = pytest.raises(ClusterError, match=says("127.0.0.1:1", "RAY_AUTH_TOKEN"))
    with refused, clusters._restored("RAY_AUTH_MODE"):
        clusters._connect_with_token(ray, 1.0, "127.0.0.1:1")
    assert modes == [mode, "token"][:tries]
    assert os.environ.get("RAY_AUTH_MODE") == mode


def test_a_node_that_does_not_start_in_time_is_one_line(tmp_path: Path) -> None:
    def init(**_: object) -> None:
        raise Exception("The current node timed out during startup.")  # as Ray's node.py does

    with pytest.raises(ClusterError, match=says("cannot start a cluster", "timed out")):
        clusters._connect(SimpleNamespace(init=init), 1.0, tmp_path)


PROGRAM = """
import os, sys, time
from pathlib import Path
from qfleet.engines.cluster.ray_cluster import open_cluster
class Sleeper:
    def sleep(self):
        time.sleep(600)
    def name(self):
        return os.getpid()
with open_cluster(1) as cluster:
    import psutil
    sleeper = cluster.spawn(Sleeper)
    pids = [cluster.get(sleeper.name.remote(), "sleeper")]
    pids += [process.pid for process in psutil.Process().children(recursive=True)]
    told = Path(sys.argv[1])
    with told.with_suffix(".part").open("w") as out:
        print(cluster.folder, *pids, file=out)
    told.with_suffix(".part").rename(told)
    cluster.get(sleeper.sleep.remote(), "sleeper")
"""


@needs_ray
@needs_proc
@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_a_signal_leaves_nothing_behind(number: signal.Signals, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    told = tmp_path / "told"
    running = start(python(str(program), str(told)))
    try:
        wait_until(lambda: count_lines(told) == 1, "a member at work", CLUSTER_S, running)
        folder, *pids = told.read_text().split()
        family = [int(pid) for pid in pids]
        assert stat.S_IMODE(Path(folder).stat().st_mode) == 0o700
        assert any(map(is_alive, family))
        running.send_signal(number)
        _, error = finish(running, "the end after the signal", CLUSTER_S)
    finally:
        running.kill()
        running.wait()
    code = {signal.SIGINT: -signal.SIGINT, signal.SIGTERM: 143}[number]
    assert running.returncode == code, error
    assert not Path(folder).exists()
    assert not any(map(is_alive, family))
