"""Evaluation of ``--engine device``: all episodes at once, one environment each, on the device.

In: a function from observations to Q-values, and a tensor environment. Out: unclipped returns.
Steps come in chunks, recorded where the device can; the host looks up once per chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from qfleet.accelerator.graphs import record
from qfleet.agent.device_actor import draw_exploration, explorer_counters
from qfleet.agent.evaluation import LONGEST_EPISODE, Evaluation
from qfleet.core.counter_rng import next_counters
from qfleet.core.errors import EnvironmentFault
from qfleet.envs.device.protocol import (
    TensorEnv,
    begin_episodes,
    copy_episodes,
    hold_episodes,
    step_episodes,
)

CHUNK = 64
"""Steps between two looks of the host: enough to hide a launch, few enough to end soon."""


class Played(NamedTuple):
    """One episode per environment, on the host."""

    returns: Tensor
    """float64 ``[N]``."""
    lengths: Tensor
    """int64 ``[N]``."""


class TensorEvaluator:
    """The same episodes every time it is asked, with whatever Q-values there are by then."""

    def __init__(
        self,
        q_values: Callable[[Tensor], Tensor],
        env: TensorEnv,
        seeds: Tensor,
        epsilon: float,
        device: torch.device,
        seed: int,
        graphs: bool = True,
        agents: int = 1,
    ) -> None:
        """``seeds`` (int64 ``[N]``): one episode each. ``seed`` is that of random actions.

        So many ``agents`` play the same episodes, in environments side by side.
        """
        self._q_values, self._env, self._epsilon = q_values, env, epsilon
        self._device, self._graphs = device, graphs
        self._seeds = seeds.to(device).repeat(agents)
        self._first_explorers = explorer_counters(seed, len(seeds), device).repeat(agents)
        # Recorded kernels read and write fixed places: these.
        self._episodes = hold_episodes(begin_episodes(env, self._seeds))
        self._explorers = self._first_explorers.clone()
        self._steps = torch.arange(1, CHUNK + 1, device=device).view(-1, 1)
        self._playing = torch.ones_like(self._seeds, dtype=torch.bool)
        self._returns = torch.zeros_like(self._seeds, dtype=torch.float64)
        self._lengths = torch.zeros_like(self._seeds)
        self._launch: Callable[[], None] | None = None

    @torch.no_grad()
    def play(self, give_up: Callable[[], bool] = lambda: False) -> Played | None:
        """Every episode to its end; None if ``give_up``, asked once a chunk, said yes before."""
        launch = self._launch or self.prepare()
        self._restart()
        while bool(self._playing.any()):
            if give_up():
                return None
            launch()
        # Copies even where the device is the host: the next evaluation writes to the same place.
        played = Played(*(t.to("cpu", copy=True) for t in (self._returns, self._lengths)))
        if not bool(played.returns.isfinite().all()):
            raise EnvironmentFault(f"'{self._env.spec.env_id}' gave a NaN or Inf in an evaluation")
        return played

    def prepare(self) -> Callable[[], None]:
        """Record a chunk, where the device can, with the network in the mode that it has now."""
        self._launch = self._chunk
        if self._graphs:
            self._launch = record(self._chunk, self._device, (), "evaluation")
        return self._launch

    def _restart(self) -> None:
        copy_episodes(self._episodes, begin_episodes(self._env, self._seeds))
        self._explorers.copy_(self._first_explorers)
        self._playing.fill_(True)
        self._returns.zero_()
        self._lengths.zero_()

    @torch.no_grad()
    def _chunk(self) -> None:
        episodes, number = self._episodes, self._env.spec.num_actions
        counters = next_counters(self._explorers, self._steps)
        explores, anything = draw_exploration(counters, self._epsilon, number)
        playing, returns, lengths = self._playing, self._returns, self._lengths
        obs = self._env.observe(episodes.inner)
        for at in range(CHUNK):
            greedy = self._q_values(obs).argmax(dim=1)
            action = torch.where(explores[at], anything[at], greedy)
            episodes, step = step_episodes(self._env, episodes, action)
            obs = step.obs
            # Environments whose episode is over play on, since all step together; nobody counts.
            returns = returns + torch.where(playing, step.reward, 0.0)
            lengths = lengths + playing
            playing = playing & ~episodes.over & (lengths < LONGEST_EPISODE)
        copy_episodes(self._episodes, episodes)
        self._explorers.copy_(counters[-1])
        self._playing.copy_(playing)
        self._returns.copy_(returns)
        self._lengths.copy_(lengths)


def as_evaluation(played: Played | None) -> Evaluation | None:
    if played is None:
        return None
    return Evaluation(played.returns.tolist(), played.lengths.tolist())
