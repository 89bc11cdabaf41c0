"""The policy server as an ASGI application. In: HTTP requests; out: actions and Q-values.

Requests for actions and Q-values bypass Starlette's router and its Request, which take a sixth of
the time of a request that does nothing. All other routes are Starlette's.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from qfleet.core.errors import ConfigError
from qfleet.deploy.batching import Batcher, Overloaded
from qfleet.deploy.bodies import JSON, TYPES, decode, encode
from qfleet.deploy.metrics import Metrics
from qfleet.deploy.openapi import describe
from qfleet.deploy.signature import Signature, check_action_masks, check_observations

FIELDS = {"act": "actions", "q-values": "q_values"}
"""Last part of a route → the field of a model's answers that it returns."""
PUBLIC_ROUTES = ("/healthz", "/readyz")
"""Routes that need no token: probes have none."""
RETRY = {"Retry-After": "1"}
LINGER_S = 1.0
"""Seconds for which the rest of a refused body is read. Closing the connection while the client
still sends would reset it, and the client might not see the reply."""
SLOW_JSON_BYTES = 2**16
"""Longer JSON is parsed and written in a thread: other requests must not wait for it."""
JSON_BYTES_PER_NUMBER = 16
MOST_PROBE_BYTES = 2**16
"""Size of the body of a probe, which needs no token."""
MOST_BODIES = 16
"""Bodies of full size that may be received at the same time."""


@dataclass(frozen=True)
class Limits:
    """Limits on requests, of each worker process."""

    max_body_bytes: int = 16 * 2**20
    request_timeout_s: float = 10.0
    """For a request to arrive, and again for its answer."""
    max_connections: int = 1024


class PolicyServer:
    """Answers requests with the models of some batchers, by name; the first is the default."""

    def __init__(
        self,
        batchers: Mapping[str, Batcher],
        limits: Limits,
        metrics: Metrics,
        token: str | None = None,
    ) -> None:
        self._batchers, self._limits, self._metrics = batchers, limits, metrics
        self._token = None if token is None else f"Bearer {token}".encode()
        self._receiving_bytes = 0
        default = next(iter(batchers))
        prefixes = {"": default, **{f"/models/{name}": name for name in batchers}}
        self._answers = {
            f"{prefix}/{route}": (name, field)
            for prefix, name in prefixes.items()
            for route, field in FIELDS.items()
        }
        routes = {
            "/": self._index, "/readyz": self._ready, "/metrics": self._render_metrics,
            "/openapi.json": self._openapi,
        }  # fmt: skip
        self._starlette = Starlette(
            routes=[Route(path, endpoint) for path, endpoint in routes.items()],
            exception_handlers={HTTPException: _show_error},
        )
        self._starlette.router.redirect_slashes = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._starlette(scope, receive, send)
            return
        began_s, path, body = time.perf_counter(), scope["path"], _Body(receive)
        began = list[int]()
        """The status of the reply, once its sending has begun."""
        headers, send = dict(scope["headers"]), self._counted(send, began)
        try:
            self._check_token(path, headers)
            if path == "/healthz":
                await self._read(headers, body, min(MOST_PROBE_BYTES, self._limits.max_body_bytes))
                await _send(send, 200, b'{"status": "ok"}')
            elif path not in self._answers:
                await self._starlette(scope, receive, send)
            elif scope["method"] != "POST":
                raise HTTPException(405, f"{path} takes POST", {"Allow": "POST"})
            else:
                name, field = self._answers[path]
                media_type = _media_type(headers.get(b"content-type", b""))
                data, version = await self._answer(name, field, media_type, headers, body)
                extra = ((b"x-model-version", version.encode()),)
                await _send(send, 200, data, media_type.encode(), extra)
                self._metrics.add_time(name, time.perf_counter() - began_s)
        except _Disconnected:
            pass
        except MemoryError:
            self._release(body)
            await _refuse(send, HTTPException(503, "no memory for this request", RETRY), body)
        except HTTPException as error:
            self._release(body)  # it waits for a client that still sends
            await _refuse(send, error, body)
        except Exception:
            if not began:  # Starlette sends its own
                await _refuse(send, HTTPException(500, "the server has failed"), body)
            raise
        finally:
            self._release(body)

    def _counted(self, send: Send, began: list[int]) -> Send:
        async def count(message: Any) -> None:
            if message["type"] == "http.response.start":
                began.append(message["status"])
                self._metrics.add_reply(message["status"])
            await send(message)

        return count

    def _check_token(self, path: str, headers: Mapping[bytes, bytes]) -> None:
        if self._token is None or path in PUBLIC_ROUTES:
            return
        if not hmac.compare_digest(headers.get(b"authorization", b""), self._token):
            message = "the header Authorization must be 'Bearer TOKEN'"
            raise HTTPException(401, message, {"WWW-Authenticate": "Bearer"})

    async def _answer(
        self,
        name: str,
        field: str,
        media_type: str,
        headers: Mapping[bytes, bytes],
        body: _Body,
    ) -> tuple[bytes, str]:
        """Return the body of a reply and the version of the model that computed it."""
        batcher = self._batchers[name]
        signature = batcher.model.signature
        data = await self._read(headers, body, self._limits.max_body_bytes)
        if media_type == JSON and len(data) > SLOW_JSON_BYTES:
            try:
                async with asyncio.timeout(self._limits.request_timeout_s):
                    parsed = await asyncio.to_thread(_parse, signature, media_type, data)
            except TimeoutError:
                raise HTTPException(503, "the body was not parsed in time", RETRY) from None
        else:
            parsed = _parse(signature, media_type, data)
        self._release(body)
        observations, masks, is_single = parsed
        try:
            reply = await batcher.submit(observations, masks)
        except Overloaded as error:
            raise HTTPException(503, str(error), RETRY) from None
        except ConfigError as error:
            raise HTTPException(422, str(error)) from None
        values = getattr(reply.batch, field)[reply.rows]
        given = (media_type, field, values, is_single, name, reply.version)
        if media_type == JSON and values.size * JSON_BYTES_PER_NUMBER > SLOW_JSON_BYTES:
            return await asyncio.to_thread(encode, *given), reply.version
        return encode(*given), reply.version

    def _release(self, body: _Body) -> None:
        self._receiving_bytes -= body.counted_bytes
        body.counted_bytes = 0

    async def _read(self, headers: Mapping[bytes, bytes], body: _Body, most_bytes: int) -> bytes:
        """Return the body of a request, counted until ``_release``; raise 413 if it is too large.

        A body that arrives as a whole is small and not counted.
        """
        if int(headers.get(b"content-length", 0)) > most_bytes:
            raise HTTPException(413, f"the body must have at most {most_bytes} bytes")
        chunks = [await body.receive()]
        if body.is_complete and len(chunks[0]) <= most_bytes:
            return chunks[0]
        while True:
            body.counted_bytes += len(chunks[-1])
            self._receiving_bytes += len(chunks[-1])
            if body.counted_bytes > most_bytes:
                raise HTTPException(413, f"the body must have at most {most_bytes} bytes")
            if self._receiving_bytes > MOST_BODIES * self._limits.max_body_bytes:
                raise HTTPException(503, "too many large bodies at the same time", RETRY)
            if body.is_complete:
                return b"".join(chunks)
            chunks.append(await body.receive())

    async def _index(self, _: Request) -> Response:
        lines = ["qfleet policy server: POST observations to", *self._answers]
        return PlainTextResponse("\n".join([*lines, "Description: /openapi.json", ""]))

    async def _ready(self, _: Request) -> Response:
        ended = [name for name, batcher in self._batchers.items() if not batcher.is_alive]
        if ended:
            return JSONResponse({"error": f"the threads of models {ended} have ended"}, 503)
        versions = {name: batcher.model.version for name, batcher in self._batchers.items()}
        return JSONResponse({"status": "ready", "versions": versions})

    async def _render_metrics(self, _: Request) -> Response:
        return PlainTextResponse(self._metrics.render(), media_type="text/plain; version=0.0.4")

    async def _openapi(self, _: Request) -> Response:
        signatures = {name: batcher.model.signature for name, batcher in self._batchers.items()}
        return JSONResponse(describe(signatures, next(iter(signatures))))


