"""``qfleet serve`` as a program: what it refuses, its signals, its workers."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qfleet.cli import serve
from qfleet.cli.main import main
from support.policy_servers import JSON, connect, post, read_reply, saved_policy
from support.processes import children_of, is_alive, needs_proc, start_qfleet
from support.waiting import PHASE_S, deadline, expire, finish, wait_until

GOOD = json.dumps({"observation": [0.5, 1.0, 0.0, 0.0]}).encode()


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_policy(tmp_path_factory.mktemp("serve") / "policy")


class Program:
    """A server in a process of its own; what it prints is read by a thread."""

    def __init__(self, *words: str, **options: Any) -> None:
        self.process = start_qfleet("serve", *words, "--port", "0", **options)
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.wait_for("serving at")
        (line,) = (line for line in self.lines if "serving at" in line)
        found = re.search(r":(\d+)", line)
        assert found is not None
        self.port = int(found[1])

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)

    def wait_for(self, text: str) -> None:
        wait_until(lambda: any(text in line for line in self.lines), text, process=self.process)

    def end(self) -> int:
        """Wait until the process has ended, and return its exit code."""
        try:
            self.process.wait(deadline(PHASE_S))
        except subprocess.TimeoutExpired:
            expire("the server did not end", self.process)
        self._reader.join(deadline(PHASE_S))
        return self.process.returncode


@contextlib.contextmanager
def program(*words: str, **options: Any) -> Iterator[Program]:
    started = Program(*words, **options)
    try:
        yield started
    finally:
        for child in children_of(started.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        started.process.kill()
        started.process.wait()


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The only line that a command prints which is refused."""
    assert main(["serve", *words]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    return shown.err


@pytest.fixture(autouse=True)
def no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QFLEET_TOKEN", raising=False)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.0.1", "example.com"])
def test_another_host_than_loopback_needs_a_token(
    host: str, policy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(capsys, str(policy), "--host", host)
    assert host in line
    assert "QFLEET_TOKEN" in line


@pytest.mark.parametrize("name", ["..", "../up", "/etc", "a/b", "", ".hidden", "a b", "a\\b"])
def test_names_of_models_are_plain(
    name: str, policy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fault 39."""
    assert "model name" in refused(capsys, f"{name}={policy}")
    if name:
        assert "model name" in refused(capsys, str(policy), "--name", name)


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ("--max-batch 0", "--max-batch"),
        ("--max-queue 0", "--max-queue"),
        ("--workers 0", "--workers"),
        ("--port 70000", "--port"),
        ("--request-timeout-s 0", "--request-timeout-s"),
        ("--max-body-mb nan", "--max-body-mb"),
        ("--max-wait-ms -1", "--max-wait-ms"),
        ("--reload-s inf", "--reload-s"),
        ("--runtime jax", "--runtime"),
        ("--device abacus --runtime torch", "abacus"),
    ],
)
def test_wrong_values_are_refused_in_one_line(
    words: str, key: str, policy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert key in refused(capsys, str(policy), *words.split())


def test_what_cannot_be_served_is_refused_in_one_line(
    policy: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "give a run" in refused(capsys)
    assert "no-run" in refused(capsys, "no-run")
    assert "gone.onnx" in refused(capsys, "gone.onnx")
    assert "gone.safetensors" in refused(capsys, "gone.safetensors")
    assert "named 'default'" in refused(capsys, str(policy), str(policy))
    assert "token" in refused(capsys, str(policy), "--token", "")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert port in refused(capsys, str(policy), "--port", port)


def test_a_missing_package_is_named(
    policy: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "starlette", None)
    assert "qfleet[serve]" in refused(capsys, str(policy))


def test_a_path_with_an_equals_sign_is_no_name(tmp_path: Path) -> None:
    path = saved_policy(tmp_path / "lr=1e-3")
    found = serve._sources(serve.ServeArguments((str(path), f"other={path}")))
    assert [(name, source.path) for name, source in found.items()] == [
        ("default", path),
        ("other", path),
    ]


def test_sigterm_finishes_requests_and_ends_with_143(policy: Path) -> None:
    patience = ("--request-timeout-s", f"{deadline(PHASE_S):.0f}")
    with program(str(policy), "--runtime", "torch", *patience) as server:
        assert post(server.port, "/act", GOOD)[0] == 200
        with connect(server.port) as connection:
            head = b"POST /act HTTP/1.1\r\ncontent-type: application/json\r\ncontent-length: "
            connection.sendall(head + str(len(GOOD)).encode() + b"\r\n\r\n" + GOOD[:5])
            wait_until(lambda: post(server.port, "/act", GOOD)[0] == 200, "the head was read")
            server.process.terminate()
            wait_until(lambda: not listens(server.port), "it accepts no more connections")
            connection.sendall(GOOD[5:])
            reply = read_reply(connection)
            assert reply is not None
            assert reply[0] == 200
        assert server.end() == 143
        assert "Traceback" not in "".join(server.lines)


def listens(port: int) -> bool:
    try:
        connect(port).close()
    except ConnectionRefusedError:
        return False
    return True


def test_ctrl_c_ends_with_130(policy: Path) -> None:
    with program(str(policy), "--runtime", "torch") as server:
        server.process.send_signal(signal.SIGINT)
        assert server.end() == 130


def test_a_token_from_the_environment_is_asked_for(policy: Path) -> None:
    environ = {**os.environ, "QFLEET_TOKEN": "secret"}
    with program(str(policy), "--runtime", "torch", env=environ) as server:
        assert post(server.port, "/act", GOOD)[0] == 401
        assert post(server.port, "/act", GOOD, {**JSON, "authorization": "Bearer secret"})[0] == 200
    assert "secret" not in "".join(server.lines)


@pytest.mark.slow
@needs_proc
def test_a_killed_worker_is_replaced(policy: Path) -> None:
    with program(str(policy), "--runtime", "torch", "--workers", "2") as server:
        before = workers_of(server)
        assert len(before) == 2
        os.kill(before[0], signal.SIGKILL)
        server.wait_for("ended with exit code -9")
        for _ in range(20):  # the other one serves meanwhile
            assert post(server.port, "/act", GOOD)[0] == 200
        wait_until(lambda: len(workers_of(server)) == 2, "another worker was started")
        server.process.terminate()
        assert server.end() == 143
        assert not any(is_alive(pid) for pid in before)
        assert "Traceback" not in "".join(server.lines)


def workers_of(server: Program) -> list[int]:
    """The worker processes; multiprocessing has one of its own beside them."""

    def is_worker(pid: int) -> bool:
        try:
            return b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes() and is_alive(pid)
        except OSError:
            return False

    return [pid for pid in children_of(server.process.pid) if is_worker(pid)]


@pytest.mark.slow
@needs_proc
def test_workers_end_with_their_parent(policy: Path) -> None:
    with program(str(policy), "--runtime", "torch", "--workers", "2") as server:
        workers = workers_of(server)
        server.process.kill()
        wait_until(lambda: not any(is_alive(pid) for pid in workers), "the workers ended")


@pytest.mark.slow
def test_workers_that_cannot_start_end_the_server(policy: Path) -> None:
    """The parent does not open the model on this device; its workers try."""
    words = ["serve", str(policy), "--device", "abacus,abacus", "--port", "0"]
    process = start_qfleet(*words)
    _, errors = finish(process, "the server gave up")
    assert process.returncode == 2
    assert "abacus" in errors
    assert "Traceback" not in errors


def test_workers_that_are_not_ready_in_time_end_the_start(
    policy: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qfleet.deploy.serving.START_S", 0.0)
    words = ["serve", str(policy), "--runtime", "torch", "--workers", "2", "--port", "0"]
    assert main(words) == 1
    assert "[0, 1] were not ready" in capsys.readouterr().err


WITHOUT = """
import sys
for name in ("ale_py", "minatar", "pygame"):
    sys.modules[name] = None
from qfleet.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def test_a_policy_is_served_without_the_package_of_its_environment(tmp_path: Path) -> None:
    path = saved_policy(tmp_path / "policy", env="MinAtar/Breakout-v1")
    process = subprocess.Popen(
        [sys.executable, "-c", WITHOUT, "serve", str(path), "--runtime", "torch", "--port", "0"],
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        assert "serving at" in line
        port = int(line.rsplit(":", 1)[1])
        assert post(port, "/act", GOOD)[0] == 200
    finally:
        process.kill()
        process.wait()
