"""Evaluation of ``--engine device``: all episodes at once, one environment each, on the device.

In: a function from observations to Q-values, and a tensor environment. Out: unclipped returns.
Environments are stepped in chunks, each recorded as one launch if the device supports it; the host
synchronises once per chunk.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from qfleet.accelerator.graphs import record
from qfleet.accelerator.stream_timer import StreamTimer
from qfleet.agent.device_actor import Now, Row, draw_exploration, explorer_counters, step_envs
from qfleet.agent.evaluation import LONGEST_EPISODE, Evaluation, GiveUp, longest_share
from qfleet.core.counter_rng import next_counters
from qfleet.core.errors import EnvironmentFault
from qfleet.envs.device.protocol import (
    TensorEnv,
    begin_episodes,
    copy_episodes,
    hold_episodes,
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
        step: Callable[..., tuple[Now, Row]] | None = None,
        envs: int = 0,
    ) -> None:
        """``seeds`` (int64 ``[N]``): one episode each. ``seed``: seed of random actions.

        ``agents``: number of agents; each plays all episodes, in environments of its own, and makes
        at most ``max_steps`` steps in all of them. ``step``: ``step_envs`` of this environment,
        compiled for ``envs`` of each agent; those beyond the number of seeds are not counted.
        """
        self._q_values, self._env, self._epsilon = q_values, env, epsilon
        self._device, self._graphs = device, graphs
        self._step = step or functools.partial(step_envs, env)
        spare = max(0, envs - len(seeds))
        self._seeds = torch.cat((seeds, seeds[:1].repeat(spare))).to(device).repeat(agents)
        own = explorer_counters(seed, len(seeds), device)
        self._first_explorers = torch.cat((own, own[:1].repeat(spare))).repeat(agents)
        counted = torch.arange(len(seeds) + spare, device=device) < len(seeds)
        self._counted = counted.repeat(agents)
        # Recorded kernels read and write fixed addresses: these tensors.
        self._episodes = hold_episodes(begin_episodes(env, self._seeds))
        self._explorers = self._first_explorers.clone()
        self._steps = torch.arange(1, CHUNK + 1, device=device).view(-1, 1)
        self._playing = self._counted.clone()
        self._returns = torch.zeros_like(self._seeds, dtype=torch.float64)
        self._lengths = torch.zeros_like(self._seeds)
        # One episode per environment: the limit of all is a limit of each.
        self._max_length = longest_share(max_steps, len(seeds))
        self._cut = torch.zeros_like(self._playing)
        self._launch: Callable[[], None] | None = None
        self.device_time = StreamTimer(device)

    @torch.no_grad()
    def play(self, give_up: GiveUp = lambda _: False) -> Evaluation | None:
        """Play every episode to its end or to the limit of steps.

        Return None if ``give_up``, called once per chunk, returned True.
        """
        launch = self._launch or self.prepare()
        copy_episodes(self._episodes, begin_episodes(self._env, self._seeds))
        self._explorers.copy_(self._first_explorers)
        self._playing.copy_(self._counted)
        self._returns.zero_()
        self._lengths.zero_()
        self._cut.zero_()
        episodes = int(self._counted.sum())
        while playing := int(self._playing.sum()):
            if give_up(episodes - playing):
                return None
            with self.device_time:
                launch()
        if not bool(self._returns.isfinite().all()):
            raise EnvironmentFault(f"'{self._env.spec.env_id}' gave NaN or Inf in an evaluation")
        unfinished = int(self._cut.sum())
        returns, lengths = (column[self._counted] for column in (self._returns, self._lengths))
        return Evaluation(returns.tolist(), lengths.tolist(), unfinished)

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
        now = Now(episodes, self._env.observe(episodes.inner))
        for at in range(CHUNK):
            now, row = self._step(now, self._q_values(now.obs), explores[at], drawn[at])
            # All environments step together: those whose episode is over step on, uncounted.
            returns = returns + torch.where(playing, row.reward, 0.0)
            lengths = lengths + playing
            playing = playing & ~row.over & (lengths < LONGEST_EPISODE)
            cut = cut | (playing & (lengths >= self._max_length))
            playing = playing & ~cut
        copy_episodes(self._episodes, now.episodes)
        self._explorers.copy_(counters[-1])
        self._playing.copy_(playing)
        self._returns.copy_(returns)
        self._lengths.copy_(lengths)
        self._cut.copy_(cut)
