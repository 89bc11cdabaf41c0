"""First priorities of new transitions. In: blocks of rows; out: TD errors of one network.

Rows are kept until they have n rows after them, in a small ordinary ring, so that n-step returns
and stacks are exactly those that the memory will make of the same rows.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from numpy.typing import NDArray

from qfleet.algorithms.objective import Objective
from qfleet.config.config import Config
from qfleet.core.types import Block, EnvSpec
from qfleet.memory.ring import Ring
from qfleet.memory.samplers import UniformSampler
from qfleet.networks.qnetwork import QNetwork

AT_ONCE = 1024
"""Largest number of transitions in one pass of the network."""


class FirstPriorities:
    """A function of blocks that keeps the newest rows."""

    def __init__(
        self, config: Config, spec: EnvSpec, network: QNetwork, objective: Objective, rows: int
    ) -> None:
        """``rows`` is the length of the longest block."""
        # Where one network chooses and values, double DQN only costs a third pass.
        self._network = network
        self._objective = dataclasses.replace(objective, double=False)
        device = torch.device("cpu")
        kept = rows + config.n_steps + spec.frame_stack
        self._ring = Ring(
            spec,
            config.envs,
            kept * config.envs,
            config.n_steps,
            config.gamma,
            UniformSampler(torch.Generator(device)),  # nothing is drawn
            device,
        )

    @torch.no_grad()
    def __call__(self, block: Block) -> NDArray[np.float32]:
        """Return priorities ``[P, N]`` of the P rows that now have n rows after them."""
        self._ring.extend(block)
        starts = self._ring.newest_starts(block.rows)
        errors = [self._errors(part) for part in torch.split(starts.view(-1), AT_ONCE)]
        joined = torch.cat(errors) if errors else torch.zeros(0)
        found: NDArray[np.float32] = joined.view(starts.shape).float().numpy()
        return found

    def _errors(self, index: torch.Tensor) -> torch.Tensor:
        envs = self._ring.num_envs
        batch = self._ring.gather(index // envs, index % envs)
        network = self._network
        terms = self._objective.target_terms(batch, network)
        target = self._objective.target(batch, terms, network, network)
        prediction = self._objective.predict(batch.obs, network)
        return self._objective.loss(prediction, batch.action, network, target).priority
