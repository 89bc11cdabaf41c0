"""Policy servers for tests: models whose answers tell their version, and servers in a thread."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qfleet.deploy.batching import Batcher
from qfleet.deploy.metrics import Metrics
from qfleet.deploy.models import Answers
from qfleet.deploy.server import Limits, PolicyServer
from qfleet.deploy.serving import ServeOptions, http_server, listen, open_server
from qfleet.deploy.signature import Signature
from support.waiting import PHASE_S, deadline

SIGNATURE = Signature("CartPole-v1", "dqn", (4,), "float32", 2, False, [0, 1])
JSON = {"content-type": "application/json"}
NPY_HEADERS = [
    b"{'descr': '<f4",
    b"(",
    b"[[",
    b"  x\n y",
    b"{'descr': '', }",
    b"",
    b"{" * 200,
    b"\0",
]
"""Headers on which the parser of numpy raises TokenError, IndexError, IndentationError …"""


def npy_with_header(header: bytes) -> bytes:
    return b"\x93NUMPY\1\0" + len(header).to_bytes(2, "little") + header + bytes(16)


@dataclass
class FakeModel:
    """Q-values are the sum of an observation, and that number times -1; it records its batches."""

    version: str = "000000000001"
    signature: Signature = SIGNATURE
    runtime: str = "fake"
    wait: Callable[[], object] = lambda: None
    """Called before every batch is computed."""
    batches: list[int] = field(default_factory=list)

    def __call__(
        self, observations: NDArray[Any], action_masks: NDArray[Any] | None = None
    ) -> Answers:
        self.batches.append(len(observations))
        self.wait()
        total = observations.reshape(len(observations), -1).sum(axis=1, dtype=np.float32)
        values = np.stack([total, -total], axis=1)
        if action_masks is not None:
            values = np.where(action_masks, values, np.float32(-1e30))
        return Answers(values, values.argmax(axis=1))


@dataclass
class Asked:
    """A reply of an application that was called without a server."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


async def ask(
    app: PolicyServer,
    path: str,
    body: bytes | list[bytes] = b"",
    headers: Mapping[str, str] = JSON,
    method: str = "POST",
) -> Asked:
    """Call an application with a request, whose body may come in parts."""
    parts = [body] if isinstance(body, bytes) else list(body)
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        part = parts.pop(0)
        return {"type": "http.request", "body": part, "more_body": bool(parts)}

    async def send(message: Any) -> None:
        sent.append(message)

    pairs = [(key.lower().encode(), value.encode()) for key, value in headers.items()]
    scope = {
        "type": "http", "method": method, "path": path, "raw_path": path.encode(),
        "query_string": b"", "root_path": "", "headers": pairs, "http_version": "1.1",
        "scheme": "http", "server": ("test", 80), "client": ("test", 1),
    }  # fmt: skip
    await app(scope, receive, send)
    given = {key.decode().lower(): value.decode() for key, value in sent[0]["headers"]}
    return Asked(sent[0]["status"], given, b"".join(one.get("body", b"") for one in sent[1:]))


def asked(app: PolicyServer, *args: Any, **options: Any) -> Asked:
    """Call ``ask`` in an event loop of its own."""
    return asyncio.run(ask(app, *args, **options))


@contextlib.contextmanager
def application(
    model: Any = None,
    limits: Limits | None = None,
    token: str | None = None,
    **options: Any,
) -> Iterator[tuple[PolicyServer, Metrics, Batcher]]:
    """An application with one model, ``default``; its metrics and its batcher."""
    metrics = Metrics(["default"])
    batcher = Batcher(
        model or FakeModel(),
        count=lambda kind, amount: metrics.count("default", kind, amount),
        **options,
    )
    yield PolicyServer({"default": batcher}, limits or Limits(), metrics, token), metrics, batcher
    batcher.stop()


@contextlib.contextmanager
def serving(app: PolicyServer, limits: Limits, metrics: Metrics) -> Iterator[int]:
    """Serve an application in a thread; yield the port."""
    listener = listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    server = http_server(app, limits, metrics)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield port
    finally:
        server.should_exit = True
        thread.join(deadline(PHASE_S))
        assert not thread.is_alive()


@contextlib.contextmanager
def served(options: ServeOptions) -> Iterator[int]:
    """Serve models in a thread; yield the port."""
    metrics = Metrics(list(options.models))
    with (
        open_server(options, metrics) as app,
        serving(app, options.limits, metrics) as port,
    ):
        yield port


def post(
    port: int, path: str, body: bytes, headers: Mapping[str, str] = JSON
) -> tuple[int, dict[str, str], bytes]:
    """Send one request on a connection of its own."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=deadline(PHASE_S))
    with contextlib.closing(connection):
        connection.request("POST", path, body, dict(headers))
        response = connection.getresponse()
        given = {key.lower(): value for key, value in response.getheaders()}
        return response.status, given, response.read()


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=deadline(PHASE_S))


def read_reply(connection: socket.socket) -> tuple[int, bytes] | None:
    """Return status and body of a reply that has a Content-Length; None if there is none."""
    data = b""
    while b"\r\n\r\n" not in data:
        try:
            part = connection.recv(65536)
        except ConnectionResetError:
            part = b""
        if not part:
            return None
        data += part
    head, _, body = data.partition(b"\r\n\r\n")
    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    while len(body) < length:
        part = connection.recv(65536)
        if not part:
            return None
        body += part
    return int(head.split()[1]), body


def saved_policy(path: Path, seed: int = 0, **fields: Any) -> Path:
    """Save a policy with the weights of a seed, without training it."""
    import torch

    from qfleet.agent.policy import Policy
    from qfleet.agent.weights import FlatWeights
    from qfleet.core.seeding import Seeds
    from qfleet.core.types import EnvSpec
    from qfleet.networks.factory import make_network
    from support.configs import tiny_config

    config = tiny_config(**{"seed": seed, "compile": "off", **fields})
    spec = EnvSpec("CartPole-v1", (4,), "float32", 2)
    network = make_network(config, spec, torch.device("cpu"), Seeds.of(seed).network)
    weights = FlatWeights(network)
    state = {"weights": weights.data, "buffers": weights.buffers()}
    return Policy(config, spec, state, "cpu").save(path)
