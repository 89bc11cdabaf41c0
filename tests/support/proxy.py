"""A TCP proxy that can stop forwarding without closing a connection."""

from __future__ import annotations

import contextlib
import socket
import threading

CHUNK_BYTES = 1 << 16


class Proxy:
    """Forwards connections to a port of this machine; after ``freeze`` they are half open."""

    def __init__(self, target_port: int) -> None:
        self._target_port, self._is_frozen = target_port, threading.Event()
        self._server = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = [self._server]
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def freeze(self) -> None:
        self._is_frozen.set()

    def close(self) -> None:
        for line in self._open:
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)
            line.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near = self._server.accept()[0]
                far = socket.create_connection(("127.0.0.1", self._target_port))
                self._open += [near, far]
                for source, target in ((near, far), (far, near)):
                    threading.Thread(target=self._pump, args=(source, target), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while (data := source.recv(CHUNK_BYTES)) and not self._is_frozen.is_set():
                target.sendall(data)
            if not self._is_frozen.is_set():
                target.shutdown(socket.SHUT_WR)
