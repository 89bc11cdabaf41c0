"""A shard, and workers that call it directly, for the tests of this folder."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qfleet.agent.updaters.optimisers import make_optimiser
from qfleet.engines.parameter_server.admission import Admission
from qfleet.engines.parameter_server.compression import unpack
from qfleet.engines.parameter_server.server import Server
from qfleet.engines.parameter_server.shard import Shard
from qfleet.engines.parameter_server.wire import Push, Reply, Request

EPS = 1e-8
NAMES = ["adam", "radam", "rmsprop", "sgd"]


def make_shard(
    admission: Admission, weights: Tensor | list[float], optimiser: str = "sgd", workers: int = 0
) -> Shard:
    """A shard with a vector of its own, and workers 0, 1, … present."""
    mine = torch.as_tensor(weights, dtype=torch.float32).clone()
    shard = Shard(mine, make_optimiser(optimiser, mine, EPS), admission)
    for worker in range(workers):
        shard.add_worker(worker)
    return shard


def make_push(
    worker: int,
    sequence: int,
    gradient: Tensor | list[float],
    based_on: int = 0,
    epoch: int = 0,
    rate: float = 1.0,
    loss: float | None = None,
    weight: float = 1.0,
) -> Push:
    vector = torch.as_tensor(gradient, dtype=torch.float32)
    return Push(worker, sequence, epoch, based_on, vector, rate, loss, weight)


def weights_of(shard: Shard) -> Tensor:
    """The weights as a newcomer pulls them."""
    weights = shard.pull().weights
    assert weights is not None
    return unpack(weights)


class DirectLine:
    """A server in this process: ``start`` makes the call."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def start(self, request: Request) -> Any:
        return self._server.handle(request)

    def finish(self, started: Any) -> Any:
        return started


class Client:
    """A worker that pulls when it is told to and numbers its pushes."""

    def __init__(self, shard: Shard, worker: int) -> None:
        self.shard, self.worker = shard, worker
        self.join()

    def join(self) -> None:
        self.sequence = self.shard.add_worker(self.worker).sequence
        self.pull()

    def pull(self) -> Tensor:
        pulled = self.shard.pull()
        assert pulled.weights is not None
        self.stamp, self.weights = pulled.stamp, unpack(pulled.weights)
        return self.weights

    def push(
        self,
        gradient: Tensor | list[float],
        rate: float = 1.0,
        loss: float | None = None,
        weight: float = 1.0,
        now_s: float = 0.0,
    ) -> Reply:
        epoch, version = self.stamp
        push = make_push(self.worker, self.sequence, gradient, version, epoch, rate, loss, weight)
        reply = self.shard.push(push, now_s)
        self.sequence += 1
        return reply


def noise(size: int, *key: int) -> Tensor:
    """A random vector that depends on the key alone."""
    seed = 0
    for part in key:
        seed = seed * 1009 + part
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def assert_states_equal(left: object, right: object) -> None:
    """Nested dicts of tensors and JSON values, bit for bit."""
    if isinstance(left, dict) and isinstance(right, dict):
        assert left.keys() == right.keys()
        for key in left:
            assert_states_equal(left[key], right[key])
    elif isinstance(left, Tensor) and isinstance(right, Tensor):
        assert torch.equal(left, right)
    else:
        assert left == right
