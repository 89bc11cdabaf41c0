"""Updaters of workers: every gradient, or the result of some local steps, goes to the servers.

In: the gradient in ``weights.grad``. Out: ``weights.data``, which are the servers' weights, or the
worker's own between two meetings. Vectors travel from and to the host, on any device.

sync, async, ssp, hybrid  ``RemoteGradients``  every gradient is sent; the servers' optimiser steps
easgd                     ``Elastic``          local steps, then worker and centre are averaged
local-sgd                 ``LocalSteps``       local steps, then their sum is sent
admm                      ``Consensus``        local steps towards the consensus, then a new one
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from qfleet.accelerator.compiling import Compilable
from qfleet.agent.updaters.local import LocalUpdater
from qfleet.agent.updaters.optimisers import make_optimiser
from qfleet.agent.weights import FlatWeights
from qfleet.config.config import Config
from qfleet.core.types import Clock, StateDict, Updater
from qfleet.engines.parameter_server.client import Servers, ServersLost
from qfleet.engines.parameter_server.clipping import clip

Metrics = Mapping[str, Tensor | float]
Loss = Callable[[], Tensor]


class RemoteUpdater(Updater):
    """Base of the updaters with servers behind them."""

    def __init__(self, config: Config, weights: FlatWeights, servers: Servers) -> None:
        self._config, self._weights, self._servers = config, weights, servers
        self.share = 1.0
        """The samples behind a gradient, relative to other workers'."""
        self.made = 0
        """Updates, including those that a lost server interrupted."""

    def join(self, takes_part: bool = True) -> None:
        """Copy the servers' weights and take part, again where necessary.

        With ``takes_part`` False the worker takes part from its first gradient on: until then no
        other worker waits for it.
        """
        held = self._held()
        if takes_part:
            self._servers.join(held)
        else:
            self._servers.look(held)
        self._put(held)

    def finish(self) -> None:
        """Wait for the reply to a gradient that is under way."""
        return

    def compilables(self) -> list[Compilable]:
        return []

    def state_dict(self) -> StateDict:
        return {}

    def load_state_dict(self, state: StateDict) -> None:
        assert not state, "the state of workers is on the servers"

    def _held(self) -> Tensor:
        """Return the weights on the host; no copy if they are there already."""
        data = self._weights.data
        return data if data.device.type == "cpu" else data.cpu()

    def _put(self, held: Tensor) -> None:
        if held is not self._weights.data:
            self._weights.data.copy_(held)


class RemoteGradients(RemoteUpdater):
    """Sends every gradient; the servers' optimiser steps."""

    own_clock: Clock | None = None
    """This worker's clock; None: weights are only fetched with the reply to a gradient."""
    _fetched_at = -1
    """Its env steps when weights were fetched last."""

    def before_gradient(self) -> None:
        """Fetch weights that other workers have changed while this one collected."""
        clock, servers = self.own_clock, self._servers
        if clock is None or (self._fetched_at == clock.env_steps and not servers.is_behind):
            return
        held = self._held()
        self._servers.finish_push(held)
        if fetches_before_gradients(self._config):
            self._servers.refresh(held)
        self._put(held)
        self._fetched_at = clock.env_steps

    def finish(self) -> None:
        held = self._held()
        self._servers.finish_push(held)
        self._put(held)

    def apply(self, learning_rate: float | Tensor, loss: Loss | None = None) -> Metrics:
        self.made += 1
        gradient = self._weights.grad.cpu()
        norm = clip(gradient, self._config.max_grad_norm)
        # Only the outlier guard reads losses, and reading one may wait for the device.
        known = float(loss()) if self._config.outlier_sigmas > 0 and loss is not None else None
        held = self._held()
        rate = float(learning_rate)
        if self._config.overlap:
            try:
                self._servers.start_push(gradient.clone(), rate, known, self.share, held)
            except ServersLost:  # while it waited for the reply to the gradient before
                self.made -= 1
                raise
        else:
            self._servers.push(gradient, rate, known, self.share, held)
        self._put(held)
        return {"grad_norm": norm, "skipped": 0.0 if math.isfinite(norm) else 1.0}