@functools.lru_cache(maxsize=64)
def _media_type(header: bytes) -> str:
    given = header.decode("latin-1").partition(";")[0].strip().lower()
    if given not in TYPES:
        raise HTTPException(415, f"Content-Type must be one of {', '.join(TYPES)}")
    return given


def _parse(
    signature: Signature, media_type: str, body: bytes
) -> tuple[NDArray[Any], NDArray[Any] | None, bool]:
    """Return observations, masks, and whether it is one observation without a batch axis.

    Raise 400 for a malformed body and 422 for values of another kind.
    """
    try:
        given = decode(media_type, body)
    except ConfigError as error:
        raise HTTPException(400, str(error)) from None
    try:
        if signature.raw_obs and not given.is_single and isinstance(given.observations, list):
            observations, is_single = _stack(signature, given.observations), False
        else:
            observations, is_single = check_observations(signature, given.observations)
        masks = None
        if signature.takes_masks or given.action_masks is not None:
            masks = check_action_masks(signature, given.action_masks, len(observations))
            if masks is None:  # a batch has masks for all its requests, or for none
                masks = np.ones((len(observations), signature.num_actions), np.bool_)
    except ConfigError as error:
        raise HTTPException(422, str(error)) from None
    if given.is_single is not None and not signature.raw_obs:
        is_single = given.is_single
    if is_single and len(observations) > 1:
        raise HTTPException(422, '"observation" holds several; call it "observations"')
    return observations, masks, is_single


def _stack(signature: Signature, several: list[Any]) -> NDArray[Any]:
    """Return a batch of observations that are structures (Dict, Tuple …)."""
    each = [check_observations(signature, one) for one in several]
    if not each or not all(is_single for _, is_single in each):
        raise ConfigError("observations must be a list of observations, at least one")
    return np.concatenate([one for one, _ in each])


class _Disconnected(Exception):
    """The client has closed the connection."""


class _Body:
    """The body of a request, as it arrives."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self.is_complete = False
        self.counted_bytes = 0

    async def receive(self) -> bytes:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise _Disconnected
        self.is_complete = not message.get("more_body", False)
        chunk: bytes = message.get("body", b"")
        return chunk


def _show_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": error.detail}, error.status_code, error.headers)


async def _refuse(send: Send, error: HTTPException, body: _Body) -> None:
    """Send an error; close the connection if the body has not been read."""
    data = json.dumps({"error": error.detail}).encode()
    extra = [(key.encode(), value.encode()) for key, value in (error.headers or {}).items()]
    if body.is_complete:
        await _send(send, error.status_code, data, extra=extra)
        return
    extra.append((b"connection", b"close"))
    await _send(send, error.status_code, data, extra=extra, is_last=False)
    with contextlib.suppress(TimeoutError, _Disconnected):
        async with asyncio.timeout(LINGER_S):
            while not body.is_complete:
                await body.receive()
    await send({"type": "http.response.body"})


async def _send(
    send: Send,
    status: int,
    data: bytes,
    media_type: bytes = b"application/json",
    extra: Any = (),
    is_last: bool = True,
) -> None:
    length = str(len(data)).encode()
    headers = [(b"content-type", media_type), (b"content-length", length), *extra]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": data, "more_body": not is_last})
