"""The actor of ``--engine device``: chooses actions and steps tensor environments on the device.

In: a tensor environment and a function from observations to Q-values. Out: ``Block`` on the device
and finished episodes. It is a ``loop.Collector``. A block is a fixed sequence of kernels without
host synchronisation: on devices that record graphs, all its steps are one launch.
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
from qfleet.accelerator.stream_timer import StreamTimer
from qfleet.agent import schedules
from qfleet.agent.actor import legal_actions
from qfleet.agent.inference import behaviour_probability
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
    EnvSpec,
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
from qfleet.storage.state_checks import check_episodes, check_like
from qfleet.telemetry.timers import Timers

CHANCE_LANE, ACTION_LANE = 0, 1
"""Random streams of the actor's own counters; no environment draws from them."""
EPISODES_KEPT = 4096
"""Most finished episodes kept on the device; the oldest ones beyond that are dropped."""
MEASURE_S = 1.0
"""Least duration of a measurement of collecting alone."""


def explorer_counters(seed: int, count: int, device: torch.device) -> Tensor:
    """Return counters for ``draw_exploration``, int64 ``[count]``."""
    return first_counters(torch.tensor(env_seeds(seed, count), device=device))


def draw_exploration(
    counters: Tensor, rate: Tensor | float, spec: EnvSpec
) -> tuple[Tensor, Tensor]:
    """Return which envs explore, a share ``rate`` of them, and draws for ``legal_actions``."""
    explores = draw_uniform(counters, CHANCE_LANE) < rate
    if spec.is_masked:
        return explores, draw_uniform(counters, ACTION_LANE).double()
    return explores, draw_below(counters, ACTION_LANE, spec.num_actions)


