"""The replay memories of a population's agents: one ring each, as a memory of agent-major batches.

Each agent has the ring that a single run with its seed would have, so it also draws what that run
would draw.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from qfleet.accelerator.compiling import Compilable
from qfleet.core.errors import CheckpointError
from qfleet.core.types import BATCH_FIELDS, Batch, Block, StateDict
from qfleet.memory.ring import Ring
from qfleet.storage.state_checks import check_like

T = TypeVar("T")


class AgentRings:
    """A memory of K rings; the k-th of K equal groups of adjacent envs belongs to the k-th."""

    def __init__(self, rings: Mapping[int, Ring], batch_size: int) -> None:
        """``rings`` by agent, in order. ``batch_size``: samples of one agent in a batch."""
        # Checkpoints have their names: one shares files with the checkpoint before it where a name
        # and a version are the same, and rows change when agents stop.
        self._names = [str(agent) for agent in rings]
        self._rings, self._batch_size = list(rings.values()), batch_size
        self.device = self._rings[0].device

    def set_gammas(self, gammas: Sequence[float]) -> None:
        """Set the discount of every agent, in place: recorded kernels read it."""
        for ring, gamma in zip(self._rings, gammas, strict=True):
            ring.set_gamma(gamma)

    def gammas(self) -> list[float]:
        """Return the discount of every agent, from the tensors that kernels read."""
        return [ring.gamma() for ring in self._rings]

    def extend(self, block: Block) -> None:
        count = self._rings[0].num_envs
        for agent, ring in enumerate(self._rings):
            own = slice(agent * count, (agent + 1) * count)
            obs, action = block.obs[:, own], block.action[:, own]
            ring.extend(Block(obs, action, block.reward[:, own], block.flags[:, own]))

    def can_sample(self) -> bool:
        return all(ring.can_sample() for ring in self._rings)

    def sample(self, count: int, beta: float | Tensor) -> Batch:
        """Draw whole batches: ``batch_size`` samples of agent 0, of agent 1, …, in each."""
        each = [ring.sample(count // len(self._rings), beta) for ring in self._rings]
        return Batch(*(self._agent_major(each, name) for name in BATCH_FIELDS))

    def _agent_major(self, each: Sequence[Batch], name: str) -> Tensor:
        batches = [getattr(own, name).unflatten(0, (-1, self._batch_size)) for own in each]
        return torch.stack(batches, dim=1).flatten(0, 2)

    def update_priorities(self, index: Tensor, priority: Tensor) -> None:
        """Set the priorities of one batch."""
        shares = (torch.split(column, self._batch_size) for column in (index, priority))
        for ring, slots, errors in zip(self._rings, *shares, strict=True):
            ring.update_priorities(slots, errors)

    def generators(self) -> list[torch.Generator]:
        return self._of_all(Ring.generators)

    def compilables(self) -> list[Compilable]:
        return self._of_all(Ring.compilables)

    def _of_all(self, parts: Callable[[Ring], list[T]]) -> list[T]:
        return [part for ring in self._rings for part in parts(ring)]

    def end_open_episodes(self) -> None:
        for ring in self._rings:
            ring.end_open_episodes()

    def close(self) -> None:
        for ring in self._rings:
            ring.close()

    def state_dict(self) -> StateDict:
        each = [ring.state_dict() for ring in self._rings]
        rings = dict(zip(self._names, each, strict=True))
        return {"rings": rings, "total_rows": each[0]["total_rows"]}  # the same of all

    def load_state_dict(self, state: StateDict) -> None:
        rings = dict(zip(self._names, self._rings, strict=True))
        check_like(state["rings"], rings, "memory/rings", free=rings)
        if any(stored["total_rows"] != state["total_rows"] for stored in state["rings"].values()):
            raise CheckpointError("memory: the agents have different numbers of rows")
        for name, ring in rings.items():
            ring.load_state_dict(state["rings"][name])

    @staticmethod
    def select(state: StateDict, rows: list[int], _own: int) -> StateDict:
        """Return the state of the agents in these rows alone."""
        rings = list(state["rings"].items())
        return {**state, "rings": dict(rings[row] for row in rows)}
