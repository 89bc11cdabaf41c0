"""The actor of ``--engine device``: acts and steps where its environments are, as tensors.

In: a tensor environment and a function from observations to Q-values. Out: ``Block`` on the device
and finished episodes. It is a ``loop.Collector``. A block is a fixed run of kernels that asks the
host for nothing: where the device can record graphs, all its steps are one launch.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qfleet.accelerator.compiling import Compilable
from qfleet.accelerator.graphs import record
from qfleet.agent import schedules
from qfleet.algorithms.exploration import epsilon_ladder, sample_actions
from qfleet.config.config import Config
from qfleet.core.counter_rng import draw_below, draw_uniform, first_counters, next_counters
from qfleet.core.errors import EnvironmentFault
from qfleet.core.seeding import env_seeds, restore_generator
from qfleet.core.types import (
    FIRST,
    SKIP,
    TERMINATED,
    Block,
    Clock,
    Episode,
    StateDict,
    WeightsChannel,
)
from qfleet.envs.device.protocol import (
    Episodes,
    TensorEnv,
    begin_episodes,
    copy_episodes,
    hold_episodes,
    step_episodes,
)
from qfleet.telemetry.timers import Timers

CHANCE_LANE, ACTION_LANE = 0, 1
"""Of the actor's own counters, which no environment draws from."""
EPISODES_KEPT = 4096
"""Finished episodes that wait on the device; of more than these the oldest are forgotten."""
MEASURE_S = 1.0
"""How long collecting alone is timed."""


def explorer_counters(seed: int, count: int, device: torch.device) -> Tensor:
    """Counters int64 ``[count]`` for ``draw_exploration``."""
    return first_counters(torch.tensor(env_seeds(seed, count), device=device))


def draw_exploration(
    counters: Tensor, rate: Tensor | float, num_actions: int
) -> tuple[Tensor, Tensor]:
    """Who explores, a share ``rate`` that broadcasts over counters, and with which action."""
    explores = draw_uniform(counters, CHANCE_LANE) < rate
    return explores, draw_below(counters, ACTION_LANE, num_actions)


