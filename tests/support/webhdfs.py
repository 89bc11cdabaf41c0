"""A stand-in of an HDFS name node on loopback: the WebHDFS verbs that fsspec uses.

Data goes through a redirect, as on a cluster. RENAME does not replace a file, unless with
``renameoptions=OVERWRITE``.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from qfleet.storage import remote
from support.waiting import PHASE_S

PREFIX = "/webhdfs/v1"
EXCEPTIONS = {
    403: "AccessControlException",
    404: "FileNotFoundException",
    500: "RetriableException",
}


class NameNode(ThreadingHTTPServer):
    """``files``: path → contents; ``fails``: statuses with which the next requests are answered;
    ``is_down``: all are answered with 500."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[str, bytes] = {}
        self.folders: set[str] = {"/"}
        self.fails: list[int] = []
        self.is_down = False

    @property
    def url(self) -> str:
        return f"webhdfs://127.0.0.1:{self.server_address[1]}"


@contextlib.contextmanager
def name_node() -> Iterator[NameNode]:
    server = NameNode()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: NameNode

    def log_message(self, *arguments: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer()

    do_PUT = do_POST = do_DELETE = do_GET

    def _answer(self) -> None:
        parts = urlsplit(self.path)
        self.path_asked = unquote(parts.path).removeprefix(PREFIX).rstrip("/") or "/"
        self.query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.server.is_down:
            self._refuse(500)
        elif self.server.fails:
            self._refuse(self.server.fails.pop(0))
        else:
            getattr(self, "op_" + self.query["op"].lower())(self.path_asked)

    def _send(self, body: Any = None, status: int = 200, **headers: str) -> None:
        data = (
            body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        )
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _refuse(self, status: int) -> None:
        error = {"exception": EXCEPTIONS[status], "message": f"injected {self.path_asked}"}
        self._send({"RemoteException": error}, status)

    def _redirect(self) -> bool:
        """Send the client to a data node, which is this server, unless it comes from there."""
        if "datanode" in self.query:
            return False
        port = self.server.server_address[1]
        self._send(status=307, Location=f"http://127.0.0.1:{port}{self.path}&datanode=1")
        return True

    def _status(self, path: str, name: str) -> dict[str, Any]:
        is_file = path in self.server.files
        size = len(self.server.files.get(path, b""))
        return {"pathSuffix": name, "type": "FILE" if is_file else "DIRECTORY", "length": size}

    def _make_folders(self, path: str) -> None:
        while path != "/":
            self.server.folders.add(path)
            path = path.rpartition("/")[0] or "/"

    def op_getfilestatus(self, path: str) -> None:
        if path in self.server.files or path in self.server.folders:
            self._send({"FileStatus": self._status(path, "")})
        else:
            self._refuse(404)

    def op_liststatus(self, path: str) -> None:
        if path in self.server.files:
            self._send({"FileStatuses": {"FileStatus": [self._status(path, "")]}})
        elif path in self.server.folders:
            every = {*self.server.files, *self.server.folders} - {"/"}
            below = [one for one in every if (one.rpartition("/")[0] or "/") == path]
            found = [self._status(one, one.rpartition("/")[2]) for one in sorted(below)]
            self._send({"FileStatuses": {"FileStatus": found}})
        else:
            self._refuse(404)

    def op_mkdirs(self, path: str) -> None:
        self._make_folders(path)
        self._send({"boolean": True})

    def op_create(self, path: str) -> None:
        if not self._redirect():
            self._make_folders(path.rpartition("/")[0] or "/")
            self.server.files[path] = self.body
            self._send(status=201)

    def op_append(self, path: str) -> None:
        if not self._redirect():
            self.server.files[path] += self.body
            self._send()

    def op_open(self, path: str) -> None:
        if path not in self.server.files:
            self._refuse(404)
        elif not self._redirect():
            start = int(self.query.get("offset", 0))
            length = int(self.query.get("length", len(self.server.files[path])))
            self._send(self.server.files[path][start : start + length])

    def op_rename(self, path: str) -> None:
        target = self.query["destination"]
        if target in self.server.files and self.query.get("renameoptions") != "OVERWRITE":
            self._send({"boolean": False})
            return
        self.server.files[target] = self.server.files.pop(path)
        # A name node answers a rename with options without a body.
        self._send(None if "renameoptions" in self.query else {"boolean": True})

    def op_delete(self, path: str) -> None:
        inside = f"{path}/"
        gone = [one for one in self.server.files if one == path or one.startswith(inside)]
        for one in gone:
            del self.server.files[one]
        self.server.folders -= {
            one for one in self.server.folders if one == path or one.startswith(inside)
        }
        self._send({"boolean": bool(gone)})


def let_requests_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep a store's short patience from being the timeout of a request, which would be 1 s."""
    opened = remote._open
    monkeypatch.setattr(remote, "_open", lambda url, scheme, _: opened(url, scheme, PHASE_S))
    monkeypatch.setattr(remote, "REQUEST_TIMEOUT_S", PHASE_S)
