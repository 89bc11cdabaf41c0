"""An S3 server on loopback (moto) behind a door that answers with faults where a test says so."""

from __future__ import annotations

import contextlib
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from support.waiting import PHASE_S, deadline

BUCKET = "bucket"
CODES = {403: "AccessDenied", 500: "InternalError", 503: "SlowDown"}


class FaultyS3:
    """moto's application. ``fault`` gives the status of a request; 0 lets it through."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self.fault: Callable[[str, str], int] = lambda *_: 0
        self.delay_s = 0.0
        self.seen: list[tuple[str, str]] = []
        """Method and path of every request."""
        self.url = ""

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        self.seen.append((method, path))
        time.sleep(self.delay_s)
        status = self.fault(method, path)
        if not status:
            return self._app(environ, start_response)  # type: ignore[no-any-return]
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        error = f"<Error><Code>{CODES[status]}</Code><Message>injected</Message></Error>".encode()
        headers = [("Content-Type", "application/xml"), ("Content-Length", str(len(error)))]
        start_response(f"{status} injected", headers)
        return [] if method == "HEAD" else [error]

    def puts(self, part: str) -> list[str]:
        """Return the paths, with ``part`` in them, to which something was written."""
        return [path for method, path in self.seen if method == "PUT" and part in path]

    def environment(self) -> dict[str, str]:
        """Return the environment variables by which clients find the server."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
        }


@contextlib.contextmanager
def s3_server() -> Iterator[FaultyS3]:
    """Serve an empty bucket; skip the test where s3fs or moto is not installed."""
    pytest.importorskip("s3fs")
    moto = pytest.importorskip("moto.moto_server.werkzeug_app")
    serving = pytest.importorskip("werkzeug.serving")

    class QuietHandler(moto.MotoRequestHandler):  # type: ignore[name-defined,misc]
        def log(self, *arguments: Any) -> None:
            pass

    app = FaultyS3(moto.DomainDispatcherApplication(moto.create_backend_app))
    server = serving.make_server("127.0.0.1", 0, app, threaded=True, request_handler=QuietHandler)
    app.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        _send("POST", f"{app.url}/moto-api/reset")  # what an earlier server of this process held
        _send("PUT", f"{app.url}/{BUCKET}")
        yield app
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


def _send(method: str, url: str) -> None:
    request = urllib.request.Request(url, method=method)
    urllib.request.urlopen(request, timeout=deadline(PHASE_S)).close()
