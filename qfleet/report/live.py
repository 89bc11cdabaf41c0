"""A web server on loopback that shows runs while they train.

In: a run or a folder of runs, of which it only reads files. Out: pages, and events with what has
changed since: columns of charts and parts of HTML. There is no request that changes anything.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import secrets
import socket
import sys
import threading
import time
import webbrowser
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlencode

import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from qfleet.core.errors import ConfigError, one_line
from qfleet.core.signals import signals_request_stop
from qfleet.report.charts import chart_columns
from qfleet.report.data import downsample, page_data
from qfleet.report.histories import History
from qfleet.report.page import document, fragments, number, render, table
from qfleet.telemetry.formatting import format_rate
from qfleet.telemetry.runs import EVAL_RETURN, ROLLOUT_RETURN, seed_folders

LOOPBACK = "127.0.0.1"
POLL_S = 0.5
"""Seconds between two looks at the files, per open page."""
ALIVE_S = 15.0
"""Seconds after which a comment is sent, so that a closed connection is noticed."""
END_S = 2
"""Seconds that open pages have to end when the server stops."""
MOST_CONNECTIONS = 64
SPARK_WIDTH, SPARK_HEIGHT = 160, 32
HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",  # the address holds the token
    "X-Content-Type-Options": "nosniff",
}


class View(NamedTuple):
    """What a page shows at a moment."""

    html: dict[str, str]
    """Id of an element → its contents."""
    sources: dict[str, Any]
    """Name of a chart → its columns, as JSON."""
    page: Callable[[str], str]
    """Returns the whole page, given the address of its events."""

    @property
    def shape(self) -> str:
        """What events cannot change: a page of another shape has to be loaded again."""
        charts = [(name, sorted(own), own["label"]) for name, own in self.sources.items()]
        text = json.dumps([sorted(self.html), charts])
        return hashlib.sha256(text.encode()).hexdigest()[:16]


NOTHING = View({}, {}, lambda _: "")
NOT_SEEN = (None, NOTHING)


class Watched:
    """Runs below a folder, or one run, with their histories as far as they were read."""

    def __init__(self, target: Path) -> None:
        self.target = target.absolute()
        self._histories: dict[Path, History] = {}
        self._versions: dict[Path, int] = {}
        self._views: dict[str | None, tuple[Any, View]] = {}
        self._rows: dict[Path, tuple[int, list[str]]] = {}
        """Folder → version of its history, and its row in the list of runs."""
        self._lock = threading.Lock()  # pages are made in threads

    @property
    def is_run(self) -> bool:
        """Whether the folder is a run now; it may become one later."""
        return bool(seed_folders(self.target))

    def folders(self) -> dict[str, list[Path]]:
        """Return name of a run → folders of its seeds; none while the folder does not exist."""
        if seeds := seed_folders(self.target):
            return {self.target.name: seeds}
        if not self.target.is_dir():
            return {}
        # Names that cannot be printed cannot be sent either; qfleet makes none.
        names = sorted(child for child in self.target.iterdir() if child.name.isprintable())
        children = [child for child in names if child.is_dir()]
        found = {child.name: seed_folders(child) for child in children}
        return {name: folders for name, folders in found.items() if folders}

    def view(self, name: str | None, url: str) -> View:
        """Return the page of a run, or of the list of all for None; raises KeyError."""
        with self._lock:
            folders = self.folders()
            wanted = folders if name is None else {name: folders[name]}
            runs = {run: self._refresh(paths) for run, paths in wanted.items()}
            seen = [(h.run.path, self._versions[h.run.path]) for run in runs.values() for h in run]
            if self._views.get(name, NOT_SEEN)[0] != seen:
                if name is None:
                    rows = [self._row(run, h, url) for run, own in runs.items() for h in own]
                    self._views[name] = (seen, _list_view(self.target.name, rows))
                else:
                    self._views[name] = (seen, _run_view(name, runs[name]))
            return self._views[name][1]

    def _row(self, name: str, history: History, url: str) -> list[str]:
        """Return a run's row in the list, made again only if its history has changed."""
        folder, version = history.run.path, self._versions[history.run.path]
        if self._rows.get(folder, (-1, []))[0] != version:
            self._rows[folder] = (version, _list_row(name, history, url))
        return self._rows[folder][1]

    def _refresh(self, folders: Sequence[Path]) -> list[History]:
        found = []
        for folder in folders:
            history = self._histories.setdefault(folder, History(folder))
            try:
                has_changed = history.refresh()
            except ConfigError:
                continue  # one damaged folder must not hide the others
            self._versions[folder] = self._versions.get(folder, 0) + has_changed
            found.append(history)
        return found


