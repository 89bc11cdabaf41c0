"""Connections of a policy server: uvicorn's protocol with the limits that it lacks.

uvicorn waits for a request for ever, keeps headers of any size, and at its limit of connections
refuses the requests of all of them.
"""

from __future__ import annotations

import asyncio
import json
from http import HTTPStatus
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from qfleet.deploy.metrics import Metrics
from qfleet.deploy.server import RETRY, Limits

MOST_HEADER_BYTES = 2**16


class LimitedProtocol(HttpToolsProtocol):
    """One connection of a client."""

    def __init__(self, limits: Limits, metrics: Metrics, *args: Any, **given: Any) -> None:
        super().__init__(*args, **given)
        self._limits, self._metrics = limits, metrics
        self._timer: asyncio.TimerHandle | None = None
        """Runs while a request is incomplete. One that arrives as a whole needs none."""
        self._write_timer: asyncio.TimerHandle | None = None
        """Runs while the client does not read a reply."""
        self._header_bytes: int | None = None
        """Size of the headers so far, without the first part; None outside of headers."""
        self._is_complete = False
        """Whether the newest request is complete."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # any byte that is not sent pauses writing
        if len(self.connections) > self._limits.max_connections:
            self.app = self._too_many
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        if self._write_timer is not None:
            self._write_timer.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        delay_s = self._limits.request_timeout_s
        self._write_timer = self.loop.call_later(delay_s, self.transport.abort)

    def resume_writing(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        if self._header_bytes is not None:
            self._header_bytes += len(data)
        super().data_received(data)
        if self._header_bytes is not None and self._header_bytes > MOST_HEADER_BYTES:
            self._refuse(431, f"the headers must have at most {MOST_HEADER_BYTES} bytes")
        elif self._timer is None and (not self._is_complete or self.cycle.response_complete):
            # uvicorn has stopped its keep-alive timer, also if nothing but a line break came.
            self._start_timer()

    def on_message_begin(self) -> None:
        self._header_bytes, self._is_complete = 0, False
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._header_bytes = None
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._is_complete = True
        self._stop_timer()
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg)

    def _start_timer(self) -> None:
        self._timer = self.loop.call_later(self._limits.request_timeout_s, self._expire)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        self._timer = None
        if self._header_bytes is None and (self.cycle is None or self._is_complete):
            self.transport.abort()  # nothing was asked
        else:
            self._refuse(408, f"the request took over {self._limits.request_timeout_s:g} s")

    def _refuse(self, status: int, message: str) -> None:
        if self.transport.is_closing():
            return
        is_in_body = self._header_bytes is None and not self._is_complete
        if self.pipeline or (self.cycle is not None and (
            self.cycle.response_started if is_in_body else not self.cycle.response_complete
        )):  # fmt: skip
            # Another reply is in progress: the client would take this one for it.
            self.transport.abort()
            return
        self._metrics.add_reply(status)
        body = json.dumps({"error": message}).encode()
        self.transport.write(
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode()
            + body
        )
        self.transport.close()

    async def _too_many(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._metrics.add_reply(503)
        error = {"error": "too many connections; try again later"}
        reply = JSONResponse(error, 503, {**RETRY, "connection": "close"})
        await reply(scope, receive, send)
