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
from collections.abc import Callable, Iterator, Mapping, MutableSequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import wait
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
        batchers, watched = dict[str, Batcher](), list[Callable[[], Watcher]]()
        for name, (path, runtime) in options.models.items():
            opener = functools.partial(open_model, path, runtime, device, options.trust)
            seen, count = stamp(path), functools.partial(metrics.count, name)
            batcher = batchers[name] = Batcher(
                warm_up(opener()), options.max_batch, options.max_wait_s, options.max_queue,
                options.limits.request_timeout_s, count,
            )  # fmt: skip
            closing.callback(batcher.stop)
            watched.append(functools.partial(
                Watcher, name, path, seen, opener, batcher, options.reload_s
            ))  # fmt: skip
        # Once all models are open: torch.export is not for several threads.
        for watch in watched if options.reload_s else ():
            closing.callback(watch().stop)
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


def http_server(app: PolicyServer, limits: Limits, metrics: Metrics) -> uvicorn.Server:
    """Return uvicorn's server of an application, with our limits on connections."""
    protocol: Any = functools.partial(LimitedProtocol, limits, metrics)
    config = uvicorn.Config(
        app, http=protocol, loop="asyncio", ws="none", lifespan="off", log_config=None,
        log_level="error", access_log=False, proxy_headers=False, server_header=False,
        backlog=BACKLOG, timeout_keep_alive=KEEP_ALIVE_S, timeout_graceful_shutdown=DRAIN_S,
    )  # fmt: skip
    return uvicorn.Server(config)


def _serve_here(
    options: ServeOptions,
    metrics: Metrics,
    listener: socket.socket,
    on_ready: Callable[[], None],
    worker: int = 0,
) -> int:
    """Serve in this process. ``on_ready`` is called once the models are open."""
    received: list[int] = []
    with open_server(options, metrics, worker) as app:
        server = http_server(app, options.limits, metrics)

        def stop(number: int) -> None:
            received.append(number)
            server.should_exit = True

        # Models and libraries live as long as the server: no collection need visit them.
        gc.collect()
        gc.freeze()
        with signals_request_stop(stop):
            on_ready()
            server.run(sockets=[listener])
    return 128 + received[0] if received else 0


def _work(
    number: int,
    options: ServeOptions,
    metrics: Metrics,
    listener: socket.socket,
    is_ready: MutableSequence[int],
) -> None:
    """Run worker ``number``, until a signal or the end of the parent process."""

    def end_with_parent() -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=end_with_parent, daemon=True).start()
    torch.set_num_threads(max(1, torch.get_num_threads() // options.workers))
    on_ready = functools.partial(is_ready.__setitem__, number, 1)
    try:
        sys.exit(_serve_here(options, metrics, listener, on_ready, number))
    except QfleetError as error:
        log(str(error))
        sys.exit(error.exit_code)


def _supervise(options: ServeOptions, metrics: Metrics, listener: socket.socket, url: str) -> int:
    """Start workers, and again those that end, until a signal stops all of them."""
    context = multiprocessing.get_context("spawn")  # threads and GPUs do not survive a fork
    is_ready: Any = context.RawArray("b", options.workers)

    def start(number: int) -> Any:
        worker = context.Process(target=_work, args=(number, options, metrics, listener, is_ready))
        worker.start()
        return worker

    received, workers, is_serving = list[int](), list[Any](), False
    until_s = time.monotonic() + START_S
    try:
        with signals_request_stop(received.append):
            workers += map(start, range(options.workers))
            while not received:
                wait([worker.sentinel for worker in workers], POLL_S)
                if not is_serving and all(is_ready):
                    is_serving = True
                    log(f"serving at {url} with {options.workers} workers")
                if not is_serving and time.monotonic() > until_s:
                    late = [number for number in range(options.workers) if not is_ready[number]]
                    raise QfleetError(f"workers {late} were not ready within {START_S:g} s")
                for number, worker in enumerate(workers):
                    if received or worker.is_alive():
                        continue
                    if not is_serving:  # it would fail again
                        return worker.exitcode or 1
                    log(f"worker {number} ended with exit code {worker.exitcode}; starting another")
                    time.sleep(RESTART_S)
                    workers[number] = start(number)
        return 128 + received[0]
    finally:
        until_s = time.monotonic() + (DRAIN_S + END_S if received else 0.0)
        for worker in workers:
            worker.terminate()
        for worker in workers:
            worker.join(max(0.0, until_s - time.monotonic()))
            worker.kill()
            worker.join()
