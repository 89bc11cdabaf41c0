"""The agents of a population: what each has of its own, and how they learn from each other.

In: a configuration with ``population`` K and ``vary``. Out: a seed and hyper-parameters for every
agent, put where learner, memory and actor read them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qfleet.config import Config
from qfleet.errors import ConfigError, UnknownNameError
from qfleet.learner import Learner
from qfleet.memory import Rollout
from qfleet.tensor_actor import TensorActor

VARIED = ("learning_rate", "gamma", "td_lambda", "exploration_final_eps")
"""Fields of which every agent can have a value of its own."""


def agent_seeds(config: Config) -> list[int]:
    """Of every agent: that of the run, and the numbers after it."""
    return [config.seed + agent for agent in range(config.population)]


def draw_values(config: Config) -> dict[str, list[float]]:
    """The agents' values of every field in VARIED, decided by ``vary`` and the run's seed."""
    values = {name: [float(getattr(config, name))] * config.population for name in VARIED}
    asked: dict[str, Any] = json.loads(config.vary)
    for name, choice in asked.items():
        if name not in VARIED:
            raise UnknownNameError("field to vary", name, VARIED)
        values[name] = _draw(name, choice, config)
        for value in values[name]:
            # Whatever a single run refuses, an agent may not have either.
            config.replace(population=1, vary="{}", **{name: value}).validate()
    return values


def _draw(name: str, choice: Any, config: Config) -> list[float]:
    agents = config.population
    if isinstance(choice, list) and choice and all(_is_number(value) for value in choice):
        if agents % len(choice):
            raise ConfigError(
                f"vary {name}: {len(choice)} values do not go evenly into {agents} agents"
            )
        return [float(choice[agent * len(choice) // agents]) for agent in range(agents)]
    if isinstance(choice, Mapping) and {"from", "to"} <= set(choice) <= {"from", "to", "log"}:
        low, high, log = choice["from"], choice["to"], choice.get("log", False)
        if _is_number(low) and _is_number(high) and isinstance(log, bool):
            if log and min(low, high) <= 0:
                raise ConfigError(f"vary {name}: log-even values need bounds above 0")
            salt = VARIED.index(name)
            shares = np.random.default_rng([config.seed, salt]).random(agents)
            if log:
                return [float(low * (high / low) ** share) for share in shares]
            return [float(low + (high - low) * share) for share in shares]
    raise ConfigError(
        f'vary {name}: {json.dumps(choice)} is neither a list of numbers nor {{"from": …, "to": …}}'
    )


def _is_number(value: object) -> bool:
    real = isinstance(value, (int, float)) and not isinstance(value, bool)
    return real and math.isfinite(value)  # type: ignore[arg-type]


class Agents:
    """The values in force, by field and agent."""

    def __init__(
        self, config: Config, learner: Learner, memory: Rollout, actor: TensorActor
    ) -> None:
        self._config, self._learner, self._memory, self._actor = config, learner, memory, actor
        self.seeds = agent_seeds(config)
        self.values = draw_values(config)
        self._learner.relative_rates = torch.ones(
            (config.population, 1), device=learner.weights.data.device
        )
        self.put_in_force()

    def put_in_force(self) -> None:
        """Write the values where recorded kernels read them."""
        base = self._config.learning_rate
        assert self._learner.relative_rates is not None
        rates = torch.tensor(self.values["learning_rate"]).unsqueeze(1) / base
        self._learner.relative_rates.copy_(rates)
        self._memory.gamma.copy_(self._of_envs("gamma"))
        self._memory.td_lambda.copy_(self._of_envs("td_lambda"))
        self._actor.final_eps.copy_(self._of_envs("exploration_final_eps"))

    def _of_envs(self, name: str) -> Tensor:
        return torch.tensor(self.values[name]).repeat_interleave(self._config.envs)
