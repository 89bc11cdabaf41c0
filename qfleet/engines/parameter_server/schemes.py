"""The servers' part of schemes without gradients in messages. In and out: flat vectors.

scheme             a worker sends                      the server holds, and does
elastic averaging  its weights, every τ steps          the centre; moves α of the way there
local SGD, DiLoCo  start − its weights, every H steps  weights; an outer Nesterov step
consensus ADMM     z − (x + u), every K inner steps    z; a plain step of size 1: the mean

The first uses ``Shard.exchange``. The others are ordinary pushes at a barrier (``admission.Sync``):
a server that steps by the mean of differences from its weights, with rate 1, holds the mean.
Every entry is computed by itself, so the number of shards does not matter. The workers' part is in
``qfleet/engines/parameter_server/updaters.py``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qfleet.agent.updaters.optimisers import Rate
from qfleet.core.types import StateDict


def elastic_difference(weights: Tensor, centre: Tensor, alpha: float) -> Tensor:
    """Return what EASGD (1412.6651) subtracts from the worker and adds to the centre.

    With ``alpha`` above 1/m, m workers at once move the centre beyond their mean.
    """
    return (weights - centre) * alpha


class Nesterov:
    """The outer optimiser of local SGD (DiLoCo, 2311.08105).

    torch.optim.SGD with ``nesterov``; plain descent with momentum 0.
    """

    def __init__(self, weights: Tensor, momentum: float) -> None:
        self._momentum = momentum
        self._velocity = torch.zeros_like(weights)

    def step(
        self, weights: Tensor, grad: Tensor, learning_rate: Rate, found_bad: Tensor | None
    ) -> None:
        velocity = self._velocity * self._momentum + grad
        move = learning_rate * (grad + self._momentum * velocity)
        if found_bad is not None:
            good = found_bad == 0
            velocity = torch.where(good, velocity, self._velocity)
            move = torch.where(good, move, 0.0)
        self._velocity.copy_(velocity)
        weights.sub_(move)

    def state_dict(self) -> StateDict:
        return {"velocity": self._velocity}

    def load_state_dict(self, state: StateDict) -> None:
        self._velocity.copy_(state["velocity"])
