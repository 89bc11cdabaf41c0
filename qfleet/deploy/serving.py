"""Processes of a policy server: one that serves, or a parent with workers that share its socket."""

from __future__ import annotations

import contextlib
import functools
import gc
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
import uvicorn

from qfleet.core.errors import ConfigError, QfleetError
from qfleet.core.signals import signals_request_stop
from qfleet.deploy.batching import Batcher
from qfleet.deploy.connections import LimitedProtocol
from qfleet.deploy.metrics import Metrics
from qfleet.deploy.models import open_model
from qfleet.deploy.reloading import Runtime, Watcher, choose_runtime, log, stamp, warm_up
from qfleet.deploy.server import Limits, PolicyServer

BACKLOG = 2048
KEEP_ALIVE_S = 75
"""Seconds after which a connection without a request is closed."""
DRAIN_S = 10
"""Seconds that requests in progress have to finish when the server stops."""
END_S = 5.0
"""Seconds that a worker has to end after that."""
POLL_S = 0.2
START_S = 120.0
"""Seconds that workers have to open their models."""
RESTART_S = 1.0
"""Seconds before a worker that has ended is started again."""


class Source(NamedTuple):
    """A run's folder or a file, and what runs it."""

    path: Path
    runtime: Runtime = "auto"


@dataclass(frozen=True)
class ServeOptions:
    """What to serve, and how; worker processes receive it."""

    models: Mapping[str, Source]
    """By name; the first is the default."""
    host: str = "127.0.0.1"
    port: int = 8000
    token: str | None = None
    devices: tuple[str | None, ...] = (None,)
    """Given to the workers in turn."""
    workers: int = 1
    max_batch: int = 256
    max_wait_s: float = 0.0
    max_queue: int = 4096
    reload_s: float = 2.0
    """Interval of the checks for a new policy; 0: none."""
    limits: Limits = field(default_factory=Limits)
    trust: bool = False

    def with_runtimes(self) -> ServeOptions:
        """Return these options with the faster runtime of each model, the same for all workers."""
        device, trust = self.devices[0], self.trust
        return replace(self, models={
            name: Source(source.path, choose_runtime(source.path, device, trust))
            if source.runtime == "auto" and device in (None, "cpu") else source
            for name, source in self.models.items()
        })  # fmt: skip


@contextlib.contextmanager
def open_server(options: ServeOptions, metrics: Metrics, worker: int = 0) -> Iterator[PolicyServer]:
    """Open the models and yield the application; at the end, stop its threads."""
    device = options.devices[worker % len(options.devices)]
    metrics.begin_worker(worker)
    with contextlib.ExitStack() as closing:
        batchers = {}
        for name, (path, runtime) in options.models.items():
            opener = functools.partial(open_model, path, runtime, device, options.trust)
            seen, count = stamp(path), functools.partial(metrics.count, name)
            batcher = batchers[name] = Batcher(
                warm_up(opener()), options.max_batch, options.max_wait_s, options.max_queue,
                options.limits.request_timeout_s, count,
            )  # fmt: skip
            closing.callback(batcher.stop)
            if options.reload_s:
                watcher = Watcher(name, path, seen, opener, batcher, options.reload_s)
                closing.callback(watcher.stop)
        yield PolicyServer(batchers, options.limits, metrics, options.token)


def serve(options: ServeOptions) -> int:
    """Serve until SIGINT or SIGTERM, then finish what is in progress; return the exit code."""
    with listen(options.host, options.port) as listener:
        options = options.with_runtimes()
        metrics = Metrics(list(options.models), options.workers)
        host, port = listener.getsockname()[:2]
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        if options.workers > 1:
            return _supervise(options, metrics, listener, url)
        return _serve_here(options, metrics, listener, lambda: log(f"serving at {url}"))


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket.

    Workers inherit it, instead of one each with SO_REUSEPORT: a connection that waits to be
    accepted then belongs to no worker, and is not lost when a worker dies.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        # Not create_server: asyncio sets TCP_NODELAY only on sockets with an explicit protocol, and
        # without it every reply, which is two writes, takes 40 ms.
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
        return listener
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None


