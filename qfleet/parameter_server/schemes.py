"""What workers send where it is not a gradient, on the same shards. Flat vectors in and out.

scheme             a worker sends                             the server keeps, and does
elastic averaging  its weights, every τ steps                 the centre; moves α of the way there
local SGD, DiLoCo  start − its weights, every H steps         weights; an outer Nesterov step
consensus ADMM     z − (x + u), every K inner steps           z; a plain step of size 1: the mean
FedAvg             start − its weights, and how many samples  weights; a plain step of size 1

The first uses ``Shard.exchange``. The others are ordinary pushes at a barrier (``admission.Sync``):
a server that steps by the mean of differences from what it holds, with rate 1, holds the mean.
Every function works entry by entry, so it does not matter over how many shards a vector is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qfleet.core import StateDict
from qfleet.errors import ConfigError
from qfleet.updaters.optimisers import Rate


def _check_steps(name: str, steps: int) -> None:
    if steps < 1:
        raise ConfigError(f"{name} {steps} is no number of steps; use 1 or more")


# --- elastic averaging (EASGD, 1412.6651) -----------------------------------------------------


def elastic_difference(weights: Tensor, centre: Tensor, alpha: float) -> Tensor:
    """What the worker gives and the centre takes; their sum stays what it was."""
    return (weights - centre) * alpha


def elastic_round(
    workers: Sequence[Tensor], centre: Tensor, alpha: float
) -> tuple[list[Tensor], Tensor]:
    """All workers at once, as in the paper's synchronous form: every difference is to the same
    centre. A shard takes them one by one, each against the centre that the last one left."""
    differences = [elastic_difference(weights, centre, alpha) for weights in workers]
    moved = centre.clone()
    for difference in differences:
        moved.add_(difference)
    return [w - difference for w, difference in zip(workers, differences, strict=True)], moved


@dataclass(frozen=True)
class ElasticAveraging:
    """When a worker exchanges, and how far both sides move."""

    alpha: float
    """Share of the distance. Above 1/m, m workers at once carry the centre beyond their mean."""
    period: int
    """Own steps between two exchanges (τ)."""

    def __post_init__(self) -> None:
        _check_steps("period", self.period)
        if not 0 < self.alpha <= 1:
            raise ConfigError(
                f"alpha {self.alpha:g} is no share of a distance; use above 0 up to 1"
            )

    def due(self, step: int) -> bool:
        """Whether to exchange after so many own steps."""
        return step % self.period == 0


# --- local SGD with an outer step (DiLoCo, 2311.08105) ----------------------------------------


@dataclass(frozen=True)
class LocalSteps:
    """A worker takes ``period`` (H) steps of its own from the pulled weights, then pushes."""

    period: int

    def __post_init__(self) -> None:
        _check_steps("period", self.period)

    def due(self, step: int) -> bool:
        return step % self.period == 0

    @staticmethod
    def difference(start: Tensor, weights: Tensor) -> Tensor:
        """What stands for the gradient: the way gone, backwards. Its learning rate is the outer."""
        return start - weights


class Nesterov:
    """The outer optimiser: torch.optim.SGD with ``nesterov``; plain descent with momentum 0."""

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


# --- consensus ADMM (Boyd 2011, section 7.1) --------------------------------------------------


class ConsensusADMM:
    """A worker's side: its own weights x and the prices u (scaled duals) of disagreeing.

    A round is ``solve``, a push of ``difference`` with rate 1, and ``agree`` on the new z. For
    convex losses x and z come together at the joint minimum; for TD learning nobody has proved
    anything of the kind.
    """

    def __init__(self, z: Tensor, rho: float, inner_steps: int, inner_rate: float) -> None:
        _check_steps("inner_steps", inner_steps)
        if not rho > 0:
            raise ConfigError(f"rho {rho:g} does not pull towards consensus; use above 0")
        self._rho, self._steps, self._rate = rho, inner_steps, inner_rate
        self.weights, self._prices = z.clone(), torch.zeros_like(z)

    def solve(self, z: Tensor, gradient: Callable[[Tensor], Tensor]) -> None:
        """K steps down f(x) + ρ/2 ‖x − z + u‖², from where x is; ``gradient`` is that of f."""
        for _ in range(self._steps):
            pull = self.weights - z + self._prices
            self.weights.sub_(self._rate * (gradient(self.weights) + self._rho * pull))

    def difference(self, z: Tensor) -> Tensor:
        """What is pushed: a step of size 1 down the workers' mean of it leads to mean(x + u)."""
        return z - (self.weights + self._prices)

    def agree(self, z: Tensor) -> None:
        """The barrier is passed: raise the price of what is still between x and the new z."""
        self._prices.add_(self.weights - z)

    def state_dict(self) -> StateDict:
        return {"weights": self.weights.clone(), "prices": self._prices.clone()}

    def load_state_dict(self, state: StateDict) -> None:
        self.weights.copy_(state["weights"])
        self._prices.copy_(state["prices"])


# --- FedAvg (1602.05629) ----------------------------------------------------------------------


def weighted_mean(vectors: Sequence[Tensor], samples: Sequence[float]) -> Tensor:
    """Σ (n_k / n) θ_k. On a shard: push ``LocalSteps.difference`` with ``weight`` n_k, rate 1."""
    total = sum(samples)
    if not total > 0:
        raise ConfigError(f"a mean of {len(vectors)} vectors by {total:g} samples; use above 0")
    result = torch.zeros_like(vectors[0])
    for vector, count in zip(vectors, samples, strict=True):
        result.add_(vector, alpha=count / total)
    return result
