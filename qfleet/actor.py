"""The actor: chooses actions, steps the environments, and hands over blocks of rows.

In: a vector environment and a network. Out: ``Block`` (what to learn from) and finished episodes
(what to report). It knows nothing of memories, learners or processes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from qfleet import schedules
from qfleet.acting import make_greedy
from qfleet.algorithms.exploration import epsilon_ladder
from qfleet.config import Config
from qfleet.core import (
    FIRST,
    SKIP,
    TERMINATED,
    Block,
    Clock,
    Episode,
    StateDict,
    VectorEnv,
    WeightsChannel,
)
from qfleet.networks import QNetwork
from qfleet.telemetry.timers import Timers


class Actor:
    def __init__(
        self,
        envs: VectorEnv,
        network: QNetwork,
        channel: WeightsChannel,
        config: Config,
        clock: Clock,
        timers: Timers,
        device: torch.device,
        max_rows: int,
        seed: int,
    ) -> None:
        self._envs, self._network, self._channel = envs, network, channel
        self._config, self._clock = config, clock
        self._greedy = make_greedy(network, device)
        self._acting, self._stepping = timers.span("act"), timers.span("env")
        self._random = np.random.default_rng(seed)
        self._noise = torch.Generator(device=device).manual_seed(seed)
        spec, n = envs.spec, envs.num_envs
        self._stacked = spec.frame_stack > 1
        self._ladder = (
            epsilon_ladder(n, config.exploration_final_eps).numpy()
            if config.exploration_ladder
            else None
        )
        # One block, reused: whoever receives it copies it before the next is collected.
        self._frames = np.zeros((max_rows, n, *spec.frame_shape), dtype=spec.obs_dtype)
        self._actions = np.zeros((max_rows, n), dtype=np.int64)
        self._rewards = np.zeros((max_rows, n), dtype=np.float64)
        self._terminated = np.zeros((max_rows, n), dtype=np.bool_)
        self._truncated = np.zeros((max_rows, n), dtype=np.bool_)
        self._invalid = np.zeros((max_rows, n), dtype=np.bool_)
        self._fresh = np.zeros((max_rows, n), dtype=np.bool_)
        self._life_lost = np.zeros((max_rows, n), dtype=np.bool_)
        self._obs: NDArray[Any] = np.array(envs.reset())
        self._first = np.ones(n, dtype=np.bool_)
        self._returns = np.zeros(n, dtype=np.float64)
        self._lengths = np.zeros(n, dtype=np.int64)
        self._episodes: list[Episode] = []

    def collect(self, rows: int) -> Block:
        """Step every env ``rows`` times with the newest weights."""
        version = self._channel.refresh()
        n = self._envs.num_envs
        if self._config.noisy:
            self._network.resample_noise(self._noise)
        # Drawn for the whole block at once: the draws cost more than their use.
        chance = self._random.random((rows, n))
        random_actions = self._random.integers(self._envs.spec.num_actions, size=(rows, n))
        for row in range(rows):
            with self._acting:
                actions = self._choose(chance[row], random_actions[row])
            # Before the step: envs may overwrite what they returned last time.
            self._frames[row] = self._obs[:, -1] if self._stacked else self._obs
            self._actions[row] = actions
            with self._stepping:
                step = self._envs.step(actions)
            self._rewards[row] = step.reward
            self._terminated[row] = step.terminated
            self._truncated[row] = step.truncated
            self._invalid[row] = step.invalid
            self._fresh[row] = step.fresh
            if step.life_lost is not None:
                self._life_lost[row] = step.life_lost
            self._obs = step.obs
            self._clock.env_steps += n
        return self._block(rows, version)

    def _block(self, rows: int, version: int) -> Block:
        """The rows just collected: what can be worked out once per block is not done per row."""
        self._count_episodes(rows)
        ended = self._terminated[:rows] | self._life_lost[:rows]
        first = np.concatenate((self._first[None], self._fresh[: rows - 1]))
        flags = ended * np.uint8(TERMINATED)
        flags += self._invalid[:rows] * np.uint8(SKIP)
        flags += first * np.uint8(FIRST)
        self._first = self._fresh[rows - 1].copy()
        rewards = self._rewards[:rows]
        rewards = np.sign(rewards) if self._config.clip_rewards else rewards
        return Block(
            obs=torch.from_numpy(self._frames[:rows]),
            action=torch.from_numpy(self._actions[:rows]),
            reward=torch.from_numpy(rewards.astype(np.float32)),
            flags=torch.from_numpy(flags),
            version=version,
        )

    def _choose(
        self, chance: NDArray[np.float64], random_actions: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        if self._ladder is not None:
            explore = chance < self._ladder
        else:
            explore = chance < self.exploration_rate()
        if explore.all():
            return random_actions
        greedy = self._greedy(self._obs)
        return np.where(explore, random_actions, greedy) if explore.any() else greedy

    def _count_episodes(self, rows: int) -> None:
        done = self._terminated[:rows] | self._truncated[:rows]
        fresh = self._fresh[:rows]
        start = 0
        for row in np.flatnonzero((done | fresh).any(axis=1)).tolist():
            self._returns += self._rewards[start : row + 1].sum(axis=0)
            self._lengths += row + 1 - start
            start = row + 1
            for env in np.flatnonzero(done[row]).tolist():
                self._episodes.append(
                    Episode(env, float(self._returns[env]), int(self._lengths[env]))
                )
            self._returns[fresh[row]] = 0.0
            self._lengths[fresh[row]] = 0
        self._returns += self._rewards[start:rows].sum(axis=0)
        self._lengths += rows - start

    def exploration_rate(self) -> float:
        """ε now, or the mean of the ladder's."""
        if self._ladder is not None:
            return float(self._ladder.mean())
        return schedules.epsilon(self._config, self._clock.env_steps)

    def take_episodes(self) -> list[Episode]:
        """Episodes finished since the last call."""
        episodes, self._episodes = self._episodes, []
        return episodes

    def state_dict(self) -> StateDict:
        return {
            "random": self._random.bit_generator.state,
            "noise": self._noise.get_state(),
            "envs": self._envs.state_dict(),
            "obs": torch.from_numpy(np.array(self._obs)),
            "first": self._first.tolist(),
            "returns": self._returns.tolist(),
            "lengths": self._lengths.tolist(),
            "episodes": [[e.env, e.reward, e.length] for e in self._episodes],
        }

    def load_state_dict(self, state: StateDict) -> bool:
        """Restore everything; False if the envs had to start new episodes instead."""
        self._random.bit_generator.state = state["random"]
        self._noise.set_state(state["noise"])
        self._episodes = [Episode(*fields) for fields in state["episodes"]]
        if state["envs"] is None:
            return False
        self._envs.load_state_dict(state["envs"])
        self._obs = state["obs"].numpy()
        self._first = np.array(state["first"], dtype=np.bool_)
        self._returns = np.array(state["returns"], dtype=np.float64)
        self._lengths = np.array(state["lengths"], dtype=np.int64)
        return True
