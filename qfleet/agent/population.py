"""The agents of a population: the seed and the hyper-parameters of each.

In: a configuration with ``population`` K and ``vary``. Out: a seed and hyper-parameters for every
agent, written to the tensors that learner, memory and actor read, and read back from there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qfleet.agent.device_actor import TensorActor
from qfleet.agent.recorded_learner import RecordedLearner
from qfleet.config.config import Config
from qfleet.config.validation import validate
from qfleet.core.errors import CheckpointError, ConfigError, UnknownNameError
from qfleet.core.types import StateDict
from qfleet.memory.agent_rings import AgentRings
from qfleet.memory.rollout import Rollout
from qfleet.storage.state_checks import check_like

VARIED = ("learning_rate", "gamma", "td_lambda", "exploration_final_eps")
"""Fields that may differ between agents."""


def agent_seeds(config: Config, members: Sequence[int]) -> list[int]:
    """Return the seeds of these agents: the run's seed plus the agent's number."""
    return [config.seed + agent for agent in members]


def draw_values(config: Config) -> dict[str, list[float]]:
    """Return the agents' values of every field in VARIED, from ``vary`` and the run's seed."""
    values = {name: [float(getattr(config, name))] * config.population for name in VARIED}
    for name, choice in json.loads(config.vary).items():
        if name not in VARIED:
            raise UnknownNameError("field to vary", name, VARIED)
        if name == "td_lambda" and config.replay:
            raise ConfigError("vary td_lambda: only rollouts use it; use --algo pqn")
        if name == "exploration_final_eps" and config.noisy:
            raise ConfigError("vary exploration_final_eps: noisy agents explore without ε")
        values[name] = _draw(name, choice, config)
        for value in values[name]:
            # An agent may not have a value that a single run refuses.
            validate(alone(config, 0, {name: value}))
    return values


def _draw(name: str, choice: Any, config: Config) -> list[float]:
    agents = config.population
    if isinstance(choice, list) and choice and all(_is_number(value) for value in choice):
        if agents % len(choice):
            raise ConfigError(
                f"vary {name}: its {len(choice)} values must divide evenly among {agents} agents"
            )
        return [float(choice[agent * len(choice) // agents]) for agent in range(agents)]
    if isinstance(choice, Mapping) and {"from", "to"} <= set(choice) <= {"from", "to", "log"}:
        low, high, log = choice["from"], choice["to"], choice.get("log", False)
        if _is_number(low) and _is_number(high) and isinstance(log, bool):
            if log and min(low, high) <= 0:
                raise ConfigError(f"vary {name}: bounds of log-uniform values must be > 0")
            salt = VARIED.index(name)
            shares = np.random.default_rng([config.seed, salt]).random(agents)
            if log:
                return [float(low * (high / low) ** share) for share in shares]
            return [float(low + (high - low) * share) for share in shares]
    raise ConfigError(
        f'vary {name} must be a list of numbers or {{"from": …, "to": …}}, got {json.dumps(choice)}'
    )


def _is_number(value: object) -> bool:
    real = isinstance(value, (int, float)) and not isinstance(value, bool)
    return real and math.isfinite(value)  # type: ignore[arg-type]


class Agents:
    """The agents of a batch, one per row, and their hyper-parameters by field and row."""

    def __init__(
        self,
        config: Config,
        members: Sequence[int],
        learner: RecordedLearner,
        memory: Rollout | AgentRings,
        actor: TensorActor,
    ) -> None:
        """``members``: the numbers of the agents, without those that have stopped."""
        self._config, self._learner, self._memory, self._actor = config, learner, memory, actor
        self.members = list(members)
        drawn = draw_values(config)
        self.varied: list[str] = [name for name in VARIED if name in json.loads(config.vary)]
        self.values = {name: [drawn[name][agent] for agent in members] for name in VARIED}
        self._learner.relative_rates = torch.ones(
            (len(members), 1), device=learner.weights.data.device
        )
        self.put_in_force()

    def put_in_force(self) -> None:
        """Write the values to the tensors that recorded kernels read."""
        base = self._config.learning_rate
        assert self._learner.relative_rates is not None
        # Divided in double precision: an agent with the run's own rate then gets exactly 1.
        rates = torch.tensor(self.values["learning_rate"], dtype=torch.float64) / base
        self._learner.relative_rates.copy_(rates.unsqueeze(1))
        self._memory.set_gammas(self.values["gamma"])
        if isinstance(self._memory, Rollout):
            self._memory.td_lambda.copy_(self._of_envs("td_lambda"))
        if not self._config.noisy:  # which explores without ε
            self._actor.final_eps.copy_(self._of_envs("exploration_final_eps"))

    def _of_envs(self, name: str) -> Tensor:
        return torch.tensor(self.values[name]).repeat_interleave(self._config.envs)

    def in_force(self) -> list[dict[str, float]]:
        """Return the varied values of every row, read back from the tensors that kernels read.

        They are rounded to the digits that float32 has, so that 1e-3 is reported as 1e-3.
        """
        own = self._config.envs
        columns = {
            "learning_rate": self._learner.rates_in_force(),
            "gamma": self._memory.gammas(),
            "exploration_final_eps": self._actor.final_eps[::own].tolist(),
        }
        if isinstance(self._memory, Rollout):
            columns["td_lambda"] = self._memory.td_lambda[::own].tolist()
        return [
            {name: float(f"{columns[name][row]:.7g}") for name in self.varied}
            for row in range(len(self.members))
        ]

    def config_of(self, row: int) -> Config:
        """Return the configuration of a single run with this agent's seed and values."""
        values = {name: self.values[name][row] for name in self.varied}
        return alone(self._config, self.members[row], values)

    def state_dict(self) -> StateDict:
        return {"members": self.members, "values": self.values}

    def load_state_dict(self, state: StateDict) -> None:
        check_like(state, self.state_dict(), "agents")
        if state["members"] != self.members:
            raise CheckpointError(
                f"the checkpoint has agents {state['members']}, this run {self.members}"
            )
        self.values = {name: list(state["values"][name]) for name in VARIED}
        self.put_in_force()

    @staticmethod
    def select(state: StateDict, rows: list[int]) -> StateDict:
        """Return the state of these agents alone."""
        values = {name: [column[row] for row in rows] for name, column in state["values"].items()}
        return {"members": [state["members"][row] for row in rows], "values": values}


def alone(config: Config, agent: int, values: Mapping[str, float]) -> Config:
    """Return the configuration of a single run with the seed of ``agent`` and these values."""
    single = {"population": 1, "vary": "{}", "pbt_interval": 0, "halving_interval": 0}
    return config.replace(**single, seed=config.seed + agent, **values)
