"""The actor: chooses actions, steps the environments, and hands over blocks of rows.

In: one or more groups of environments and an inference. Out: ``Block`` for learning and finished
episodes for reports. It does not depend on memories, learners, processes or devices.

Several groups take turns: while actions of one are computed, the others step. Their steps stay *in
flight* from one block to the next: a group that is received gets new actions at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from qfleet.agent import schedules
from qfleet.agent.inference import Inference, behaviour_probability
from qfleet.algorithms.exploration import epsilon_ladder, sample_legal
from qfleet.config.config import Config
from qfleet.core.types import (
    FIRST,
    SKIP,
    TERMINATED,
    AnyArray,
    Block,
    Clock,
    EnvSpec,
    Episode,
    StateDict,
    Step,
    VectorEnv,
    WeightsChannel,
)
from qfleet.envs.state import as_dict
from qfleet.storage.state_checks import check_episodes, check_like
from qfleet.telemetry.timers import Timers


def draw_actions(
    spec: EnvSpec, random: np.random.Generator, shape: int | tuple[int, ...]
) -> NDArray[Any]:
    """Return actions; with masks, numbers in [0, 1) from which ``legal_actions`` makes them."""
    if spec.is_masked:
        return random.random(shape)
    return random.integers(spec.num_actions, size=shape)


def legal_actions(spec: EnvSpec, obs: AnyArray, drawn: AnyArray) -> AnyArray:
    """Return the drawn actions ``[B]`` for these observations, all of them legal."""
    return sample_legal(spec.legal(obs), drawn) if spec.is_masked else drawn


class Rows:
    """The columns of one block while it is being filled."""

    def __init__(self, rows: int, num_envs: int, frames: NDArray[Any]) -> None:
        shape = (rows, num_envs)
        self.frames = frames
        self.actions = np.zeros(shape, dtype=np.int64)
        self.probabilities = np.full(shape, np.nan, dtype=np.float32)
        self.rewards = np.zeros(shape, dtype=np.float64)
        ends = np.zeros((5, *shape), dtype=np.bool_)
        self.terminated, self.truncated, self.invalid, self.fresh, self.life_lost = ends

    def record(self, row: int, envs: slice, step: Step) -> None:
        self.rewards[row, envs] = step.reward
        self.terminated[row, envs] = step.terminated
        self.truncated[row, envs] = step.truncated
        self.invalid[row, envs] = step.invalid
        self.fresh[row, envs] = step.fresh
        if step.life_lost is not None:
            self.life_lost[row, envs] = step.life_lost


class Actor:
    def __init__(
        self,
        groups: Sequence[VectorEnv],
        inference: Inference,
        config: Config,
        timers: Timers,
        max_rows: int,
        seed: int,
        blocks: int = 1,
        ladder: NDArray[np.float32] | None = None,
        steps_per_row: int | None = None,
    ) -> None:
        """``blocks``: number of buffers; a block is overwritten after that many calls.

        ``ladder``: the constant ε of each env; None: computed from the configuration.
        ``steps_per_row``: by how much the run's clock advances per row; None: by these envs.
        """
        self._groups, self._inference, self._config = groups, inference, config
        self._records = bool(config.record) and config.head != "actor-critic" and not config.noisy
        self._acting, self._stepping = timers.span("act"), timers.span("env")
        self._random = np.random.default_rng(seed)
        self.spec = groups[0].spec
        self.num_envs = n = sum(group.num_envs for group in groups)
        ends = np.cumsum([group.num_envs for group in groups]).tolist()
        self._columns = [slice(end - g.num_envs, end) for g, end in zip(groups, ends, strict=True)]
        self._steps_per_row = steps_per_row or n
        self._keeps_in_flight = len(groups) > 1
        self._in_flight = False
        self._sent_with = 0
        """Version of the weights that chose the actions in flight."""
        self._stacked = self.spec.frame_stack > 1
        if ladder is None and config.exploration_ladder:
            ladder = epsilon_ladder(n, config.exploration_final_eps).numpy()
        self._ladder = ladder
        frames = inference.host_frames((blocks, max_rows, n, *self.spec.frame_shape))
        self._blocks = [Rows(max_rows, n, frames[i]) for i in range(blocks)]
        self._newest = 0
        self._obs: list[NDArray[Any]] = [np.array(group.reset()) for group in groups]
        self._first = np.ones(n, dtype=np.bool_)
        """Whether the newest observation of each env opens an episode."""
        self._returns = np.zeros(n, dtype=np.float64)
        self._lengths = np.zeros(n, dtype=np.int64)
        self._episodes: list[Episode] = []

    def collect(self, rows: int, version: int, env_steps: int) -> Block:
        """Step every env ``rows`` times; ``version`` is that of the weights in use.

        ``env_steps`` is the clock of the whole run at the first of these rows; ε depends on it.
        """
        n = self.num_envs
        self._inference.begin_block()
        # Drawn for the whole block at once: many small draws would cost more.
        chance = self._random.random((rows, n))
        random_actions = draw_actions(self.spec, self._random, (rows, n))
        number, then = self._newest, (self._newest + 1) % len(self._blocks)
        opening = self._first.copy()
        if self._keeps_in_flight and not self._in_flight:
            # No observation has been received yet: without ε = 0, the first actions are random.
            start = draw_actions(self.spec, self._random, n)
            for group in range(len(self._groups)):
                self._send(group, number, 0, np.zeros(n), start, env_steps)
            self._sent_with = version
        if not self._keeps_in_flight:
            for row in range(rows):
                now = env_steps + row * self._steps_per_row
                self._send(0, number, row, chance[row], random_actions[row], now)
                self._receive(0, number, row)
        else:
            for row in range(rows):
                at = (number, row + 1) if row + 1 < rows else (then, 0)
                now = env_steps + row * self._steps_per_row
                for group in range(len(self._groups)):
                    self._receive(group, number, row)
                    self._send(group, *at, chance[row], random_actions[row], now)
            self._in_flight = True
            # Row 0 was chosen in the call before: a block is as old as its oldest row.
            version, self._sent_with = self._sent_with, version
        self._newest = then
        return self._block(number, rows, opening, version)

    def _send(
        self,
        group: int,
        block: int,
        row: int,
        chance: NDArray[np.float64],
        random_actions: NDArray[Any],
        env_steps: int,
    ) -> None:
        """Choose the actions of this row and send them to the group's envs."""
        envs, obs, columns = self._groups[group], self._obs[group], self._columns[group]
        filling = self._blocks[block]
        with self._acting:
            # Before the step: envs may overwrite what they returned last time.
            filling.frames[row, columns] = obs[:, -1] if self._stacked else obs
            rate = (
                schedules.epsilon(self._config, env_steps)
                if self._ladder is None
                else self._ladder[columns]
            )
            explore = chance[columns] < rate
            greedy = self._inference.choose(
                group, block, row, columns, obs, self._first[columns],
                needed=self._records or not explore.all(),
            )  # fmt: skip
            actions = legal_actions(self.spec, obs, random_actions[columns])
            if greedy is not None:
                actions = np.where(explore, actions, greedy) if explore.any() else greedy
            filling.actions[row, columns] = actions
            if self._records:
                rate = np.maximum(rate, explore & (chance[columns] == 0))  # 0: the first row
                chances = behaviour_probability(self.spec, obs, actions, greedy, rate)
                filling.probabilities[row, columns] = chances
        with self._stepping:
            envs.send(actions)

    def _receive(self, group: int, block: int, row: int) -> None:
        columns = self._columns[group]
        with self._stepping:
            step = self._groups[group].recv()
        self._blocks[block].record(row, columns, step)
        self._obs[group] = step.obs
        self._first[columns] = step.fresh

    def _block(self, number: int, rows: int, opening: NDArray[np.bool_], version: int) -> Block:
        """Return the collected rows; flags and episodes are computed once per block."""
        filled = self._blocks[number]
        self._count_episodes(filled, rows)
        flags = (filled.terminated[:rows] | filled.life_lost[:rows]) * np.uint8(TERMINATED)
        flags += filled.invalid[:rows] * np.uint8(SKIP)
        flags += np.concatenate((opening[None], filled.fresh[: rows - 1])) * np.uint8(FIRST)
        rewards = filled.rewards[:rows]
        rewards = np.sign(rewards) if self._config.clip_rewards else rewards
        block = Block(
            obs=torch.from_numpy(filled.frames[:rows]),
            action=torch.from_numpy(filled.actions[:rows]),
            reward=torch.from_numpy((rewards * self._config.reward_scale).astype(np.float32)),
            flags=torch.from_numpy(flags),
            version=version,
            probability=torch.from_numpy(filled.probabilities[:rows]) if self._records else None,
        )
        return self._inference.deliver(number, block)

    def _count_episodes(self, filled: Rows, rows: int) -> None:
        done = filled.terminated[:rows] | filled.truncated[:rows]
        fresh = filled.fresh[:rows]
        start = 0
        for row in np.flatnonzero((done | fresh).any(axis=1)).tolist():
            self._returns += filled.rewards[start : row + 1].sum(axis=0)
            self._lengths += row + 1 - start
            start = row + 1
            for env in np.flatnonzero(done[row]).tolist():
                self._episodes.append(
                    Episode(env, float(self._returns[env]), int(self._lengths[env]))
                )
            self._returns[fresh[row]] = 0.0
            self._lengths[fresh[row]] = 0
        self._returns += filled.rewards[start:rows].sum(axis=0)
        self._lengths += rows - start

    def land(self) -> None:
        """Receive and drop the steps in flight, at the end of a run."""
        if self._in_flight:
            for group in self._groups:
                group.recv()
            self._in_flight = False

    def exploration_rate(self, env_steps: int) -> float:
        """Return ε at ``env_steps`` of the run, or the mean of the ladder."""
        if self._ladder is not None:
            return float(self._ladder.mean())
        return schedules.epsilon(self._config, env_steps)

    def take_episodes(self) -> list[Episode]:
        """Return the episodes finished since the last call."""
        episodes, self._episodes = self._episodes, []
        return episodes

    def state_dict(self) -> StateDict:
        states = [None if self._in_flight else group.state_dict() for group in self._groups]
        return {
            "random": self._random.bit_generator.state,
            "noise": self._inference.noise_state(),
            "envs": None if None in states else as_dict(states),
            "obs": as_dict([torch.from_numpy(np.array(obs)) for obs in self._obs]),
            "first": self._first.tolist(),
            "returns": self._returns.tolist(),
            "lengths": self._lengths.tolist(),
            "episodes": [[e.env, e.reward, e.length] for e in self._episodes],
        }

    def load_state_dict(self, state: StateDict) -> bool:
        """Restore everything; return False if the envs had to start new episodes instead."""
        check_like(state, self.state_dict(), "actor", free=("random", "envs", "episodes"))
        self._random.bit_generator.state = state["random"]
        self._inference.load_noise_state(state["noise"])
        self._episodes = check_episodes(state["episodes"], len(self._first))
        if state["envs"] is None:
            return False
        for group, saved in zip(self._groups, state["envs"].values(), strict=True):
            group.load_state_dict(saved)
        self._obs = [obs.numpy() for obs in state["obs"].values()]
        self._first = np.array(state["first"], dtype=np.bool_)
        self._returns = np.array(state["returns"], dtype=np.float64)
        self._lengths = np.array(state["lengths"], dtype=np.int64)
        return True


class Inline:
    """A collector that calls the actor when its block is needed."""

    def __init__(self, actor: Actor, channel: WeightsChannel, clock: Clock) -> None:
        self._actor, self._channel, self._clock = actor, channel, clock

    def collect(self, rows: int) -> Block:
        return self._actor.collect(rows, self._channel.refresh(), self._clock.progress)

    def take_episodes(self) -> list[Episode]:
        return self._actor.take_episodes()

    def exploration_rate(self) -> float:
        return self._actor.exploration_rate(self._clock.progress)

    def state_dict(self) -> StateDict:
        return self._actor.state_dict()

    def load_state_dict(self, state: StateDict) -> bool:
        return self._actor.load_state_dict(state)
