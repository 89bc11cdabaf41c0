"""The policy server on a Ray cluster: the same application, with Ray Serve's replicas."""

from __future__ import annotations

import contextlib
import functools
import signal
import threading
from typing import Any

from qfleet.core.errors import ConfigError
from qfleet.core.signals import signals_request_stop
from qfleet.deploy.metrics import Metrics
from qfleet.deploy.reloading import log
from qfleet.deploy.server import PolicyServer
from qfleet.deploy.serving import ServeOptions, open_server


def build_app(options: ServeOptions) -> PolicyServer:
    """Return the application of a replica; its models are open as long as its process lives."""
    opened = contextlib.ExitStack()
    return opened.enter_context(open_server(options, Metrics(list(options.models))))


def serve_on_ray(options: ServeOptions) -> int:
    """Deploy on the cluster of ``RAY_ADDRESS``, or a new one, until SIGINT or SIGTERM."""
    try:
        from ray import serve
    except ImportError:
        raise ConfigError("--on ray needs Ray Serve: pip install 'ray[serve]'") from None
    app: Any = serve.ingress(functools.partial(build_app, options.with_runtimes()))
    deployment: Any = serve.deployment(
        name="policy",
        num_replicas=options.workers,
        max_ongoing_requests=options.limits.max_connections,
        ray_actor_options={"num_gpus": 1 if options.devices[0] not in (None, "cpu") else 0},
    )
    stopped, received = threading.Event(), list[int]()

    def stop(number: int) -> None:
        received.append(number)
        stopped.set()

    serve.start(http_options={"host": options.host, "port": options.port})
    try:
        with signals_request_stop(stop):
            serve.run(deployment(app(type("Policy", (), {}))).bind(), name="qfleet")
            log(f"serving at http://{options.host}:{options.port} on Ray")
            while not stopped.wait(1.0):
                pass
    finally:
        serve.shutdown()
    return 128 + (received[0] if received else signal.SIGTERM)
