"""A stand-in of the Hugging Face Hub on loopback: the endpoints that HfApi uses for one model.

Files that end in .safetensors, .onnx or .gif go through LFS, as on the real hub; others are part of
the commit. A commit is applied as a whole.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_" + "x" * 34
LARGE = (".safetensors", ".onnx", ".gif")
COMMIT = "c" * 40


class Hub(ThreadingHTTPServer):
    """``repos``: repository → name → contents. ``fails_at``: a path that is answered with 500."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repos: dict[str, dict[str, bytes]] = {}
        self.objects: dict[str, bytes] = {}
        self.seen: list[str] = []
        self.created: list[dict[str, Any]] = []
        self.fails_at = ""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextlib.contextmanager
def hub() -> Iterator[Hub]:
    server = Hub()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Print nothing."""

    def _reply(self, code: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _json(self, value: Any) -> None:
        self._reply(200, json.dumps(value).encode(), Content_Type="application/json")

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        data = b""
        while size := int(self.rfile.readline(), 16):
            data += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return data

    def do_POST(self) -> None:
        path, body = self.path.partition("?")[0], self._body()
        self.server.seen.append(path)
        if self.server.fails_at and self.server.fails_at in path:
            return self._reply(500, b"down")
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._reply(401, b"no token")
        if path == "/api/validate-yaml":
            return self._json({"errors": [], "warnings": []})
        if path == "/api/repos/create":
            given = json.loads(body)
            repo = f"{given.get('organization') or 'me'}/{given['name']}"
            self.server.repos.setdefault(repo, {})
            self.server.created.append(given)
            return self._json({"url": f"{self.server.url}/{repo}"})
        if match := re.fullmatch(r"/api/models/(.+/.+)/preupload/main", path):
            names = [one["path"] for one in json.loads(body)["files"]]
            kinds = ("lfs" if name.endswith(LARGE) else "regular" for name in names)
            files = [
                {"path": name, "uploadMode": kind, "shouldIgnore": False}
                for name, kind in zip(names, kinds, strict=True)
            ]
            return self._json({"files": files})
        if re.fullmatch(r"/.+/.+\.git/info/lfs/objects/batch", path):
            objects = [
                one | {"actions": {"upload": {"href": f"{self.server.url}/lfs/{one['oid']}"}}}
                for one in json.loads(body)["objects"]
            ]
            return self._json({"transfer": "basic", "objects": objects})
        if match := re.fullmatch(r"/api/models/(.+/.+)/commit/main", path):
            lines = [json.loads(line) for line in body.splitlines()]
            changed = dict(self.server.repos[match[1]])
            for value in (one["value"] for one in lines if one["key"] == "file"):
                changed[value["path"]] = base64.b64decode(value["content"])
            for value in (one["value"] for one in lines if one["key"] == "lfsFile"):
                changed[value["path"]] = self.server.objects[value["oid"]]
            for value in (one["value"] for one in lines if one["key"] == "deletedFile"):
                del changed[value["path"]]
            self.server.repos[match[1]] = changed
            url = f"{self.server.url}/{match[1]}/commit/{COMMIT}"
            return self._json({"commitUrl": url, "commitOid": COMMIT})
        return self._reply(404)

    def do_PUT(self) -> None:
        oid, body = self.path.rpartition("/")[2], self._body()
        self.server.seen.append("/lfs")
        if hashlib.sha256(body).hexdigest() != oid:
            return self._reply(400, b"another checksum")
        self.server.objects[oid] = body
        return self._reply(200)

    def do_GET(self) -> None:
        match = re.fullmatch(r"/(.+/.+)/resolve/(?:main|c{40})/(.+)", self.path.partition("?")[0])
        files = self.server.repos.get(match[1], {}) if match else {}
        if match is None or match[2] not in files:
            return self._reply(404, X_Error_Code="EntryNotFound")
        contents = files[match[2]]
        etag = f'"{hashlib.sha256(contents).hexdigest()}"'
        return self._reply(200, contents, ETag=etag, X_Repo_Commit=COMMIT)

    do_HEAD = do_GET
