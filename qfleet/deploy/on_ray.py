"""The policy server on a Ray cluster: the same application in the replicas of Ray Serve."""

from __future__ import annotations

import contextlib
import os
import threading
from dataclasses import replace
from typing import Any

from starlette.applications import Starlette
from starlette.routing import Mount

from qfleet.core.errors import ConfigError
from qfleet.core.signals import signals_request_stop
from qfleet.deploy.metrics import Metrics
from qfleet.deploy.reloading import log
from qfleet.deploy.serving import ServeOptions, open_server
from qfleet.engines.cluster.ray_cluster import open_cluster


def serve_on_ray(options: ServeOptions) -> int:
    """Deploy on the cluster at ``RAY_ADDRESS``, or on a new one, until SIGINT or SIGTERM."""
    if len(options.devices) > 1 or options.port == 0:
        raise ConfigError("--on ray takes one --device, which each replica has, and no --port 0")
    options, received, stopped = options.with_runtimes(), list[int](), threading.Event()
    address, has_gpu = os.environ.get("RAY_ADDRESS"), (options.devices[0] or "cpu") != "cpu"
    if address is not None and options.token is None:
        raise ConfigError(
            "Ray Serve may listen for other machines already on the cluster of RAY_ADDRESS: set a "
            "token (--token or QFLEET_TOKEN)"
        )
    if has_gpu:
        options = replace(options, devices=("cuda",))  # a replica sees only the GPU that it has

    def build_app() -> Starlette:
        opened = contextlib.ExitStack()
        server = opened.enter_context(open_server(options, Metrics([*options.models])))
        app = Starlette(routes=[Mount("", server)])  # Ray Serve adds handlers, to Starlette's only
        app.state.opened = opened  # once it is garbage, the models' threads stop
        return app

    def stop(number: int) -> None:
        received.append(number)
        stopped.set()

    with open_cluster(options.workers, address):
        try:
            from ray import serve
        except ImportError as error:
            raise ConfigError(
                f"--on ray needs {error.name}: pip install 'ray[serve]' 'qfleet[serve]'"
            ) from None
        deployment: Any = serve.deployment(
            serve.ingress(build_app)(),
            name="policy",
            num_replicas=options.workers,
            max_ongoing_requests=options.limits.max_connections,
            ray_actor_options={"num_gpus": int(has_gpu)},
        )
        try:
            with signals_request_stop(stop):
                serve.start(http_options={"host": options.host, "port": options.port})
                serve.run(deployment.bind(), name="qfleet")
                log(f"serving at http://{options.host}:{options.port} on Ray")
                stopped.wait()
        finally:
            if address is None:
                serve.shutdown()
            else:  # others may serve on this cluster
                serve.delete("qfleet")
    return 128 + received[0]
