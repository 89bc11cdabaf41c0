"""Liveness of the two processes without which a Ray cluster does nothing: its GCS and our raylet.

In: where they are; out: ``ClusterLost`` if one is gone. Ray itself does not say so: without its
raylet a process waits for minutes, and Ray ends it without a line when it stores a value; without
the GCS Ray ends it after ``RAY_gcs_rpc_server_reconnect_timeout_s``.
"""

from __future__ import annotations

import errno
import math
import os
import socket
import time
from typing import Any

from qfleet.core.errors import ClusterLost

RUN_AGAIN = "; run it again"
"""Advice at the end of a message about a loss; a run that goes on, or was saved, drops it."""
LOOK_S = 1.0
"""Seconds between two looks at the GCS, which may be on another machine."""
ANSWER_S = 2.0
"""Deadline of an answer of the GCS."""
PATIENCE_S = 12.0
"""Time that the GCS may be silent or out of reach; some clusters restart it."""
# Ray speaks HTTP/2, where both sides begin with a frame of settings, which may be empty.
_FRAME_BYTES, _SETTINGS = 9, b"\x04"
_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0" + _SETTINGS + b"\0" * 5


class Liveness:
    def __init__(self, psutil: Any, address: str, raylet_socket: str) -> None:
        self._psutil, self._address = psutil, address
        self._raylet = _find_raylet(psutil, raylet_socket)
        self._looked_s = -math.inf
        self._missing_since_s: float | None = None
        self.loss = ""
        """One line about the process that is gone; empty while none is."""

    @property
    def is_gcs_missing(self) -> bool:
        """Whether the GCS did not answer when it was last looked for."""
        return self._missing_since_s is not None

    def check(self, now: bool = False) -> None:
        """Raise ClusterLost if a process is gone. Look at most once per second, unless ``now``."""
        now_s = time.monotonic()
        if now or self.loss or now_s - self._looked_s >= LOOK_S:
            if now_s - self._looked_s > PATIENCE_S:
                self._missing_since_s = None  # nobody looked for long, as in an evaluation
            self._looked_s = now_s
            self.check_raylet()
            self._check_gcs(now_s)

    def check_raylet(self) -> None:
        """Raise ClusterLost if the raylet is dead; this takes a tenth of a millisecond."""
        if not self.loss and self._raylet is not None and not self._runs(self._raylet):
            self.loss = f"the raylet of cluster {self._address} died (process {self._raylet.pid})"
        if self.loss:
            raise ClusterLost(self.loss + RUN_AGAIN)

    def await_gcs(self) -> None:
        """Wait until the GCS can be reached: a call that needs it would wait without a deadline."""
        self.check(now=True)
        while self.is_gcs_missing:
            time.sleep(LOOK_S)
            self.check(now=True)

    def _check_gcs(self, now_s: float) -> None:
        try:
            greet(self._address, ANSWER_S)
            self._missing_since_s = None
        except OSError as error:
            self._missing_since_s = self._missing_since_s or now_s
            if now_s - self._missing_since_s >= PATIENCE_S:
                self.loss = f"the GCS of cluster {self._address} does not answer ({error})"
                raise ClusterLost(self.loss + RUN_AGAIN) from None

    def _runs(self, process: Any) -> bool:
        try:
            # is_running: the number may be that of a later process.
            return bool(process.is_running() and process.status() != self._psutil.STATUS_ZOMBIE)
        except self._psutil.NoSuchProcess:
            return False


def greet(address: str, timeout_s: float) -> str:
    """Return the host of ``host:port`` if a Ray server answers there, or raise OSError.

    A connection alone proves nothing: it may be half open, or the server may be stopped.
    """
    host, _, port = address.rpartition(":")
    with socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s) as line:
        line.sendall(_GREETING)
        # With TLS there is no answer to a plain greeting: an open port must suffice.
        if os.environ.get("RAY_USE_TLS") != "1" and line.recv(_FRAME_BYTES)[3:4] != _SETTINGS:
            raise OSError("the server there is not Ray")
    return host.strip("[]")


def is_silent(address: str) -> bool:
    """Return whether nothing comes back from this address in time, not even a refusal."""
    try:
        greet(address, ANSWER_S)
    except TimeoutError:
        return True
    except OSError as error:
        return error.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH)
    return False


def _find_raylet(psutil: Any, raylet_socket: str) -> Any:
    """Return the process that serves this socket; None if it is not among those of this machine."""
    option = f"--raylet_socket_name={raylet_socket}"
    processes = psutil.process_iter(["cmdline"])
    return next((p for p in processes if option in (p.info["cmdline"] or ())), None)