class HttpServer(uvicorn.Server):
    """uvicorn's server with our limits, which calls ``on_ready`` once it accepts connections."""

    def __init__(
        self, app: PolicyServer, limits: Limits, metrics: Metrics, on_ready: Callable[[], None]
    ) -> None:
        protocol: Any = functools.partial(LimitedProtocol, limits, metrics)
        config = uvicorn.Config(
            app, http=protocol, loop="asyncio", ws="none", lifespan="off", log_config=None,
            log_level="error", access_log=False, proxy_headers=False, server_header=False,
            backlog=BACKLOG, timeout_keep_alive=KEEP_ALIVE_S, timeout_graceful_shutdown=DRAIN_S,
        )  # fmt: skip
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        # Models and libraries live as long as the server: no collection need visit them.
        gc.collect()
        gc.freeze()
        self._on_ready()


def _serve_here(
    options: ServeOptions,
    metrics: Metrics,
    listener: socket.socket,
    on_ready: Callable[[], None],
    worker: int = 0,
) -> int:
    """Serve in this process."""
    received: list[int] = []
    with open_server(options, metrics, worker) as app:
        server = HttpServer(app, options.limits, metrics, on_ready)

        def stop(number: int) -> None:
            received.append(number)
            server.should_exit = True

        with signals_request_stop(stop):
            server.run(sockets=[listener])
    return 128 + received[0] if received else 0


class _Worker:
    """A worker process, as its parent sees it."""

    def __init__(
        self, number: int, options: ServeOptions, metrics: Metrics, listener: socket.socket
    ) -> None:
        context = multiprocessing.get_context("spawn")  # threads and GPUs do not survive a fork
        self._pipe, child_end = context.Pipe()
        self.process = context.Process(
            target=_work, args=(number, options, metrics, listener, child_end)
        )
        self.process.start()
        child_end.close()
        self.is_ready = False

    def poll(self) -> bool:
        """Return whether the process is alive, and note whether it serves."""
        with contextlib.suppress(EOFError):
            self.is_ready = self.is_ready or (self._pipe.poll() and self._pipe.recv())
        return self.process.is_alive()


def _work(
    number: int,
    options: ServeOptions,
    metrics: Metrics,
    listener: socket.socket,
    parent: Connection,
) -> None:
    """Run worker ``number``, until a signal or the end of the parent process."""

    def leave_with_parent() -> None:
        with contextlib.suppress(OSError):
            parent.poll(None)  # the parent sends nothing, so this is its end
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=leave_with_parent, daemon=True).start()
    torch.set_num_threads(max(1, torch.get_num_threads() // options.workers))
    try:
        sys.exit(_serve_here(options, metrics, listener, lambda: parent.send(True), number))
    except QfleetError as error:
        log(str(error))
        sys.exit(error.exit_code)


def _supervise(options: ServeOptions, metrics: Metrics, listener: socket.socket, url: str) -> int:
    """Start workers, and again those that end, until a signal stops all of them."""
    received, workers, is_serving = list[int](), list[_Worker](), False
    try:
        with signals_request_stop(received.append):
            until_s = time.monotonic() + START_S
            workers += [_Worker(i, options, metrics, listener) for i in range(options.workers)]
            while not received:
                wait([worker.process.sentinel for worker in workers], POLL_S)
                alive = [worker.poll() for worker in workers]
                if not is_serving and all(worker.is_ready for worker in workers):
                    is_serving = True
                    log(f"serving at {url} with {options.workers} workers")
                if not is_serving and time.monotonic() > until_s:
                    late = [i for i, worker in enumerate(workers) if not worker.is_ready]
                    raise QfleetError(f"workers {late} were not ready within {START_S:g} s")
                for number in [i for i, is_alive in enumerate(alive) if not is_alive]:
                    code = workers[number].process.exitcode
                    if received or not is_serving:  # it would fail again
                        return 128 + received[0] if received else code or 1
                    log(f"worker {number} ended with exit code {code}; starting another")
                    time.sleep(RESTART_S)
                    workers[number] = _Worker(number, options, metrics, listener)
        return 128 + received[0]
    finally:
        _end(workers, DRAIN_S + END_S if received else 0.0)


def _end(workers: list[_Worker], seconds: float) -> None:
    """Let workers finish their requests; kill those that take longer."""
    for worker in workers:
        worker.process.terminate()
    until_s = time.monotonic() + seconds
    for worker in workers:
        worker.process.join(max(0.0, until_s - time.monotonic()))
        worker.process.kill()
        worker.process.join()
