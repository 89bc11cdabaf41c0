"""``qfleet serve``: answer requests for actions over HTTP."""

from __future__ import annotations

import ipaddress
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import tyro

from qfleet.cli.parsing import parse
from qfleet.core.errors import ConfigError, require

if TYPE_CHECKING:
    from qfleet.deploy.serving import Source

HELP = "answer requests for actions over HTTP"

DESCRIPTION = """Serve policies over HTTP: POST observations to /act or /q-values, as JSON, npy or
safetensors. Requests that arrive together are computed as one batch. A new best policy of a run,
or a new file, is taken over while serving.

Examples:
  qfleet serve runs/NAME
  qfleet serve pong=runs/PONG small=model.onnx --workers 2
  QFLEET_TOKEN=SECRET qfleet serve runs/NAME --host 0.0.0.0
"""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True)
class ServeArguments:
    models: tyro.conf.Positional[tuple[str, ...]]
    """Runs (name or folder), saved policies or exported .onnx files, or NAME=PATH to serve at
    /models/NAME/act; the first is also served at /act."""
    name: str = "default"
    """Name of a model that is given without one."""
    host: str = "127.0.0.1"
    """Address to listen on; another than loopback needs a token."""
    port: int = 8000
    """Port to listen on; 0: any free one."""
    token: str | None = None
    """Token that clients must send (Authorization: Bearer TOKEN); default: $QFLEET_TOKEN."""
    runtime: Literal["auto", "torch", "onnxruntime"] = "auto"
    """What runs the network; auto: the faster one, measured at the start."""
    device: str | None = None
    """Device to use instead of the run's own; cuda:0,cuda:1 gives workers a device each."""
    workers: int | None = None
    """Processes that serve; default: one per device."""
    max_batch: int = 256
    """Most observations that are computed together."""
    max_wait_ms: float = 0.0
    """How long a request waits for others; 0: batches are what has arrived meanwhile."""
    max_queue: int = 4096
    """Most observations that wait, per worker; further requests are refused with 503."""
    max_body_mb: float = 16.0
    """Most megabytes of a request."""
    max_connections: int = 1024
    """Most connections per worker."""
    request_timeout_s: float = 10.0
    """Seconds for the headers of a request, and again for its body and the answer."""
    reload_s: float = 2.0
    """Seconds between checks for a new policy; 0: never."""
    on: Literal["here", "ray"] = "here"
    """ray: deploy with Ray Serve, with --workers replicas."""
    trust: bool = False
    """Import the code (module:Class) that a run's configuration names."""


def run(argv: list[str]) -> int:
    arguments = parse(ServeArguments, argv, "serve", DESCRIPTION)
    token = arguments.token if arguments.token is not None else os.environ.get("QFLEET_TOKEN")
    _check(arguments, token)
    # Before torch is imported, which reads it. Its waiting threads would spin on the cores that
    # receive requests: on two cores, a small network answered half as many.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        import starlette  # noqa: F401
        import uvicorn.protocols.http.httptools_impl  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"serving needs {error.name}: pip install 'qfleet[serve]'") from None
    from qfleet.deploy.server import Limits
    from qfleet.deploy.serving import ServeOptions, serve

    devices = tuple(arguments.device.split(",")) if arguments.device else (None,)
    limits = Limits(
        int(arguments.max_body_mb * 1e6), arguments.request_timeout_s, arguments.max_connections
    )
    options = ServeOptions(
        _sources(arguments), arguments.host, arguments.port, token, devices,
        arguments.workers or len(devices), arguments.max_batch, arguments.max_wait_ms / 1e3,
        arguments.max_queue, arguments.reload_s, limits, arguments.trust,
    )  # fmt: skip
    if arguments.on == "ray":
        from qfleet.deploy.on_ray import serve_on_ray

        return serve_on_ray(options)
    return serve(options)


def _check(arguments: ServeArguments, token: str | None) -> None:
    for name in ("max_batch", "max_queue", "max_connections", "workers"):
        value = getattr(arguments, name)
        require(value is None or value >= 1, f"--{name.replace('_', '-')}", value, "at least 1")
    for name in ("max_body_mb", "request_timeout_s"):
        value = getattr(arguments, name)
        require(0 < value < 1e6, f"--{name.replace('_', '-')}", value, "above 0")
    for name in ("max_wait_ms", "reload_s"):
        value = getattr(arguments, name)
        require(0 <= value < 1e6, f"--{name.replace('_', '-')}", value, "at least 0")
    require(0 <= arguments.port < 65536, "--port", arguments.port, "in 0 … 65535")
    if token is not None and not re.fullmatch(r"[!-~]+", token):
        raise ConfigError("the token must be printable ASCII without spaces, and not empty")
    if token is None and not _is_loopback(arguments.host):
        raise ConfigError(
            f"--host {arguments.host} lets other machines in: set a token (--token or "
            "QFLEET_TOKEN), or use 127.0.0.1"
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _sources(arguments: ServeArguments) -> dict[str, Source]:
    """Return what to serve, by name."""
    from qfleet.deploy.serving import Source
    from qfleet.training.api import RUNS
    from qfleet.training.run_folders import find_run

    found: dict[str, Source] = {}
    for word in arguments.models:
        name, equals, text = word.partition("=")
        if not equals or Path(word).exists():
            name, text = arguments.name, word
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"model name {name!r} must be letters, digits, '.', '_' or '-', without a path"
            )
        if name in found:
            raise ConfigError(f"two models are named '{name}'; give them as NAME=PATH")
        is_file = Path(text).suffix in (".onnx", ".pt2", ".safetensors")
        path = Path(text) if is_file else find_run(text, RUNS, "best")
        found[name] = Source(path.absolute(), arguments.runtime)
    if not found:
        raise ConfigError("give a run or a file to serve, e.g. qfleet serve runs/NAME")
    return found
