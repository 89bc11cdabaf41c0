"""Faults 35 and 36: malformed, huge, slow and too many requests over raw sockets."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qfleet.deploy.connections import MOST_HEADER_BYTES
from qfleet.deploy.server import Limits
from support.policy_servers import (
    NPY_HEADERS,
    FakeModel,
    application,
    connect,
    npy_with_header,
    post,
    read_reply,
    saved_policy,
    serving,
)
from support.processes import start_qfleet
from support.waiting import PHASE_S, deadline, finish, wait_until

GOOD = json.dumps({"observation": [0.5, 1.0, 0.0, 0.0]}).encode()


def small(request_timeout_s: float) -> Limits:
    """Return limits that a test can exceed; on a slow machine a client sends with pauses."""
    return Limits(100_000, deadline(request_timeout_s), max_connections=20)


@contextlib.contextmanager
def small_server(limits: Limits | None = None, **options: Any) -> Iterator[int]:
    limits = limits or small(PHASE_S)
    with (
        application(limits=limits, **options) as (app, metrics, _),
        serving(app, limits, metrics) as port,
    ):
        yield port


def request(body: bytes = GOOD, path: str = "/act", **headers: str) -> bytes:
    fields = {"host": "x", "content-type": "application/json", "content-length": str(len(body))}
    fields |= {name.replace("_", "-"): value for name, value in headers.items()}
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items() if value)
    return f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + body


def chunked(*chunks: bytes) -> bytes:
    head = request(b"", content_length="", transfer_encoding="chunked")
    return head + b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks)


def send(port: int, *parts: bytes) -> tuple[int, bytes] | None:
    """Send a request in parts; return the reply, None if the connection was closed without."""
    with connect(port) as connection:
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            for part in parts:
                connection.sendall(part)
        return read_reply(connection)


def status(port: int, *parts: bytes) -> int:
    reply = send(port, *parts)
    assert reply is not None
    if reply[0] != 200:
        assert "error" in json.loads(reply[1])
    return reply[0]


def test_good_requests_whole_in_parts_chunked_and_pipelined() -> None:
    with small_server() as port:
        assert status(port, request()) == 200
        assert status(port, *(bytes([byte]) for byte in request())) == 200
        assert status(port, chunked(GOOD[:7], GOOD[7:], b"")) == 200
        with connect(port) as connection:
            connection.sendall(request() * 5)
            for _ in range(5):
                assert (reply := read_one(connection)) is not None
                assert reply == 200


def read_one(connection: socket.socket) -> int | None:
    """Read exactly one of several replies on a connection; return its status."""
    data = b""
    while b"\r\n\r\n" not in data:
        part = connection.recv(1)
        if not part:
            return None
        data += part
    length = int(data.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    while length:
        length -= len(connection.recv(length))
    return int(data.split()[1])


def test_malformed_http_is_400() -> None:
    with small_server() as port:
        head = b"POST /act HTTP/1.1\r\n"
        for data in (
            b"nonsense\r\n\r\n",
            b"POST /act\r\n\r\n",
            b"\x00\x01\x02\r\n\r\n",
            b"POST /act HTTP/9.9\r\n\r\n",
            b"CONNECT x HTTP/1.1\r\n\r\n",
            head + b"content-length: -1\r\n\r\n",
            head + b"content-length: many\r\n\r\n",
            head + b"content-type: application/json\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        ):
            assert status(port, data) in (400, 405, 415)


def test_a_large_body_is_refused_before_it_is_received() -> None:
    with small_server() as port:
        assert status(port, request(b"", content_length=str(10**12))) == 413
        assert status(port, request(b" " * 200_000)) == 413
        chunk = b" " * 10_000
        assert status(port, chunked(*[chunk] * 50)) == 413
        assert status(port, request()) == 200


def test_large_headers_are_refused() -> None:
    with small_server() as port:
        line = b"x-padding: " + b"a" * 1000 + b"\r\n"
        lines = line * (10 * MOST_HEADER_BYTES // len(line))
        value = b"a" * 10 * MOST_HEADER_BYTES
        assert status(port, b"POST /act HTTP/1.1\r\n", lines) == 431
        assert status(port, b"POST /act HTTP/1.1\r\nx: ", value) == 431
        assert status(port, b"POST /", value) == 431
        assert status(port, request()) == 200


def test_slow_requests_are_408() -> None:
    """The client that waits would wait for ever if the server had no timer."""
    with small_server(small(0.5)) as port:
        whole = request()
        assert status(port, whole[:10]) == 408
        assert status(port, whole[:-5]) == 408
        assert status(port, chunked(GOOD[:5])) == 408
        with connect(port) as connection:  # also on a connection that was used before
            connection.sendall(whole)
            assert read_one(connection) == 200
            connection.sendall(b"\r\n" + whole[:20])
            assert read_one(connection) == 408
        with connect(port) as connection:  # a line break alone asks nothing
            connection.sendall(whole)
            assert read_one(connection) == 200
            connection.sendall(b"\r\n")
            assert connection.recv(1) == b""
        with connect(port) as silent:
            assert silent.recv(1) == b""  # closed without a reply: nothing was asked
        assert status(port, whole) == 200


def test_a_client_that_never_reads_is_disconnected() -> None:
    """The client that sends would wait for ever if the server had no timer."""
    body = json.dumps({"observations": [[0.1, 0, 0, 0]] * 4000}).encode()
    many = request(body, "/q-values") * 1000  # 170 MB of replies
    with small_server(small(0.5)) as port, connect(port) as connection:
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            connection.sendall(many)
        assert status(port, request()) == 200


@pytest.mark.parametrize("rest", [request()[:20], request()[:-5], b"nonsense\r\n\r\n"])
def test_a_refusal_is_not_taken_for_the_reply_to_an_earlier_request(rest: bytes) -> None:
    gate = threading.Event()
    model = FakeModel(wait=lambda: gate.wait(deadline(PHASE_S)))
    with small_server(small(0.5), model=model, timeout_s=deadline(PHASE_S)) as port:
        with connect(port) as connection:
            connection.sendall(request() + rest)
            with contextlib.suppress(ConnectionResetError):
                assert connection.recv(1) == b""
        gate.set()
        assert status(port, request()) == 200


def test_too_many_connections_are_refused_and_others_still_served() -> None:
    with (
        small_server(Limits(max_connections=3, request_timeout_s=60)) as port,
        contextlib.ExitStack() as opened,
    ):
        kept = [opened.enter_context(connect(port)) for _ in range(3)]
        for connection in kept:
            connection.sendall(request())
            assert read_one(connection) == 200
        reply = send(port, request())
        assert reply is not None
        assert reply[0] == 503
        kept[0].sendall(request())
        assert read_one(kept[0]) == 200
        kept[1].close()
        wait_until(lambda: status(port, request()) == 200, "a place was free again")


def test_overload_is_503_with_a_bounded_queue() -> None:
    gate = threading.Event()
    model = FakeModel(wait=lambda: gate.wait(deadline(PHASE_S)))
    limits = Limits(request_timeout_s=deadline(PHASE_S))
    with (
        application(model, limits, max_queue=50, timeout_s=deadline(PHASE_S)) as (
            app,
            metrics,
            batcher,
        ),
        serving(app, limits, metrics) as port,
        ThreadPoolExecutor(200) as clients,
    ):
        asked = [clients.submit(post, port, "/act", GOOD) for _ in range(200)]
        wait_until(lambda: metrics.total("status", 503) == 150, "150 requests were refused")
        assert batcher.pending == 50
        gate.set()
        replies = [one.result() for one in asked]
        assert sorted(reply[0] for reply in replies) == [200] * 50 + [503] * 150
        assert all(reply[1]["retry-after"] == "1" for reply in replies if reply[0] == 503)
        assert post(port, "/act", GOOD)[0] == 200
        assert batcher.pending == 0


def test_requests_in_progress_are_finished_when_the_server_stops() -> None:
    gate = threading.Event()
    model = FakeModel(wait=lambda: gate.wait(deadline(PHASE_S)))
    limits = Limits(request_timeout_s=deadline(PHASE_S))
    with ThreadPoolExecutor(8) as clients:
        with (
            application(model, limits, timeout_s=deadline(PHASE_S)) as (app, metrics, batcher),
            serving(app, limits, metrics) as port,
        ):
            asked = [clients.submit(post, port, "/act", GOOD) for _ in range(8)]
            wait_until(lambda: batcher.pending == 8, "all requests were accepted")
            threading.Timer(0.2, gate.set).start()  # after the server was told to stop
        assert [one.result()[0] for one in asked] == [200] * 8


# --- ten thousand malformed requests ------------------------------------------------------------

OPTIONS = "--runtime torch --max-body-mb 0.2 --reload-s 0 --port 0"
ALLOWED = {200, 400, 404, 405, 408, 413, 415, 422, 431, 503}


def malformed(draw: random.Random) -> tuple[list[bytes], bool]:
    """Return the parts of a request, and whether it is complete, so that a reply must come."""
    kinds = ["application/json", "application/x-npy", "application/safetensors", "text/html", ""]
    kind = draw.choice(kinds)
    noise = draw.randbytes(draw.choice([0, 1, 3, 10, 100, 3000, 60_000]))
    shape = draw.choice([(), (3,), (4,), (5,), (0, 4), (2, 4), (4, 4, 4), (300, 4)])
    values = np.full(shape, draw.choice([0.0, 1e38, np.nan, np.inf, -1e308]))
    texts = [
        json.dumps({draw.choice(["observation", "observations", "x"]): values.tolist()}).encode(),
        json.dumps(draw.choice([None, [], {}, "text", 1e400, [[[]]]])).encode(),
        b"[" * draw.choice([1, 1000, 50_000]),
        b'{"observation": [' + b"9" * draw.choice([10, 5000]) + b"]}",
        b"\x93NUMPY" + bytes([draw.randrange(4), 0]) + noise,
        npy_with_header(draw.choice(NPY_HEADERS)),
        draw.randrange(2**40).to_bytes(8, "little") + noise,
        noise,
    ]
    body = draw.choice(texts)
    path = draw.choice(["/act", "/q-values", "/models/default/act", "/models/../act", "/x", "/%ff"])
    whole = request(body, path, content_type=kind)
    match draw.randrange(8):
        case 0:  # a wrong length: the rest never comes, or is taken as another request
            length = str(max(0, len(body) + draw.choice([-1, 1, 100, 10**9])))
            return [request(body, path, content_type=kind, content_length=length)], False
        case 1:
            cut = draw.randrange(1, len(whole))
            return [whole[:cut]], False
        case 2:
            size = draw.choice([1, 7, 1000])
            pieces = [body[i : i + size] for i in range(0, len(body), size)][:200]
            return [chunked(*[piece for piece in pieces if piece], b"")], True
        case 3:
            return [chunked(body or b"x")[: -draw.randrange(1, 5)]], False
        case 4:  # bytes of the head are changed
            data = bytearray(whole)
            for _ in range(draw.randrange(1, 4)):
                data[draw.randrange(min(len(data), 100))] = draw.randrange(256)
            return [bytes(data)], False
        case _:
            cut = draw.randrange(len(whole))
            return [whole[:cut], whole[cut:]], True


def send_malformed(port: int, seed: int, count: int) -> dict[int | None, int]:
    """Send requests and return how often each status came; wait for those that are complete."""
    draw, found = random.Random(seed), dict[int | None, int]()
    for _ in range(count):
        parts, is_complete = malformed(draw)
        with connect(port) as connection:
            with contextlib.suppress(ConnectionResetError, BrokenPipeError):
                for part in parts:
                    connection.sendall(part)
                # One of a hundred waits until the server gives up; the others close.
                if not is_complete and draw.randrange(100):
                    connection.shutdown(socket.SHUT_WR)
            reply = read_reply(connection) if is_complete or draw.randrange(2) else None
        assert not (is_complete and reply is None), parts
        code = reply[0] if reply else None
        if reply and code != 200:
            assert "error" in json.loads(reply[1])
        found[code] = found.get(code, 0) + 1
    return found


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


@pytest.mark.slow
def test_ten_thousand_malformed_requests(tmp_path: Path) -> None:
    words = f"{OPTIONS} --request-timeout-s {deadline(2.0):.1f}"
    process = start_qfleet("serve", str(saved_policy(tmp_path / "policy")), *words.split())
    assert process.stderr is not None
    try:
        line = process.stderr.readline()
        assert "serving at" in line, line
        port = int(line.rsplit(":", 1)[1])
        found: dict[int | None, int] = {}
        with ThreadPoolExecutor(8) as clients:

            def send_all(seeds: range) -> None:
                for one in clients.map(lambda seed: send_malformed(port, seed, 100), seeds):
                    for code, times in one.items():
                        found[code] = found.get(code, 0) + times

            send_all(range(20))
            before = resident_bytes(process.pid)
            send_all(range(20, 100))
        assert sum(found.values()) == 10_000
        assert found.keys() - {None} <= ALLOWED
        assert {200, 400, 404, 408, 413, 415, 422} <= found.keys()
        assert resident_bytes(process.pid) - before < 20 * 2**20
        assert post(port, "/act", GOOD)[0] == 200
        process.terminate()
        _, errors = finish(process, "the server stopped")
        assert process.returncode == 143
        assert "Traceback" not in errors
    finally:
        process.kill()
