"""Liveness of a GCS and a raylet, which are a socket and a plain process here."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from qfleet.core.errors import ClusterLost
from qfleet.engines.cluster import liveness
from qfleet.engines.cluster.liveness import Liveness
from support.messages import says
from support.waiting import deadline, wait_until

psutil = pytest.importorskip("psutil")
SOCKET = f"/tmp/no-such-folder/{os.getpid()}/raylet"  # others run these tests too


SETTINGS = b"\0\0\0\4\0\0\0\0\0"


class Gcs:
    """A server that greets as Ray does, until it is closed or made silent."""

    def __init__(self, port: int = 0) -> None:
        self._server = socket.create_server(("127.0.0.1", port))
        self.port = self._server.getsockname()[1]
        self.address = f"127.0.0.1:{self.port}"
        self.is_silent = False
        self._lines: list[socket.socket] = []
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                self._lines.append(self._server.accept()[0])
                if not self.is_silent:
                    self._lines[-1].sendall(SETTINGS)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # wakes ``accept``
        self._thread.join()
        for line in [self._server, *self._lines]:
            line.close()


@pytest.fixture
def gcs() -> Iterator[Gcs]:
    server = Gcs()
    yield server
    server.close()


@pytest.fixture
def raylet() -> Iterator[subprocess.Popen[bytes]]:
    wait = [sys.executable, "-c", "import time; time.sleep(600)"]
    process = subprocess.Popen([*wait, f"--raylet_socket_name={SOCKET}"])
    words = Path(f"/proc/{process.pid}/cmdline")
    if words.exists():  # it is set a moment after the process is there
        wait_until(lambda: SOCKET in words.read_text(), "the command line")
    yield process
    process.kill()
    process.wait()


@pytest.mark.usefixtures("raylet")
def test_all_is_well_while_both_are_there(gcs: Gcs) -> None:
    watched = Liveness(psutil, gcs.address, SOCKET)
    watched.check(now=True)
    watched.check_raylet()
    watched.await_gcs()
    assert watched.loss == ""


def test_a_dead_raylet_is_found_before_its_parent_has_looked(
    gcs: Gcs, raylet: subprocess.Popen[bytes]
) -> None:
    watched = Liveness(psutil, gcs.address, SOCKET)
    watched.check()
    raylet.kill()
    process = psutil.Process(raylet.pid)
    wait_until(lambda: process.status() == psutil.STATUS_ZOMBIE, "the raylet's death")
    with pytest.raises(ClusterLost, match=says("raylet", str(raylet.pid), "run it again")):
        watched.check_raylet()
    with pytest.raises(ClusterLost):
        watched.check()  # without a second in between: a loss is final


def test_a_raylet_that_is_not_on_this_machine_is_not_watched(gcs: Gcs) -> None:
    Liveness(psutil, gcs.address, SOCKET).check(now=True)


@pytest.mark.parametrize("half_open", [False, True])
def test_a_gcs_that_refuses_connections_or_is_silent_is_lost(
    gcs: Gcs, half_open: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault 23 of docs/faults.md: a connection that nobody answers is none."""
    monkeypatch.setattr(liveness, "PATIENCE_S", 0.0)
    monkeypatch.setattr(liveness, "ANSWER_S", 0.2)
    watched = Liveness(psutil, gcs.address, SOCKET)
    if half_open:
        gcs.is_silent = True
    else:
        gcs.close()
    with pytest.raises(ClusterLost, match=says("GCS", "timed" if half_open else "refused")):
        watched.check()
    assert "GCS" in watched.loss


def test_a_gcs_that_comes_back_in_time_is_waited_for(
    gcs: Gcs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liveness, "LOOK_S", 0.01)
    monkeypatch.setattr(liveness, "PATIENCE_S", deadline(60.0))
    watched = Liveness(psutil, gcs.address, SOCKET)
    gcs.close()
    watched.check()
    waiting = threading.Thread(target=watched.await_gcs)
    waiting.start()
    again = Gcs(gcs.port)
    waiting.join(deadline(60.0))
    again.close()
    assert not waiting.is_alive()
    assert watched.loss == ""
