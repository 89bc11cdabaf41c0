"""Updaters of workers: gradients become weights on servers, or now and then by way of them.

In: the gradient in ``weights.grad``. Out: ``weights.data``, which is what the servers hold now, or
the worker's own on its way there. Wherever the network lives, what travels is on the host.

sync, async, ssp, hybrid  ``RemoteGradients``  every gradient is sent; the servers' optimiser steps
easgd                     ``Elastic``          own steps; every so often worker and centre meet
local-sgd                 ``LocalSteps``       own steps; every so often the way gone is sent
admm                      ``Consensus``        own steps towards agreement, then a new consensus
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from qfleet.accelerator.compiling import Compilable
from qfleet.agent.updaters.local import LocalUpdater
from qfleet.agent.updaters.optimisers import make_optimiser
from qfleet.agent.weights import FlatWeights
from qfleet.config.config import Config
from qfleet.core.types import StateDict
from qfleet.engines.parameter_server.client import Servers
from qfleet.engines.parameter_server.clipping import clip
from qfleet.engines.parameter_server.compression import Cast, Codec, TopK
from qfleet.engines.parameter_server.server import CASTS

Metrics = Mapping[str, Tensor | float]
Loss = Callable[[], Tensor]


def make_codec(config: Config) -> Codec | None:
    """How a shard's gradients are packed."""
    if config.gradient_compression == "top-k":
        return TopK(config.top_k_share)
    if config.gradient_compression == "none":
        return None
    return Cast(CASTS[config.gradient_compression])


class RemoteUpdater(Protocol):
    """An updater that has servers behind it."""

    share: float
    """The samples behind a gradient, relative to other workers'."""
    made: int
    """Updates, those that a lost server cut short included."""

    def join(self, takes_part: bool = True) -> None:
        """Take over the servers' weights, and take part, again where need be.

        Who does not take part yet does so with its first gradient: until then nobody waits for it.
        """
        ...

    def apply(self, learning_rate: float | Tensor, loss: Loss | None = None) -> Metrics: ...

    def compilables(self) -> list[Compilable]: ...

    def state_dict(self) -> StateDict: ...

    def load_state_dict(self, state: StateDict) -> None: ...


def make_remote_updater(config: Config, weights: FlatWeights, servers: Servers) -> RemoteUpdater:
    if config.update not in ("easgd", "local-sgd", "admm"):
        judged = config.outlier_sigmas > 0
        return RemoteGradients(weights, servers, config.max_grad_norm, judged)
    optimiser = make_optimiser(config.optimizer, weights.data, config.optimizer_eps)
    local = LocalUpdater(weights, optimiser, config.max_grad_norm)
    if config.update == "easgd":
        alpha = config.easgd_alpha or 0.9 / config.workers
        return Elastic(weights, servers, local, config.local_steps, alpha)
    if config.update == "local-sgd":
        rate = config.outer_learning_rate
        return LocalSteps(weights, servers, local, config.local_steps, rate)
    return Consensus(weights, servers, local, config.local_steps, config.admm_rho)


class _Base:
    """What all have: the weights on the host, and nothing to compile or to keep."""

    def __init__(self, weights: FlatWeights, servers: Servers) -> None:
        self._weights, self._servers = weights, servers
        self.share, self.made = 1.0, 0

    def compilables(self) -> list[Compilable]:
        return []

    def state_dict(self) -> StateDict:
        return {}

    def load_state_dict(self, state: StateDict) -> None:
        assert not state, "what workers know is on the servers"

    def join(self, takes_part: bool = True) -> None:
        held = self._held()
        if takes_part:
            self._servers.join(held)
        else:
            self._servers.look(held)
        self._put(held)

    def _held(self) -> Tensor:
        """The weights on the host: themselves where they are there."""
        data = self._weights.data
        return data if data.device.type == "cpu" else data.cpu()

    def _put(self, held: Tensor) -> None:
        if held is not self._weights.data:
            self._weights.data.copy_(held)


