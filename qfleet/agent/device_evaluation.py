"""Evaluation of ``--engine device``: all episodes at once, one environment each, on the device.

In: a function from observations to Q-values, and a tensor environment. Out: unclipped returns.
Environments are stepped in chunks, each recorded as one launch if the device supports it; the host
synchronises once per chunk.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from qfleet.accelerator.graphs import record
from qfleet.agent.actor import legal_actions
from qfleet.agent.device_actor import draw_exploration, explorer_counters
from qfleet.agent.evaluation import LONGEST_EPISODE, Evaluation, GiveUp, longest_share
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
"""Steps between two host synchronisations: enough to hide a launch, few enough to end soon."""


class TensorEvaluator:
    """Plays the same episodes at every evaluation, with the current Q-values."""

    def __init__(
        self,
        q_values: Callable[[Tensor], Tensor],
        env: TensorEnv,
        seeds: Tensor,
        epsilon: float,
        device: torch.device,
        seed: int,
        max_steps: int,
        graphs: bool = True,
        agents: int = 1,
    ) -> None:
        """``seeds`` (int64 ``[N]``): one episode each. ``seed``: seed of random actions.

        ``agents``: number of agents; each plays all episodes, in environments of its own, and makes
        at most ``max_steps`` steps in all of them.
        """
        self._q_values, self._env, self._epsilon = q_values, env, epsilon
        self._device, self._graphs = device, graphs
        self._seeds = seeds.to(device).repeat(agents)
        self._first_explorers = explorer_counters(seed, len(seeds), device).repeat(agents)
        # Recorded kernels read and write fixed addresses: these tensors.
        self._episodes = hold_episodes(begin_episodes(env, self._seeds))
        self._explorers = self._first_explorers.clone()
        self._steps = torch.arange(1, CHUNK + 1, device=device).view(-1, 1)
        self._playing = torch.ones_like(self._seeds, dtype=torch.bool)
        self._returns = torch.zeros_like(self._seeds, dtype=torch.float64)
        self._lengths = torch.zeros_like(self._seeds)
        # One episode per environment: the limit of all is a limit of each.
        self._max_length = longest_share(max_steps, len(seeds))
        self._cut = torch.zeros_like(self._playing)
        self._launch: Callable[[], None] | None = None

    @torch.no_grad()
    def play(self, give_up: GiveUp = lambda _: False) -> Evaluation | None:
        """Play every episode to its end or to the limit of steps.

        Return None if ``give_up``, called once per chunk, returned True.
        """
        launch = self._launch or self.prepare()
        copy_episodes(self._episodes, begin_episodes(self._env, self._seeds))
        self._explorers.copy_(self._first_explorers)
        self._playing.fill_(True)
        self._returns.zero_()
        self._lengths.zero_()
        self._cut.zero_()
        while playing := int(self._playing.sum()):
            if give_up(len(self._playing) - playing):
                return None
            launch()
        if not bool(self._returns.isfinite().all()):
            raise EnvironmentFault(f"'{self._env.spec.env_id}' gave NaN or Inf in an evaluation")
        unfinished = int(self._cut.sum())
        return Evaluation(self._returns.tolist(), self._lengths.tolist(), unfinished)

    def prepare(self) -> Callable[[], None]:
        """Record a chunk if the device supports it, with the network's current mode."""
        self._launch = self._chunk
        if self._graphs:
            self._launch = record(self._chunk, self._device, (), "evaluation")
        return self._launch

    @torch.no_grad()
    def _chunk(self) -> None:
        episodes, spec = self._episodes, self._env.spec
        counters = next_counters(self._explorers, self._steps)
        explores, drawn = draw_exploration(counters, self._epsilon, spec)
        playing, returns, lengths, cut = self._playing, self._returns, self._lengths, self._cut
        obs = self._env.observe(episodes.inner)
        for at in range(CHUNK):
            greedy = self._q_values(obs).argmax(dim=1)
            anything = legal_actions(spec, obs, drawn[at])
            action = torch.where(explores[at], anything, greedy)
            episodes, step = step_episodes(self._env, episodes, action)
            obs = step.obs
            # All environments step together: those whose episode is over step on, uncounted.
            returns = returns + torch.where(playing, step.reward, 0.0)
            lengths = lengths + playing
            playing = playing & ~episodes.over & (lengths < LONGEST_EPISODE)
            cut = cut | (playing & (lengths >= self._max_length))
            playing = playing & ~cut
        copy_episodes(self._episodes, episodes)
        self._explorers.copy_(counters[-1])
        self._playing.copy_(playing)
        self._returns.copy_(returns)
        self._lengths.copy_(lengths)
        self._cut.copy_(cut)