def _run_view(name: str, histories: Sequence[History]) -> View:
    # While some seeds have not ended, a mean would show only the steps that all have made.
    data = page_data(histories, by_seed=any(not h.result for h in histories))
    sources = {
        chart: {column: _encode(values) for column, values in own.items()}
        for chart, own in chart_columns(data).items()
    }
    return View(fragments(data), sources, lambda url: render(data, f"{name} · qfleet", url))


def _encode(values: list[Any]) -> Any:
    if not values or not isinstance(values[0], np.ndarray):
        return values
    size = values[0].itemsize
    arrays = [base64.b64encode(own.astype(f"<f{size}").tobytes()).decode() for own in values]
    return {"bits": 8 * size, "arrays": arrays}


def _list_row(name: str, history: History, url: str) -> list[str]:
    """Return the cells of a run, or of one of its seeds, as HTML."""
    row = history.summary()
    total, steps = row["total_env_steps"], number(row["env_steps"], "{:,}".format)
    share = f" ({row['env_steps'] / total:.0%})" if total and row["env_steps"] else ""
    link = f"{url}&{urlencode({'run': name})}"
    return [
        f'<a href="{escape(link)}">{escape(row["name"])}</a>',
        sparkline(history),
        *(escape(str(row[key])) for key in ("env", "algo", "engine")),
        f"{steps}{share}",
        f"<b>{number(row['eval_return_mean'])}</b>",
        number(row["best_eval_return"]),
        number(row["env_steps_per_s"], format_rate),
        escape(row["state"]),
    ]


def _list_view(folder: str, rows: Sequence[Sequence[str]]) -> View:
    heads = ["run", "return", "env", "algorithm", "engine", "env steps", "newest", "best"]
    text = table([*heads, "steps/s", "state"], rows) if rows else "<p>no runs yet</p>"
    content = f'<div id="runs" class="nowrap">{text}</div>'
    return View({"runs": text}, {}, lambda url: document(f"{folder} · qfleet", content, url))


def sparkline(history: History) -> str:
    """Return a small curve of a run's returns; empty before the second one."""
    steps, values = history.series(EVAL_RETURN)
    if steps.size < 2:
        steps, values = history.series(ROLLOUT_RETURN)
    if steps.size < 2:
        return ""
    kept = downsample(steps, values, SPARK_WIDTH // 2)
    x = (steps[kept] - steps[0]) / max(steps[-1] - steps[0], 1) * SPARK_WIDTH
    low, high = values.min(), values.max()
    y = SPARK_HEIGHT - 2 - (values[kept] - low) / max(high - low, 1e-9) * (SPARK_HEIGHT - 4)
    points = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True))
    box = f"0 0 {SPARK_WIDTH} {SPARK_HEIGHT}"
    return f'<svg class="spark" viewBox="{box}"><polyline points="{points}"/></svg>'


