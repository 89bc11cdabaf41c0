"""A tensor environment as a ``core.VectorEnv``, for engines whose environments live on the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from qfleet.core import StateDict, Step
from qfleet.envs.device.protocol import Episodes, TensorEnv, begin_episodes, step_episodes
from qfleet.envs.seeding import env_seeds


class TensorEnvs:
    """N environments in one stack of tensors on the CPU; their state, and so a resume, is exact."""

    in_background = False

    def __init__(self, env: TensorEnv, num_envs: int, seed: int) -> None:
        self._env = env
        self.spec, self.num_envs = env.spec, num_envs
        self.seeds = env_seeds(seed, num_envs)
        self._episodes = self._begun()
        self._sent: torch.Tensor | None = None

    def _begun(self) -> Episodes:
        return begin_episodes(self._env, torch.tensor(self.seeds))

    def reset(self) -> NDArray[Any]:
        """Start all envs anew from their seeds: two resets give the same episodes."""
        self._episodes = self._begun()
        obs: NDArray[Any] = self._env.observe(self._episodes.inner).numpy()
        return obs

    def step(self, actions: NDArray[np.int64]) -> Step:
        self.send(actions)
        return self.recv()

    def send(self, actions: NDArray[np.int64]) -> None:
        """Keep the actions: the work is done in ``recv``, for it is done in this thread anyway."""
        assert self._sent is None, "send() before the recv() of the step before"
        self._sent = torch.tensor(actions)

    @torch.no_grad()
    def recv(self) -> Step:
        actions, self._sent = self._sent, None
        assert actions is not None, "recv() without a send() before it"
        self._episodes, step = step_episodes(self._env, self._episodes, actions)
        obs, reward, terminated, truncated, opened = (column.numpy() for column in step)
        return Step(obs, reward, terminated, truncated, opened, opened)

    def state_dict(self) -> StateDict:
        return {**self._episodes._asdict(), "inner": dict(self._episodes.inner)}

    def load_state_dict(self, state: StateDict) -> None:
        self._episodes = Episodes(**{name: state[name] for name in Episodes._fields})

    def close(self) -> None:
        """Nothing is held."""