def ring_places(over: Tensor, before: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return a place in a ring of ``size`` for each True of ``over``, and the new total.

    ``before``: the total so far. If more entries come at once than fit, only the newest get a
    place: no two get the same one, because a GPU does two writes to one place in any order. All
    others get ``size``.
    """
    at = before + over.cumsum(0) - 1
    total = at[-1] + 1
    kept = over & (at >= total - size)
    return torch.where(kept, at % size, size), total


def running_sums(before: Tensor, reward: Tensor, opened: Tensor) -> Tensor:
    """Return cumulative rewards ``[T, N]``, float64, from ``before`` ``[N]``; 0 where opened."""
    total = before + reward.double().cumsum(0)
    row = torch.arange(len(reward), device=reward.device).unsqueeze(1)
    last_opened = torch.where(opened, row, -1).cummax(0).values
    at_opening = total.gather(0, last_opened.clamp(min=0))
    return total - torch.where(last_opened < 0, 0.0, at_opening)


class Now(NamedTuple):
    """The environments between two steps."""

    episodes: Episodes
    obs: Tensor


class Row(NamedTuple):
    """The results of a step."""

    obs: Tensor
    action: Tensor
    reward: Tensor
    terminated: Tensor
    opened: Tensor
    over: Tensor
    steps: Tensor
    """Steps of the episode, this one included; 0: the next observation opens an episode."""
    greedy: Tensor
    """The best action; of a sampled policy, the action."""


def step_envs(
    env: TensorEnv, now: Now, q: Tensor, explores: Tensor, drawn: Tensor
) -> tuple[Now, Row]:
    """Take the best action by ``q``, or one by ``drawn`` where an env ``explores``."""
    anything = legal_actions(env.spec, now.obs, drawn)
    greedy = q.argmax(dim=1)
    return _act(env, now, torch.where(explores, anything, greedy), greedy)


def _act(env: TensorEnv, now: Now, action: Tensor, greedy: Tensor) -> tuple[Now, Row]:
    after, step = step_episodes(env, now.episodes, action)
    ends = (step.terminated, step.opened, after.over)
    return Now(after, step.obs), Row(now.obs, action, step.reward, *ends, after.steps, greedy)


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
        """``seeds`` (int64 ``[N]``): seeds of the environments, divided evenly among the agents.

        ``q_values`` maps all N observations to ``[N, actions]``; ``resample_noise`` is called
        before every block.
        """
        self._env, self._config, self._device = env, config, device
        self._channel, self._clock, self._resample_noise = channel, clock, resample_noise
        self._working, self.device_time = timers.span("env"), StreamTimer(device)
        self.spec, self.num_envs = env.spec, len(seeds)
        self._max_rows = max_rows
        self._samples = config.head == "actor-critic"
        """Whether actions are drawn from softmax(q)."""
        n = self.num_envs
        self._noise = torch.Generator(device=device).manual_seed(seeds_of_agents[0])
        self._own = n // len(seeds_of_agents)
        """Environments of each agent."""
        with torch.no_grad():
            # Recorded kernels use fixed addresses: these tensors are written in place.
            episodes = hold_episodes(begin_episodes(env, seeds.to(device)))
            self._now = Now(episodes, env.observe(episodes.inner).clone())
            self._returns = torch.zeros(n, dtype=torch.float64, device=device)
            """Unclipped returns of the running episodes."""
            own = [explorer_counters(seed, self._own, device) for seed in seeds_of_agents]
            self._explorers = torch.cat(own)
            """Counters of ``draw_exploration``."""

        def column(dtype: torch.dtype, shape: tuple[int, ...] = ()) -> Tensor:
            return torch.zeros((max_rows, n, *shape), dtype=dtype, device=device)

        # Given noise that is not stored, a noisy network's probabilities say nothing.
        records = bool(config.record) and not (self._samples or config.noisy)
        self._block = Block(
            obs=column(self.spec.torch_dtype, self.spec.frame_shape),
            action=column(torch.int64),
            reward=column(torch.float32),
            flags=column(torch.uint8),
            probability=column(torch.float32) if records else None,
        )
        first, last = schedules.epsilon(config, 0), schedules.epsilon(config, config.steps)
        self._initial = torch.full((n,), first, device=device)
        self.final_eps = torch.full((n,), last, device=device)
        """ε of each environment at the end of the run; it may be changed in place."""
        self._ladder: Tensor | None = None
        if config.exploration_ladder:
            self._ladder = epsilon_ladder(n, config.exploration_final_eps)
            self._initial.copy_(self._ladder)
            self.final_eps.copy_(self._ladder)
        # Share of ε's fall that is over at the start of a block, and its increase in each row.
        self._span = config.exploration_fraction * config.steps
        self._fallen = torch.zeros((), device=device)
        self._rows = torch.arange(max_rows, device=device).view(-1, 1)
        self._falling = self._rows * (self._own / self._span if self._span else 0.0)
        # The extra last place takes all writes that are not of a finished episode.
        self._finished = torch.zeros((EPISODES_KEPT + 1, 3), dtype=torch.float64, device=device)
        self._env_numbers = torch.arange(n, dtype=torch.float64, device=device)
        self._totals = torch.zeros(2, dtype=torch.int64, device=device)
        """Numbers of finished episodes and of non-finite values since the actor was made."""
        self._taken = 0
        self._waiting: list[Episode] = []
        # Compiled separately: the network may be qfleet's own kernels, which need no compiler.
        self._values, self.step = Compilable(q_values), Compilable(self._step_of)
        self._values.on, self.step.on = compiled and compile_values, compiled
        whole = functools.partial(self._rollout, max_rows)
        self._launch: Callable[[], None] = self._recorded(whole) if config.graphs else whole

    # --- blocks -----------------------------------------------------------------------------

    def collect(self, rows: int) -> Block:
        """Step every env ``rows`` times. The block is overwritten by the next one."""
        version = self._channel.refresh()
        with self._working:
            self._resample_noise(self._noise)
            # A kernel argument, not a copy from host memory, which could change before it happens.
            progress = self._clock.progress
            self._fallen.fill_(min(1.0, progress / self._span) if self._span else 1.0)
            with self.device_time:
                if rows == self._max_rows:
                    self._launch()
                else:
                    self._rollout(rows)
        block = self._block
        return Block(
            block.obs[:rows], block.action[:rows], block.reward[:rows], block.flags[:rows], version,
            None if block.probability is None else block.probability[:rows],
        )  # fmt: skip

    @property
    def compile_failure(self) -> str | None:
        """Why compiling a step failed; None if it did not."""
        return self.step.failure or self._values.failure

    def _recorded(self, whole: Callable[[], None]) -> Callable[[], None]:
        """Record a whole block as one launch if the device supports it; restore the state."""
        before = [tensor.clone() for tensor in self._changing()]
        launch = record(whole, self._device, (), "actor")
        for tensor, kept in zip(self._changing(), before, strict=True):
            tensor.copy_(kept)
        return launch

    def _changing(self) -> list[Tensor]:
        """Return the tensors that a block changes, without the block itself."""
        episodes, obs = self._now
        ours = [obs, self._returns, self._explorers, self._finished, self._totals]
        return [*episodes.inner.values(), *episodes[1:], *ours]

    @torch.no_grad()
    def _rollout(self, rows: int) -> None:
        fallen = (self._fallen + self._falling[:rows]).clamp(max=1.0)
        rates = torch.lerp(self._initial, self.final_eps, fallen)
        # Drawn for the whole block at once: a draw of any size is about 24 kernels.
        counters = next_counters(self._explorers, self._rows[:rows] + 1)
        draws: tuple[Tensor, ...] = (
            (draw_uniform(counters, CHANCE_LANE),)
            if self._samples
            else draw_exploration(counters, rates, self.spec)
        )
        now, steps = self._now, list[Row]()
        opening = now.episodes.steps == 0
        for row in range(rows):
            now, step = self.step(now, self._values(now.obs), *(draw[row] for draw in draws))
            steps.append(step)
        self._write(steps, opening, rates)
        copy_episodes(self._now.episodes, now.episodes)
        self._now.obs.copy_(now.obs)
        self._explorers.copy_(counters[-1])

    def _step_of(self, now: Now, q: Tensor, *draws: Tensor) -> tuple[Now, Row]:
        """``draws``: which envs explore, and their actions; for a policy, a number in [0, 1)."""
        if self._samples:
            action = sample_actions(q, *draws)
            return _act(self._env, now, action, action)
        return step_envs(self._env, now, q, *draws)

    def _write(self, written: list[Row], opening: Tensor, rates: Tensor) -> None:
        """Write the collected rows; flags and returns are computed once per block, not per row."""
        columns = [list(column) for column in zip(*written, strict=True)]
        rows, block = len(written), self._block
        obs = torch.stack(columns[0], out=block.obs[:rows])
        torch.stack(columns[1], out=block.action[:rows])
        reward = torch.stack(columns[2], out=block.reward[:rows])
        terminated, opened, over, steps = map(torch.stack, columns[3:7])
        if block.probability is not None:
            greedy = torch.stack(columns[7])
            flat = [part.flatten(0, 1) for part in (obs, block.action[:rows], greedy, rates)]
            chances = behaviour_probability(self.spec, *flat)
            block.probability[:rows] = chances.view(greedy.shape)
        bad = reward.isfinite().logical_not_().sum()
        if obs.is_floating_point():
            bad = bad + obs.isfinite().logical_not_().sum()
        self._totals[1] += bad
        returns = running_sums(self._returns, reward, opened)
        self._returns.copy_(returns[-1])
        if self._config.clip_rewards:
            reward.sign_()
        if self._config.reward_scale != 1.0:
            reward.mul_(self._config.reward_scale)
        first = torch.cat((opening.unsqueeze(0), steps[:-1] == 0))
        block.flags[:rows] = terminated * TERMINATED + opened * SKIP + first * FIRST
        # The finished episodes go into their ring, in their order.
        place, total = ring_places(over.view(-1), self._totals[0], EPISODES_KEPT)
        ended = torch.stack((self._env_numbers.expand_as(returns), returns, steps.double()), dim=2)
        self._finished.index_copy_(0, place, ended.view(-1, 3))
        self._totals[0] = total

    # --- reports ----------------------------------------------------------------------------

    def take_episodes(self) -> list[Episode]:
        """Return episodes finished since the last call; the host waits for the device here.

        If there are more than ``EPISODES_KEPT``, the oldest are left out: reports are means over
        far fewer.
        """
        self._drain()
        episodes, self._waiting = self._waiting, []
        return episodes

    def _drain(self) -> None:
        """Copy finished episodes to the host; raise if a value was not finite."""
        total, bad = self._totals.tolist()
        if bad:
            raise EnvironmentFault(
                f"'{self.spec.env_id}' gave NaN or Inf, {bad} values so far; one environment of "
                "--engine device cannot be reset alone"
            )
        first = max(self._taken, total - EPISODES_KEPT)
        if first < total:
            places = torch.arange(first, total, device=self._device) % EPISODES_KEPT
            for env, reward, length in self._finished[places].tolist():
                self._waiting.append(Episode(int(env), reward, int(length)))
        self._taken = total

    def exploration_rate(self) -> float:
        """Return ε now, or the mean of the ladder."""
        if self._ladder is not None:
            return float(self._ladder.mean())
        return schedules.epsilon(self._config, self._clock.progress)

    def rate(self) -> float:
        """Measure env steps per second of collecting alone, at the end of a run."""
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
        """Return the whole state. Its tensors are the actor's own: collecting changes them."""
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
        """Restore the whole state; return True, because tensor environments have a state."""
        envs: dict[str, Any] = state["envs"]
        check_like(state, self.state_dict(), "actor", finite=False, free=("episodes",))
        restore_generator(self._noise, state["noise"])
        copy_episodes(self._now.episodes, Episodes(**{k: envs[k] for k in Episodes._fields}))
        self._now.obs.copy_(self._env.observe(self._now.episodes.inner))
        self._returns.copy_(state["returns"])
        self._explorers.copy_(state["explorers"])
        self._waiting = check_episodes(state["episodes"], self.num_envs)
        return True

    @staticmethod
    def select(state: StateDict, agents: list[int], own: int) -> StateDict:
        """Return the state of these agents alone, with ``own`` envs each; drop episodes."""
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