class LiveApp:
    """The ASGI application: pages and their events, for requests that have the token."""

    def __init__(self, watched: Watched, token: str) -> None:
        self._watched, self._token = watched, token
        self.is_stopping = False
        routes = [Route("/", self._page), Route("/events", self._events)]
        self._app = Starlette(routes=routes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        given = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        if not secrets.compare_digest(given.encode(), self._token.encode()):
            refused = PlainTextResponse("open the address that qfleet watch has printed", 403)
            await refused(scope, receive, send)
            return
        await self._app(scope, receive, send)

    async def _view(self, request: Request) -> View:
        name = request.query_params.get("run")
        if name is None and self._watched.is_run:
            name = self._watched.target.name
        url = f"/?{urlencode({'token': self._token})}"
        return await run_in_threadpool(self._watched.view, name, url)

    async def _page(self, request: Request) -> Response:
        try:
            view = await self._view(request)
        except (KeyError, OSError):
            return PlainTextResponse("there is no run of this name", 404, HEADERS)
        query = {**request.query_params, "shape": view.shape}
        page = await run_in_threadpool(view.page, f"/events?{urlencode(query)}")
        return HTMLResponse(page, headers=HEADERS)

    async def _events(self, request: Request) -> Response:
        headers = HEADERS | {"X-Accel-Buffering": "no"}
        return StreamingResponse(self._stream(request), 200, headers, "text/event-stream")

    async def _stream(self, request: Request) -> AsyncIterator[str]:
        sent, sent_s, problem = NOTHING, time.monotonic(), ""
        while not self.is_stopping and not await request.is_disconnected():
            try:
                view = await self._view(request)
            except Exception as error:
                # A run that was removed, is about to be made again, or cannot be shown: an error
                # here would make the browser ask again and again.
                view = sent
                if not isinstance(error, (KeyError, OSError)) and one_line(error) != problem:
                    problem = one_line(error)
                    print(f"qfleet: a page cannot be updated: {problem}", file=sys.stderr)
            event: dict[str, Any] = {
                "html": _changed(view.html, sent.html),
                "sources": _changed(view.sources, sent.sources),
            }
            if view is not sent and view.shape != request.query_params.get("shape"):
                event = {"reload": True}
            if any(event.values()):
                sent, sent_s = view, time.monotonic()
                yield f"data: {json.dumps(event)}\n\n"
            elif time.monotonic() - sent_s > ALIVE_S:
                sent_s = time.monotonic()
                yield ": alive\n\n"
            await asyncio.sleep(POLL_S)


def _changed(new: Mapping[str, Any], old: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in new.items() if value != old.get(key)}


class LiveServer(uvicorn.Server):
    """uvicorn's server, which ends the events of open pages when it stops.

    ``opened_url``: opened in the browser once the server answers; empty: none.
    """

    def __init__(self, app: LiveApp, opened_url: str = "") -> None:
        config = uvicorn.Config(
            app, ws="none", lifespan="off", log_config=None, log_level="error", access_log=False,
            proxy_headers=False, server_header=False, limit_concurrency=MOST_CONNECTIONS,
            timeout_graceful_shutdown=END_S,
        )  # fmt: skip
        super().__init__(config)
        self._live, self._opened_url = app, opened_url

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._opened_url:
            # In a thread, because webbrowser waits for some browsers until they end.
            threading.Thread(target=webbrowser.open, args=(self._opened_url,), daemon=True).start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._live.is_stopping = True
        await super().shutdown(sockets)


def watch(target: Path, port: int, opens_browser: bool) -> int:
    """Serve until SIGINT or SIGTERM; return the exit code."""
    token, received = secrets.token_urlsafe(24), list[int]()
    try:
        listener = socket.create_server((LOOPBACK, port))
    except OSError as error:
        raise ConfigError(f"cannot listen on {LOOPBACK}:{port}: {error.strerror}") from None
    with listener:
        url = f"http://{LOOPBACK}:{listener.getsockname()[1]}/?token={token}"
        print(f"qfleet: watching '{target}' at {url} (Ctrl-C ends)", flush=True)
        server = LiveServer(LiveApp(Watched(target), token), url if opens_browser else "")

        def stop(signal_number: int) -> None:
            received.append(signal_number)
            server.should_exit = True

        with signals_request_stop(stop):
            server.run(sockets=[listener])
    return 128 + received[0] if received else 0