class _Periodic(RemoteUpdater):
    """Takes local steps, and meets the servers after every ``local_steps`` of them."""

    def __init__(self, config: Config, weights: FlatWeights, servers: Servers) -> None:
        super().__init__(config, weights, servers)
        eps, decay = config.optimizer_eps, config.weight_decay
        factors = weights.rate_factors(config)
        optimiser = make_optimiser(config.optimizer, weights.data, eps, decay, factors)
        self._local = LocalUpdater(weights, optimiser, config.max_grad_norm)

    def apply(self, learning_rate: float | Tensor, loss: Loss | None = None) -> Metrics:
        del loss
        self._prepare()
        metrics = self._local.apply(learning_rate)
        self.made += 1
        if self.made % self._config.local_steps == 0:
            self._meet()
        return metrics

    def _prepare(self) -> None:
        """Change the gradient before a local step."""

    @abstractmethod
    def _meet(self) -> None:
        """Exchange weights or differences with the servers."""


class Elastic(_Periodic):
    """EASGD (1412.6651): worker and centre move towards each other."""

    def _meet(self) -> None:
        held = self._held()
        self._servers.exchange(held, self._config.easgd_alpha or 0.9 / self._config.workers)
        self._put(held)


class LocalSteps(_Periodic):
    """Local SGD with an outer step on the servers (DiLoCo, 2311.08105).

    With outer rate 1 and without momentum it is FedAvg (1602.05629): the mean, by ``share``.
    """

    def join(self, takes_part: bool = True) -> None:
        super().join(takes_part)
        self._start = self._weights.data.cpu().clone()

    def _meet(self) -> None:
        way = self._start - self._weights.data.cpu()
        clip(way, 0.0)  # a non-finite entry makes all of them NaN: all shards refuse it alike
        rate = self._config.outer_learning_rate
        self._servers.push(way, rate, None, self.share, self._start)
        self._weights.data.copy_(self._start)


class Consensus(_Periodic):
    """Consensus ADMM (Boyd 2011, section 7.1), its inner problem by steps of the optimiser.

    A worker's own weights x descend f(x) + ρ/2 ‖x − z + u‖². The servers hold z, the workers' mean
    of x + u; u are the scaled dual variables of the constraint x = z.
    """

    def join(self, takes_part: bool = True) -> None:
        super().join(takes_part)
        self._agreed = self._weights.data.cpu().clone()
        self._duals = torch.zeros_like(self._agreed)

    def _prepare(self) -> None:
        data = self._weights.data
        pull = data - self._agreed.to(data.device) + self._duals.to(data.device)
        self._weights.grad.add_(pull, alpha=self._config.admm_rho)

    def _meet(self) -> None:
        mine = self._weights.data.cpu()
        way = self._agreed - (mine + self._duals)
        clip(way, 0.0)
        self._servers.push(way, 1.0, None, self.share, self._agreed)
        self._duals.add_(mine - self._agreed)


UPDATERS: dict[str, type[RemoteUpdater]] = {
    "easgd": Elastic,
    "local-sgd": LocalSteps,
    "admm": Consensus,
}


def make_remote_updater(config: Config, weights: FlatWeights, servers: Servers) -> RemoteUpdater:
    return UPDATERS.get(config.update, RemoteGradients)(config, weights, servers)


def fetches_before_gradients(config: Config) -> bool:
    """Return whether workers fetch weights after collecting.

    Behind a barrier none have changed, and a rollout's gradient is of the weights that acted.
    """
    has_changed = config.update in ("async", "ssp", "hybrid") and config.replay
    return has_changed and config.pull == "before-gradient"


def fetches_for_each_gradient(config: Config) -> bool:
    """Return whether workers collect, and so fetch weights, between any two gradients."""
    is_single = config.gradient_steps == 1 and max(config.envs, 1) <= config.train_freq
    return fetches_before_gradients(config) and is_single
