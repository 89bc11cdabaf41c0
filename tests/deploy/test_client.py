"""The client of the policy server: answers, retries, errors."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

import qfleet
from qfleet.deploy import client as clients
from qfleet.deploy.bodies import npy_head
from qfleet.deploy.client import PolicyClient, ServerError
from qfleet.deploy.server import Limits
from support.policy_servers import SIGNATURE, FakeModel, application, serving
from support.waiting import PHASE_S, deadline

ONE = np.array([0.5, 1, 0, 0], np.float32)
ACTION = npy_head((), "<i8") + (1).to_bytes(8, "little")


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "_FIRST_PAUSE_S", 0.001)


def reply(status: int, body: bytes = b"{}") -> bytes:
    head = f"HTTP/1.1 {status} x\r\ncontent-length: {len(body)}\r\nx-model-version: v1\r\n\r\n"
    return head.encode() + body


def read_request(connection: socket.socket) -> bool:
    """Read one request; return whether there was one."""
    data = b""
    while b"\r\n\r\n" not in data:
        part = connection.recv(65536)
        if not part:
            return False
        data += part
    head, _, body = data.partition(b"\r\n\r\n")
    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    while len(body) < length:
        body += connection.recv(65536)
    return True


@contextmanager
def scripted(*replies: bytes | None) -> Iterator[PolicyClient]:
    """A client of a server that gives these replies; None closes the connection instead."""
    listener = socket.create_server(("127.0.0.1", 0))
    left = list(replies)

    def serve() -> None:
        while left:
            connection, _ = listener.accept()
            with connection:
                while left and read_request(connection):
                    answer = left.pop(0)
                    if answer is None:
                        break
                    connection.sendall(answer)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    with listener:
        yield PolicyClient(
            f"http://127.0.0.1:{listener.getsockname()[1]}", timeout_s=deadline(PHASE_S)
        )
    assert left == [] or thread.is_alive()


def test_answers_for_one_and_for_many_observations() -> None:
    with application() as (app, metrics, _), serving(app, Limits(), metrics) as port:
        client = qfleet.PolicyClient(f"http://127.0.0.1:{port}")
        assert client.act(ONE) == 0
        assert type(client.act(list(ONE))) is int
        assert client.version == "000000000001"
        np.testing.assert_array_equal(client.act(np.stack([ONE, -ONE])), [0, 1])
        np.testing.assert_array_equal(client.q_values(ONE), [1.5, -1.5])
        assert client.q_values(np.stack([ONE] * 3)).shape == (3, 2)
        client.close()


def test_masks_a_name_and_a_token_are_sent() -> None:
    model = FakeModel(signature=replace(SIGNATURE, takes_masks=True))
    with (
        application(model, token="secret") as (app, metrics, _),
        serving(app, Limits(), metrics) as port,
    ):
        url = f"http://127.0.0.1:{port}/"
        client = PolicyClient(url, token="secret", model="default")
        assert client.act(ONE, action_masks=[0, 1]) == 1
        client.close()
        for wrong, status in ((PolicyClient(url), 401), (PolicyClient(url, "secret", "x"), 404)):
            with pytest.raises(ServerError, match=str(status)):
                wrong.act(ONE)
            wrong.close()


def test_threads_share_a_client() -> None:
    with application() as (app, metrics, _), serving(app, Limits(), metrics) as port:
        client = PolicyClient(f"http://127.0.0.1:{port}")

        def ask(number: int) -> float:
            return float(client.q_values([number, 0, 0, 0])[0])

        with ThreadPoolExecutor(8) as threads:
            assert list(threads.map(ask, range(200))) == list(range(200))


def test_versions_are_those_of_the_thread() -> None:
    with scripted(reply(200, ACTION)) as client:
        client.act(ONE)
        assert client.version == "v1"
        with ThreadPoolExecutor(1) as threads:
            assert threads.submit(lambda: client.version).result() is None


def test_structures_are_sent_as_json_and_answers_are_writable() -> None:
    parts = [[["eye"], "Box", [3]], [["gear"], "Box", []]]
    signature = replace(SIGNATURE, raw_obs=json.dumps(parts), takes_masks=True)
    model = FakeModel(signature=signature)
    with application(model) as (app, metrics, _), serving(app, Limits(), metrics) as port:
        client = PolicyClient(f"http://127.0.0.1:{port}")
        obs = {"eye": np.ones(3, np.float32), "gear": np.float32(0.5)}
        assert client.act(obs) == 0
        assert client.act(obs, action_masks=np.array([False, True])) == 1
        values = client.q_values(obs)
        assert (values.tolist(), values.dtype) == ([3.5, -3.5], np.float32)
        batches = {"eye": np.ones((2, 3)), "gear": np.ones(2)}
        alone = {"eye": np.ones((1, 3)), "gear": np.ones(1)}
        for several, count in ((batches, 2), ([obs, obs, obs], 3), (alone, 1), ([obs], 1)):
            assert np.shape(client.act(several)) == (count,)
        with pytest.raises(ServerError, match="list of observations"):
            client.act([batches])
        client.close()
    with application() as (app, metrics, _), serving(app, Limits(), metrics) as port:
        client = PolicyClient(f"http://127.0.0.1:{port}")
        for found in (client.q_values(ONE), client.act(np.stack([ONE, ONE]))):
            assert isinstance(found, np.ndarray)
            found += 1
        client.close()


@pytest.mark.parametrize(
    "obs", ["text", None, np.array([None, 1]), np.ones(4, complex), {"a": {1, 2}}]
)
def test_what_holds_no_numbers_is_not_sent(obs: object) -> None:
    client = PolicyClient("http://127.0.0.1:9")
    with pytest.raises(qfleet.ConfigError, match="observation"):
        client.act(obs)
    with pytest.raises(qfleet.ConfigError, match="action_masks"):
        client.act(ONE, action_masks=[[1], [1, 2]])


def test_a_refused_request_is_not_sent_again() -> None:
    refusal = reply(422, b'{"error": "observation must be finite"}')
    with scripted(refusal) as client, pytest.raises(ServerError, match=r"422.*finite"):
        client.act(ONE)


@pytest.mark.parametrize(
    "faults", [[reply(503)] * 3, [None] * 2, [reply(503), None, reply(503), None]]
)
def test_overload_and_lost_connections_are_tried_again(faults: list[bytes | None]) -> None:
    with scripted(*faults, reply(200, ACTION)) as client:
        assert client.act(ONE) == 1


def test_retries_end() -> None:
    busy = [reply(503, b'{"error": "busy"}')] * 6
    with scripted(*busy) as client, pytest.raises(ServerError, match="503: busy"):
        client.act(ONE)


def test_a_server_that_is_not_there_is_an_error_with_its_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(ServerError, match=f"127.0.0.1:{port}"):
        PolicyClient(f"http://127.0.0.1:{port}", retries=1).act(ONE)


def test_a_malformed_reply_is_an_error() -> None:
    with scripted(reply(200, b"nonsense")) as client, pytest.raises(ServerError, match="malformed"):
        client.act(ONE)


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://x", "http://"])
def test_a_wrong_url_is_refused(url: str) -> None:
    with pytest.raises(qfleet.ConfigError, match="http://"):
        PolicyClient(url)


def test_the_client_does_not_import_torch() -> None:
    code = "import sys, qfleet; qfleet.PolicyClient; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True, text=True, check=True, timeout=deadline(PHASE_S),
    )  # fmt: skip
    assert done.stdout.strip() == "False"
