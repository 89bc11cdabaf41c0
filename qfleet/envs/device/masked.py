"""A tensor environment that gives masks of legal actions, with observations that hold them."""

from __future__ import annotations

import torch
from torch import Tensor

from qfleet.envs.device.protocol import Outcome, State, TensorEnv
from qfleet.envs.masks import METHOD


class MaskedTensorEnv:
    """A tensor environment with masked observations."""

    def __init__(self, env: TensorEnv) -> None:
        self._env = env
        self.spec, self.max_episode_steps = env.spec.with_masks(), env.max_episode_steps

    def begin(self, counters: Tensor) -> State:
        return self._env.begin(counters)

    def advance(self, state: State, action: Tensor, counters: Tensor) -> Outcome:
        return self._env.advance(state, action, counters)

    def observe(self, state: State) -> Tensor:
        obs = self._env.observe(state)
        legal: Tensor = getattr(self._env, METHOD)(state)
        # The last state of an episode may have no legal action.
        legal = legal | ~legal.any(1, keepdim=True)
        return torch.cat((obs.reshape(len(obs), -1), legal.to(obs.dtype)), dim=1)