class RemoteGradients(_Base):
    def __init__(
        self, weights: FlatWeights, servers: Servers, max_grad_norm: float, judged: bool
    ) -> None:
        """``judged``: servers look at losses too."""
        super().__init__(weights, servers)
        self._max_norm, self._judged = max_grad_norm, judged

    def apply(self, learning_rate: float | Tensor, loss: Loss | None = None) -> Metrics:
        self.made += 1
        gradient = self._weights.grad.cpu()
        norm = clip(gradient, self._max_norm)
        known = float(loss()) if self._judged and loss is not None else None
        held = self._held()
        self._servers.push(gradient, float(learning_rate), known, self.share, held)
        self._put(held)
        return {"grad_norm": norm, "skipped": 0.0 if math.isfinite(norm) else 1.0}


class _Periodic(_Base, ABC):
    """Own steps, and every ``period`` of them something with the servers."""

    def __init__(
        self, weights: FlatWeights, servers: Servers, local: LocalUpdater, period: int
    ) -> None:
        super().__init__(weights, servers)
        self._local, self._period = local, period

    def apply(self, learning_rate: float | Tensor, loss: Loss | None = None) -> Metrics:
        del loss
        self._prepare()
        metrics = self._local.apply(learning_rate)
        self.made += 1
        if self.made % self._period == 0:
            self._meet()
        return metrics

    def _prepare(self) -> None:
        """Before an own step."""

    @abstractmethod
    def _meet(self) -> None:
        """After ``period`` of them."""


class Elastic(_Periodic):
    """EASGD (1412.6651): worker and centre move towards each other."""

    def __init__(
        self,
        weights: FlatWeights,
        servers: Servers,
        local: LocalUpdater,
        period: int,
        alpha: float,
    ) -> None:
        super().__init__(weights, servers, local, period)
        self._alpha = alpha

    def _meet(self) -> None:
        held = self._held()
        self._servers.exchange(held, self._alpha)
        self._put(held)


class LocalSteps(_Periodic):
    """Local SGD with an outer step on the servers (DiLoCo, 2311.08105).

    With outer rate 1 and without momentum it is FedAvg (1602.05629): the mean, by ``share``.
    """

    def __init__(
        self, weights: FlatWeights, servers: Servers, local: LocalUpdater, period: int, rate: float
    ) -> None:
        super().__init__(weights, servers, local, period)
        self._rate = rate
        self._start = weights.data.cpu().clone()

    def join(self, takes_part: bool = True) -> None:
        super().join(takes_part)
        self._start = self._weights.data.cpu().clone()

    def _meet(self) -> None:
        way = self._start - self._weights.data.cpu()
        clip(way, 0.0)  # one bad entry makes all of it bad, so that no shard takes its part
        self._servers.push(way, self._rate, None, self.share, self._start)
        self._weights.data.copy_(self._start)


class Consensus(_Periodic):
    """Consensus ADMM (Boyd 2011, section 7.1), its inner problem by steps of the optimiser.

    A worker's own weights x go down f(x) + ρ/2 ‖x − z + u‖². The servers hold z, the workers' mean
    of x + u; u are the prices (scaled duals) of what was still between x and z.
    """

    def __init__(
        self, weights: FlatWeights, servers: Servers, local: LocalUpdater, period: int, rho: float
    ) -> None:
        super().__init__(weights, servers, local, period)
        self._rho = rho
        self._agreed = weights.data.cpu().clone()
        self._prices = torch.zeros_like(self._agreed)

    def join(self, takes_part: bool = True) -> None:
        super().join(takes_part)
        self._agreed = self._weights.data.cpu().clone()
        self._prices.zero_()

    def _prepare(self) -> None:
        data = self._weights.data
        pull = data - self._agreed.to(data.device) + self._prices.to(data.device)
        self._weights.grad.add_(pull, alpha=self._rho)

    def _meet(self) -> None:
        mine = self._weights.data.cpu()
        way = self._agreed - (mine + self._prices)
        clip(way, 0.0)
        self._servers.push(way, 1.0, None, self.share, self._agreed)
        self._prices.add_(mine - self._agreed)
