"""Models that a server opens: on the faster runtime, and again whenever their file has changed."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from qfleet.core.errors import ConfigError, QfleetError, one_line
from qfleet.deploy.batching import STOP_S, Batcher
from qfleet.deploy.models import Model, open_model
from qfleet.deploy.signature import Signature

Runtime = Literal["auto", "torch", "onnxruntime"]
MEASURED_BATCHES = (1, 64)
MEASURED_S = 0.2
"""Seconds for which a runtime is measured with each batch."""


_OPENING = threading.Lock()
"""Held while a model is opened: torch.export, which onnxruntime needs, is not thread-safe."""


def log(line: str) -> None:
    """Print a line on standard error, in one write: other workers may print at the same time."""
    sys.stderr.write(f"qfleet: {line}\n")
    sys.stderr.flush()


def example(signature: Signature, count: int) -> NDArray[Any]:
    """Return ``count`` valid observations."""
    shape = (count, *signature.obs_shape)
    return np.full(shape, signature.first_obs_value, signature.obs_dtype)


def choose_runtime(path: Path, device: str | None, trust: bool) -> Runtime:
    """Measure the runtimes that can run this model; return the faster one, and log the times.

    The measure is the product of the times of one observation, which is the latency of a server
    with little to do, and of 64, which is its throughput under load.
    """
    times: dict[Runtime, list[float]] = {}
    refused: QfleetError | None = None
    for runtime in ("torch", "onnxruntime"):
        try:
            model = open_model(path, runtime, device, trust)
        except ConfigError as error:  # not for this file or device, or not installed
            refused = refused or error
            continue
        times[runtime] = [_milliseconds(model, count) for count in MEASURED_BATCHES]
    if not times:
        assert refused is not None
        raise refused
    best = min(times, key=lambda runtime: times[runtime][0] * times[runtime][1])
    if len(times) > 1:
        shown = ", ".join(
            f"{name} {one:.2f} and {many:.2f} ms" for name, (one, many) in times.items()
        )
        log(f"'{path}' runs on {best}; 1 and 64 observations take: {shown}")
    return best


def _milliseconds(model: Model, count: int) -> float:
    """Return the median time of a batch."""
    batch, times = example(model.signature, count), list[float]()
    model(batch)
    until_s = time.perf_counter() + MEASURED_S
    while len(times) < 3 or time.perf_counter() < until_s:
        began_s = time.perf_counter()
        model(batch)
        times.append(time.perf_counter() - began_s)
    return sorted(times)[len(times) // 2] * 1e3


def warm_up(model: Model) -> Model:
    """Return a model that has answered once, with finite values; else raise ConfigError."""
    if not np.isfinite(model(example(model.signature, 1)).q_values).all():
        raise ConfigError("its Q-values are not finite")
    return model


class Watcher:
    """Replaces the model of a batcher, from a thread, whenever its file or run has changed.

    A new model that cannot be opened, or that takes other observations, is logged and left out.
    """

    def __init__(
        self,
        name: str,
        path: Path,
        seen: tuple[int, ...],
        opener: Callable[[], Model],
        batcher: Batcher,
        interval_s: float,
    ) -> None:
        """``seen``: the stamp of ``path`` from before the batcher's model was opened."""
        self._name, self._path, self._seen, self._interval_s = name, path, seen, interval_s
        self._open, self._batcher = opener, batcher
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watcher", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(STOP_S)

    def _watch(self) -> None:
        while not self._stop.wait(self._interval_s):
            now = stamp(self._path)
            if now in (self._seen, ()):  # () if it is gone, or being replaced
                continue
            self._seen = now
            self._reload()

    def _reload(self) -> None:
        old = self._batcher.model
        try:
            with _OPENING:
                new = warm_up(self._open())
            if new.signature != old.signature:
                raise ConfigError("it takes other observations or actions; restart the server")
        except Exception as error:  # any fault of a file must leave the old model serving
            self._batcher.count("reload_failures", 1.0)
            log(f"model '{self._name}' stays at {old.version}: '{self._path}': {one_line(error)}")
            return
        if new.version != old.version:
            self._batcher.model = new
            self._batcher.count("reloads", 1.0)
            log(f"model '{self._name}' is now {new.version} (was {old.version})")


def stamp(path: Path) -> tuple[int, ...]:
    """Return numbers that change when a file, or a policy in a folder, is replaced; () if gone."""
    # Of a run, or of a folder that `qfleet pull` wrote.
    inside = ("best/manifest.json", "checkpoints", "policy.safetensors") if path.is_dir() else ("",)
    for name in inside:
        try:
            status = (path / name).stat()
        except OSError:
            continue
        return status.st_ino, status.st_mtime_ns, status.st_size
    return ()
