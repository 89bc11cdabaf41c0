"""Routes, formats and refusals of the policy server's application, without a network."""

from __future__ import annotations

import asyncio
import io
import json
import pickle
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from starlette.types import Message, Receive

from qfleet.deploy import server
from qfleet.deploy.batching import Batcher
from qfleet.deploy.metrics import Metrics
from qfleet.deploy.server import Limits, PolicyServer
from support.policy_servers import (
    JSON,
    NPY_HEADERS,
    SIGNATURE,
    FakeModel,
    application,
    ask,
    asked,
    npy_with_header,
)
from support.waiting import PHASE_S, deadline

NPY = {"content-type": "application/x-npy"}
SAFETENSORS = {"content-type": "application/safetensors"}
ONE = [0.5, 1.0, 0.0, 0.0]


def npy(array: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array, **options)
    return file.getvalue()


def body(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def test_one_observation_gets_one_action() -> None:
    with application() as (app, *_):
        reply = asked(app, "/act", body(observation=ONE))
    assert reply.status == 200
    assert reply.json == {"action": 0, "model": "default", "version": "000000000001"}
    assert reply.headers["x-model-version"] == "000000000001"


def test_many_observations_get_actions_and_q_values() -> None:
    with application() as (app, *_):
        many = body(observations=[ONE, [-1, 0, 0, 0]])
        assert asked(app, "/act", many).json["actions"] == [0, 1]
        values = asked(app, "/models/default/q-values", many).json["q_values"]
        one = asked(app, "/q-values", body(observation=ONE)).json["q_values"]
    assert values == [[1.5, -1.5], [-1, 1]]
    assert one == [1.5, -1.5]


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64", ">f4"])
def test_npy_in_npy_out(dtype: str) -> None:
    with application() as (app, *_):
        batch = asked(app, "/q-values", npy(np.ones((3, 4), dtype)), NPY)
        single = asked(app, "/act", npy(np.asfortranarray(np.ones(4, dtype))), NPY)
    assert np.load(io.BytesIO(batch.body)).tolist() == [[4, -4]] * 3
    assert np.load(io.BytesIO(single.body)) == 0
    assert batch.headers["content-type"] == "application/x-npy"


def test_safetensors_in_safetensors_out() -> None:
    with application() as (app, *_):
        tensors = {"observations": np.ones((2, 4), np.float32)}
        reply = asked(app, "/act", safetensors.numpy.save(tensors), SAFETENSORS)
    assert safetensors.numpy.load(reply.body)["actions"].tolist() == [0, 0]


def test_masks_come_with_any_format_that_has_names() -> None:
    masked = replace(SIGNATURE, takes_masks=True)
    with application(FakeModel(signature=masked)) as (app, *_):
        given = {
            "observations": np.ones((2, 4), np.float32),
            "action_masks": np.array([[0, 1]] * 2),
        }
        binary = asked(app, "/act", safetensors.numpy.save(given), SAFETENSORS)
        text = asked(app, "/act", body(observation=ONE, action_masks=[0, 1]))
        without = asked(app, "/act", body(observation=ONE))
        none = asked(app, "/act", body(observation=ONE, action_masks=[0, 0]))
    assert safetensors.numpy.load(binary.body)["actions"].tolist() == [1, 1]
    assert (text.json["action"], without.json["action"]) == (1, 0)
    assert none.status == 422


def test_masks_of_some_requests_only_are_batched() -> None:
    masked = replace(SIGNATURE, takes_masks=True)
    model = FakeModel(signature=masked)

    async def run(app: PolicyServer) -> list[int]:
        bodies = [body(observation=ONE), body(observation=ONE, action_masks=[0, 1])]
        return [
            one.json["action"]
            for one in await asyncio.gather(*(ask(app, "/act", b) for b in bodies))
        ]

    with application(model, max_batch=2, max_wait_s=deadline(PHASE_S)) as (app, *_):
        assert asyncio.run(run(app)) == [0, 1]
    assert model.batches == [2]


@pytest.mark.filterwarnings("ignore:overflow")
def test_a_value_that_json_cannot_write_is_null() -> None:
    with application() as (app, *_):
        huge = body(observation=[3e38, 3e38, 0, 0])  # finite, but not their sum
        reply = asked(app, "/q-values", huge)
    assert reply.status == 200
    assert reply.json["q_values"] == [None, None]


class Canary:
    """Unpickling it would raise."""

    def __reduce__(self) -> Any:
        return (pytest.fail, ("unpickled",))


REFUSED: list[tuple[bytes, dict[str, str], int]] = [
    (b"", JSON, 400),
    (b"{", JSON, 400),
    (b"\xff\xfe\x00", JSON, 400),
    (b"[" * 100_000, JSON, 400),
    (b"[]", JSON, 400),
    (b"3", JSON, 400),
    (b'{"observation": 1' + b"0" * 5000 + b"}", JSON, 400),
    (body(obs=ONE), JSON, 400),
    (body(observation=ONE, observations=[ONE]), JSON, 400),
    (body(observation=ONE, extra=1), JSON, 400),
    (body(observation=ONE[:3]), JSON, 422),
    (body(observation=None), JSON, 422),
    (body(observation="text"), JSON, 422),
    (body(observation=["1", "2", "3", "4"]), JSON, 422),
    (body(observation=[[1], [2, 3], 4, 5]), JSON, 422),
    (body(observation=[1, 2, 3, {"a": 1}]), JSON, 422),
    (body(observation=[1, 2, 3, float("nan")]), JSON, 422),
    (body(observation=[1, 2, 3, float("inf")]), JSON, 422),
    (body(observation=[1, 2, 3, 1e39]), JSON, 422),
    (body(observation=[1, 2, 3, 10**400]), JSON, 422),
    (body(observations=[]), JSON, 422),
    (body(observations=[["x" * 10_000], *[[1]] * 10_000]), JSON, 422),
    (body(observations=[ONE] * 4097), JSON, 422),
    (body(observation=[ONE, ONE]), JSON, 422),
    (body(observation=ONE, action_masks=[1, 0]), JSON, 422),
    (b"", NPY, 400),
    (b"\x93NUMPY", NPY, 400),
    (npy(np.ones(4))[:-1], NPY, 400),
    (npy(np.ones(4)) + b"more", NPY, 400),
    (npy(np.ones(4)).replace(b"(4,)", b"(-4, -1)"), NPY, 400),
    (npy(np.ones(4)).replace(b"(4,), }  ", b"(10**9,)}"), NPY, 400),
    (npy(np.ones(4)).replace(b"(4,), }        ", b"(999999999,), }"), NPY, 400),
    (npy(np.array([Canary()]), allow_pickle=True), NPY, 400),
    (pickle.dumps(np.ones(4)), NPY, 400),
    *((npy_with_header(header), NPY, 400) for header in NPY_HEADERS),
    (npy(np.array(["a"])), NPY, 400),
    (npy(np.zeros(4, [("a", "f4")])), NPY, 400),
    (npy(np.ones((0, 4))), NPY, 422),
    (npy(np.ones((2, 5))), NPY, 422),
    (npy(np.full(4, np.nan)), NPY, 422),
    (npy(np.ones(4, bool)), NPY, 422),
    (npy(np.ones(4, complex)), NPY, 400),
    (b"", SAFETENSORS, 400),
    (b"\xff" * 64, SAFETENSORS, 400),
    (safetensors.numpy.save({"x": np.ones(4)}), SAFETENSORS, 400),
    (safetensors.numpy.save({"observations": np.ones(5)}), SAFETENSORS, 422),
    (body(observation=ONE), {}, 415),
    (body(observation=ONE), {"content-type": "text/plain"}, 415),
    (body(observation=ONE), {"content-type": "application/json\x00"}, 415),
]


@pytest.mark.parametrize(("data", "headers", "status"), REFUSED)
def test_a_wrong_body_is_refused_with_its_reason(
    data: bytes, headers: dict[str, str], status: int
) -> None:
    with application() as (app, metrics, _):
        reply = asked(app, "/act", data, headers)
        assert reply.status == status
        assert isinstance(reply.json["error"], str)
        assert len(reply.body) < 1000
        assert metrics.total("status", status) == 1
        assert asked(app, "/act", body(observation=ONE)).status == 200


def test_a_content_type_may_have_parameters() -> None:
    with application() as (app, *_):
        headers = {"content-type": "Application/JSON; charset=utf-8"}
        assert asked(app, "/act", body(observation=ONE), headers).status == 200


def test_a_body_in_parts_is_read_and_limited() -> None:
    with application(limits=Limits(max_body_bytes=100)) as (app, *_):
        whole = body(observation=ONE)
        parts = [whole[:5], b"", whole[5:]]
        assert asked(app, "/act", parts).status == 200
        assert asked(app, "/act", [b" " * 60] * 5).status == 413
        assert asked(app, "/act", b" " * 101).status == 413
        refused = asked(app, "/act", [b"", b""], {**JSON, "content-length": "101"})
        assert refused.status == 413
        assert "100 bytes" in refused.json["error"]


def test_bodies_that_are_received_at_the_same_time_are_limited() -> None:
    async def run(app: PolicyServer) -> None:
        gone = asyncio.Event()

        def slow_body() -> Receive:
            parts: list[Message] = [{"type": "http.request", "body": b" " * 90, "more_body": True}]

            async def receive() -> Message:
                if parts:
                    return parts.pop()
                await gone.wait()
                return {"type": "http.disconnect"}

            return receive

        async def send(_: Message) -> None:
            pass

        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": "/act", "headers": headers}
        slow = [asyncio.create_task(app(scope, slow_body(), send)) for _ in range(17)]
        await asyncio.sleep(0.05)
        assert (await ask(app, "/act", [b" " * 90, b" "])).status == 503
        assert (await ask(app, "/act", body(observation=ONE))).status == 200
        gone.set()
        await asyncio.gather(*slow)
        assert (await ask(app, "/act", [body(observation=ONE), b" "])).status == 200

    with application(limits=Limits(max_body_bytes=100)) as (app, *_):
        asyncio.run(run(app))


def test_long_json_is_parsed_and_refused_like_short_json() -> None:
    with application() as (app, *_):
        many = asked(app, "/act", body(observations=[ONE] * 4000))
        wrong = asked(app, "/act", body(observations=[ONE[:3]] * 4000))
    assert many.json["actions"] == [0] * 4000
    assert wrong.status == 422


def test_long_json_counts_until_it_is_parsed_and_has_a_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    many = body(observations=[ONE] * 4000)
    counted, gate = list[int](), threading.Event()

    with application(limits=Limits(request_timeout_s=deadline(1.0))) as (app, *_):

        def parse(*_: Any) -> Any:
            counted.append(app._receiving_bytes)
            gate.wait(deadline(PHASE_S))

        monkeypatch.setattr(server, "_parse", parse)

        async def run() -> int:
            status = (await ask(app, "/act", [many[:9], many[9:]])).status
            gate.set()
            return status

        assert asyncio.run(run()) == 503
        assert counted == [len(many)]
        assert app._receiving_bytes == 0


def test_a_probe_needs_no_large_body() -> None:
    with application() as (app, *_):
        assert asked(app, "/healthz", b" " * 2**16).status == 200
        assert asked(app, "/healthz", b" " * (2**16 + 1)).status == 413


def test_a_server_whose_thread_has_ended_is_not_ready() -> None:
    with application() as (app, _, batcher):
        assert asked(app, "/readyz", method="GET").status == 200
        batcher.stop()
        refused = asked(app, "/readyz", method="GET")
    assert refused.status == 503
    assert "default" in refused.json["error"]


@pytest.mark.parametrize(("path", "method"), [("/act", "POST"), ("/readyz", "GET")])
def test_a_fault_of_the_server_is_counted_once(
    path: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with application() as (app, metrics, batcher):
        monkeypatch.delattr(batcher.model, "signature")
        monkeypatch.delattr(batcher.model, "version")
        monkeypatch.delattr(FakeModel, "signature")
        monkeypatch.delattr(FakeModel, "version")
        with pytest.raises(AttributeError):
            asked(app, path, body(observation=ONE), method=method)
        assert metrics.total("status", 500) == 1


def test_one_observation_of_a_structure_is_recognised_by_its_parts() -> None:
    """Its parts are [2] and [2]; the policy sees [4]."""
    parts = [[[0], "Box", [2]], [[1], "Box", [2]]]
    signature = replace(SIGNATURE, raw_obs=json.dumps(parts))
    with application(FakeModel(signature=signature)) as (app, *_):
        single = asked(app, "/act", npy(np.ones((2, 2))), NPY)
        batch = asked(app, "/act", npy(np.ones((2, 3, 2))), NPY)
    assert np.load(io.BytesIO(single.body)).shape == ()
    assert np.load(io.BytesIO(batch.body)).shape == (3,)


@pytest.mark.parametrize(
    ("path", "method", "status"),
    [
        ("/act", "GET", 405),
        ("/nothing", "POST", 404),
        ("/models/other/act", "POST", 404),
        ("/models/../act", "POST", 404),
        ("/models//etc/passwd/act", "POST", 404),
        ("/models/%2e%2e/act", "POST", 404),
        ("/models/default/../../etc/act", "POST", 404),
        ("/metrics", "POST", 405),
        ("/metrics/", "GET", 404),
        ("/act/", "POST", 404),
        ("//act", "POST", 404),
    ],
)
def test_unknown_routes_models_and_methods_are_refused(path: str, method: str, status: int) -> None:
    with application() as (app, metrics, _):
        reply = asked(app, path, body(observation=ONE), method=method)
        assert reply.status == status
        assert "error" in reply.json
        assert metrics.total("status", status) == 1


def test_several_models_by_name() -> None:
    metrics = Metrics(["a", "b"])
    batchers = {name: Batcher(FakeModel(name)) for name in ("a", "b")}
    app = PolicyServer(batchers, Limits(), metrics)
    observation = body(observation=ONE)
    assert asked(app, "/models/a/act", observation).json["version"] == "a"
    assert asked(app, "/models/b/act", observation).json["version"] == "b"
    assert asked(app, "/act", observation).json["model"] == "a"
    assert asked(app, "/readyz", method="GET").json["versions"] == {"a": "a", "b": "b"}


def test_a_token_is_needed_except_for_probes() -> None:
    with application(token="secret") as (app, *_):
        observation = body(observation=ONE)
        for given in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret"}):
            refused = asked(app, "/act", observation, {**JSON, **given})
            assert refused.status == 401
            assert "Authorization" in refused.json["error"]
            assert "secret" not in refused.json["error"]
            assert refused.headers["www-authenticate"] == "Bearer"
            for path in ("/", "/metrics", "/openapi.json", "/nothing"):
                assert asked(app, path, method="GET", headers=given).status == 401
        right = {**JSON, "authorization": "Bearer secret"}
        assert asked(app, "/act", observation, right).status == 200
        assert asked(app, "/healthz", method="GET", headers={}).status == 200
        assert asked(app, "/readyz", method="GET", headers={}).status == 200


def test_metrics_count_replies_observations_and_seconds() -> None:
    with application() as (app, *_):
        for _ in range(3):
            asked(app, "/act", body(observations=[ONE, ONE]))
        asked(app, "/act", b"{")
        text = asked(app, "/metrics", method="GET").body.decode()
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert lines['qfleet_responses_total{status="200"}'] == "3"
    assert lines['qfleet_responses_total{status="400"}'] == "1"
    assert lines['qfleet_observations_total{model="default"}'] == "6"
    assert lines['qfleet_batches_total{model="default"}'] == "3"
    assert lines['qfleet_pending{model="default"}'] == "0"
    assert lines['qfleet_request_seconds_bucket{model="default",le="+Inf"}'] == "3"
    assert lines['qfleet_request_seconds_count{model="default"}'] == "3"
    assert float(lines['qfleet_request_seconds_sum{model="default"}']) > 0


def test_metrics_of_workers_are_summed_and_survive_a_restart() -> None:
    metrics = Metrics(["default"], workers=2)
    metrics.count("default", "observations", 3)
    metrics.count("default", "pending", 5)
    metrics.begin_worker(1)
    metrics.count("default", "observations", 4)
    metrics.count("default", "pending", 2)
    assert metrics.total("observations", "default") == 7
    assert metrics.total("pending", "default") == 7
    metrics.begin_worker(0)  # again
    assert metrics.total("observations", "default") == 7
    assert metrics.total("pending", "default") == 2


def test_openapi_describes_the_observations() -> None:
    with application() as (app, *_):
        document = asked(app, "/openapi.json", method="GET").json
    posted = document["paths"]["/models/default/act"]["post"]
    content = posted["requestBody"]["content"]
    observation = content["application/json"]["schema"]["properties"]["observation"]
    assert observation["items"] == {"type": "number"}
    assert (observation["minItems"], observation["maxItems"]) == (4, 4)
    assert {"application/x-npy", "application/safetensors"} <= content.keys()
    assert {"200", "400", "413", "422", "503"} <= posted["responses"].keys()
    assert "/act" in document["paths"]


def test_the_index_names_the_routes() -> None:
    with application() as (app, *_):
        text = asked(app, "/", method="GET").body.decode()
    assert "/act" in text
    assert "/models/default/q-values" in text