def ring_places(over: Tensor, before: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Where in a ring of ``size`` each of what is ``over`` goes, and how many there are now.

    ``before`` there were. More may come at once than fit: only the newest get a place, which no
    other has (of two writes to one place a GPU does either last). All others go to ``size``.
    """
    at = before + over.cumsum(0) - 1
    total = at[-1] + 1
    kept = over & (at >= total - size)
    return torch.where(kept, at % size, size), total


def running_sums(before: Tensor, reward: Tensor, opened: Tensor) -> Tensor:
    """Sums of rewards ``[T, N]`` row by row, float64, from ``before`` ``[N]``; 0 where opened."""
    total = before + reward.double().cumsum(0)
    row = torch.arange(len(reward), device=reward.device).unsqueeze(1)
    last_opened = torch.where(opened, row, -1).cummax(0).values
    at_opening = total.gather(0, last_opened.clamp(min=0))
    return total - torch.where(last_opened < 0, 0.0, at_opening)


class _Now(NamedTuple):
    """What a step starts from and leaves."""

    episodes: Episodes
    obs: Tensor


class _Row(NamedTuple):
    """What a step tells."""

    obs: Tensor
    action: Tensor
    reward: Tensor
    terminated: Tensor
    opened: Tensor
    over: Tensor
    steps: Tensor
    """Of the episode, this one included; 0: the observation that followed opens one."""


class TensorActor:
    def __init__(
        self,
        env: TensorEnv,
        seeds: Tensor,
        q_values: Callable[[Tensor], Tensor],
        config: Config,
        device: torch.device,
        seeds_of_agents: Sequence[int],
        max_rows: int,
        *,
        channel: WeightsChannel,
        clock: Clock,
        timers: Timers,
        resample_noise: Callable[[torch.Generator], None],
        compiled: bool = False,
        compile_values: bool = True,
    ) -> None:
        """``seeds`` (int64 ``[N]``) are the environments', the others those of who acts in them.

        Agents, mostly one, act in as many environments each, side by side. ``q_values`` gets all N
        observations and gives ``[N, actions]``; ``resample_noise`` is called before every block.
        """
        self._env, self._config, self._device = env, config, device
        self._channel, self._clock, self._resample_noise = channel, clock, resample_noise
        self._working = timers.span("env")
        self.spec, self.num_envs = env.spec, len(seeds)
        self._max_rows = max_rows
        self._samples = config.head == "actor-critic"
        """Actions are drawn from softmax(q)."""
        n = self.num_envs
        self._noise = torch.Generator(device=device).manual_seed(seeds_of_agents[0])
        self._own = n // len(seeds_of_agents)
        """Environments of each agent."""
        with torch.no_grad():
            # Recorded kernels read and write fixed places, so these are copied into, not replaced.
            episodes = hold_episodes(begin_episodes(env, seeds.to(device)))
            self._now = _Now(episodes, env.observe(episodes.inner).clone())
            self._returns = torch.zeros(n, dtype=torch.float64, device=device)
            """Unclipped, of the running episodes."""
            own = [explorer_counters(seed, self._own, device) for seed in seeds_of_agents]
            self._explorers = torch.cat(own)
            """The actor's own counters."""

        def column(dtype: torch.dtype, shape: tuple[int, ...] = ()) -> Tensor:
            return torch.zeros((max_rows, n, *shape), dtype=dtype, device=device)

        self._block = Block(
            obs=column(self.spec.torch_dtype, self.spec.frame_shape),
            action=column(torch.int64),
            reward=column(torch.float32),
            flags=column(torch.uint8),
        )
        first, last = schedules.epsilon(config, 0), schedules.epsilon(config, config.steps)
        self._initial = torch.full((n,), first, device=device)
        self.final_eps = torch.full((n,), last, device=device)
        """ε of each environment at the end; it may be changed in place."""
        self._ladder: Tensor | None = None
        if config.exploration_ladder:
            self._ladder = epsilon_ladder(n, config.exploration_final_eps)
            self._initial.copy_(self._ladder)
            self.final_eps.copy_(self._ladder)
        # How much of ε's fall is over at the start of a block, and how much more in each row.
        self._span = config.exploration_fraction * config.steps
        self._fallen = torch.zeros((), device=device)
        self._rows = torch.arange(max_rows, device=device).view(-1, 1)
        self._falling = self._rows * (self._own / self._span if self._span else 0.0)
        # One place more: whatever is no newly finished episode is written there.
        self._finished = torch.zeros((EPISODES_KEPT + 1, 3), dtype=torch.float64, device=device)
        self._env_numbers = torch.arange(n, dtype=torch.float64, device=device)
        self._totals = torch.zeros(2, dtype=torch.int64, device=device)
        """Episodes finished, and numbers that were not finite, since the actor was made."""
        self._taken = 0
        self._waiting: list[Episode] = []
        # Apart from each other: the network may have kernels that a compiler need not see.
        self._values, self._step = Compilable(q_values), Compilable(self._step_of)
        self._values.on, self._step.on = compiled and compile_values, compiled
        whole = functools.partial(self._rollout, max_rows)
        self._launch: Callable[[], None] = self._recorded(whole) if config.graphs else whole

    # --- blocks -----------------------------------------------------------------------------

    def collect(self, rows: int) -> Block:
        """Step every env ``rows`` times. The block is overwritten by the next one."""
        version = self._channel.refresh()
        with self._working:
            self._resample_noise(self._noise)
            # A kernel argument, not a copy from host memory that could change before it is.
            progress = self._clock.progress
            self._fallen.fill_(min(1.0, progress / self._span) if self._span else 1.0)
            if rows == self._max_rows:
                self._launch()
            else:
                self._rollout(rows)
        block = self._block
        return Block(
            block.obs[:rows], block.action[:rows], block.reward[:rows], block.flags[:rows], version
        )

    @property
    def compile_failure(self) -> str | None:
        """Why a step could not be compiled, if it was to be."""
        return self._step.failure or self._values.failure

    def _recorded(self, whole: Callable[[], None]) -> Callable[[], None]:
        """A whole block as one launch, where the device can; nothing has happened afterwards."""
        before = [tensor.clone() for tensor in self._changing()]
        launch = record(whole, self._device, (), "actor")
        for tensor, kept in zip(self._changing(), before, strict=True):
            tensor.copy_(kept)
        return launch

    def _changing(self) -> list[Tensor]:
        """All that outlives a block, but for the block itself."""
        episodes, obs = self._now
        ours = [obs, self._returns, self._explorers, self._finished, self._totals]
        return [*episodes.inner.values(), *episodes[1:], *ours]

    @torch.no_grad()
    def _rollout(self, rows: int) -> None:
        fallen = (self._fallen + self._falling[:rows]).clamp(max=1.0)
        rates = torch.lerp(self._initial, self.final_eps, fallen)
        # Drawn for the whole block at once: a draw is two dozen kernels, however many it draws.
        counters = next_counters(self._explorers, self._rows[:rows] + 1)
        lots: tuple[Tensor, ...] = (
            (draw_uniform(counters, CHANCE_LANE),)
            if self._samples
            else draw_exploration(counters, rates, self.spec.num_actions)
        )
        now, told = self._now, list[_Row]()
        opening = now.episodes.steps == 0
        for row in range(rows):
            now, seen = self._step(now, self._values(now.obs), *(lot[row] for lot in lots))
            told.append(seen)
        self._write(told, opening)
        copy_episodes(self._now.episodes, now.episodes)
        self._now.obs.copy_(now.obs)
        self._explorers.copy_(counters[-1])

    def _step_of(self, now: _Now, q: Tensor, *lots: Tensor) -> tuple[_Now, _Row]:
        """``lots``: who explores and with which action; or, of a policy, what it draws by."""
        episodes, obs = now
        if self._samples:
            action = sample_actions(q, *lots)
        else:
            explores, anything = lots
            action = torch.where(explores, anything, q.argmax(dim=1))
        after, step = step_episodes(self._env, episodes, action)
        row = _Row(
            obs,
            action,
            step.reward,
            step.terminated,
            step.opened,
            after.over,
            after.steps,
        )
        return _Now(after, step.obs), row

    def _write(self, told: list[_Row], opening: Tensor) -> None:
        """The rows just collected: what can be worked out once per block is not done per row."""
        rows, block = len(told), self._block
        obs = torch.stack([row.obs for row in told], out=block.obs[:rows])
        torch.stack([row.action for row in told], out=block.action[:rows])
        reward = torch.stack([row.reward for row in told], out=block.reward[:rows])
        bad = reward.isfinite().logical_not_().sum()
        if obs.is_floating_point():
            bad = bad + obs.isfinite().logical_not_().sum()
        self._totals[1] += bad
        opened = torch.stack([row.opened for row in told])
        returns = running_sums(self._returns, reward, opened)
        self._returns.copy_(returns[-1])
        if self._config.clip_rewards:
            reward.sign_()
        steps = torch.stack([row.steps for row in told])
        terminated = torch.stack([row.terminated for row in told])
        first = torch.cat((opening.unsqueeze(0), steps[:-1] == 0))
        block.flags[:rows] = terminated * TERMINATED + opened * SKIP + first * FIRST
        over = torch.stack([row.over for row in told])
        self._file(over, returns, steps)

    def _file(self, over: Tensor, returns: Tensor, steps: Tensor) -> None:
        """Put the episodes that ended, in their order, into the ring of finished ones."""
        place, total = ring_places(over.view(-1), self._totals[0], EPISODES_KEPT)
        ended = torch.stack((self._env_numbers.expand_as(returns), returns, steps.double()), dim=2)
        self._finished.index_copy_(0, place, ended.view(-1, 3))
        self._totals[0] = total

    # --- what is told -----------------------------------------------------------------------

    def take_episodes(self) -> list[Episode]:
        """Episodes finished since the last call; the host waits for the device here.

        Of more than ``EPISODES_KEPT`` between two calls the oldest are left out: reports are means
        over far fewer.
        """
        self._drain()
        episodes, self._waiting = self._waiting, []
        return episodes

    def _drain(self) -> None:
        """Bring finished episodes to the host, or stop where a number was not finite."""
        total, bad = self._totals.tolist()
        if bad:
            raise EnvironmentFault(
                f"'{self.spec.env_id}' gave a NaN or Inf, {bad} so far; no env of a tensor "
                "environment can be reset alone"
            )
        first = max(self._taken, total - EPISODES_KEPT)
        if first < total:
            places = torch.arange(first, total, device=self._device) % EPISODES_KEPT
            for env, reward, length in self._finished[places].tolist():
                self._waiting.append(Episode(int(env), reward, int(length)))
        self._taken = total

    def exploration_rate(self) -> float:
        """ε now, or the mean of the ladder's."""
        if self._ladder is not None:
            return float(self._ladder.mean())
        return schedules.epsilon(self._config, self._clock.progress)

    def rate(self) -> float:
        """Env steps per second of collecting alone. The environments are of no more use after."""
        blocks, elapsed_s = 0, 0.0
        self._synchronize()
        start_s = time.perf_counter()
        while elapsed_s < MEASURE_S:
            self.collect(self._max_rows)
            self._synchronize()
            blocks, elapsed_s = blocks + 1, time.perf_counter() - start_s
        return blocks * self._max_rows * self.num_envs / elapsed_s

    def _synchronize(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)

    # --- checkpoints ------------------------------------------------------------------------

    def state_dict(self) -> StateDict:
        """Everything. Tensors are the actor's own: write them out before collecting."""
        self._drain()
        episodes, _ = self._now
        return {
            "noise": self._noise.get_state(),
            "envs": {**episodes._asdict(), "inner": dict(episodes.inner)},
            "returns": self._returns,
            "explorers": self._explorers,
            "episodes": [[e.env, e.reward, e.length] for e in self._waiting],
        }

    def load_state_dict(self, state: StateDict) -> bool:
        """Restore everything, which always works here: True."""
        envs: dict[str, Any] = state["envs"]
        restore_generator(self._noise, state["noise"])
        copy_episodes(self._now.episodes, Episodes(**{k: envs[k] for k in Episodes._fields}))
        self._now.obs.copy_(self._env.observe(self._now.episodes.inner))
        self._returns.copy_(state["returns"])
        self._explorers.copy_(state["explorers"])
        self._waiting = [Episode(*fields) for fields in state["episodes"]]
        return True

    @staticmethod
    def select(state: StateDict, agents: list[int], own: int) -> StateDict:
        """The state of these agents alone, each with ``own`` envs; episodes are dropped."""
        rows = [env for agent in agents for env in range(agent * own, (agent + 1) * own)]
        envs = {name: state["envs"][name][rows] for name in Episodes._fields if name != "inner"}
        inner = {name: tensor[rows] for name, tensor in state["envs"]["inner"].items()}
        return {
            **state,
            "envs": {**envs, "inner": inner},
            "returns": state["returns"][rows],
            "explorers": state["explorers"][rows],
            "episodes": [],
        }
