"""Environments that give masks of legal actions and fail if an action is illegal."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from torch import Tensor

from qfleet.core.types import EnvSpec
from qfleet.envs.device.protocol import Outcome, State, TensorEnv

ACTIONS, LENGTH = 5, 8


class IllegalAction(RuntimeError):
    pass


class Locks(gymnasium.Env[Any, Any]):
    """Random actions are legal at every step; the smallest legal one pays.

    The last state has no legal action. ``kind``: of the observations, ``vector``, ``image`` or
    ``discrete``; ``by``: how masks are given.
    """

    action_space = Discrete(ACTIONS, start=2)

    def __init__(self, kind: str = "vector", by: str = "info", broken: bool = False) -> None:
        self.kind, self.broken = kind, broken
        self.observation_space = {
            "vector": Box(0, 1, (3,), np.float32),
            "image": Box(0, 255, (6, 6), np.uint8),
            "discrete": Discrete(4, start=1),
        }[kind]
        if by == "method":
            self.action_masks = lambda: self.legal

    def _now(self, over: bool = False) -> tuple[Any, dict[str, Any]]:
        self.legal = self.np_random.random(ACTIONS) < 0.4
        self.legal[self.np_random.integers(ACTIONS)] = True
        if over:
            self.legal[:] = False
        obs = {
            "vector": np.full(3, self.legal[0], np.float32),
            "image": np.full((6, 6), 255 * self.legal[0], np.uint8),
            "discrete": 1 + int(self.legal[0]) + 2 * int(self.legal[1]),
        }[self.kind]
        mask = self.legal[:2] if self.broken else self.legal.astype(np.int8)
        return obs, {} if hasattr(self, "action_masks") else {"action_mask": mask}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed, options=options)
        self.steps = 0
        return self._now()

    def step(self, action: Any) -> Any:
        if not self.legal[action - 2]:
            raise IllegalAction(f"{action} of {self.legal}")
        reward = float(action - 2 == self.legal.argmax())
        self.steps += 1
        over = self.steps == LENGTH
        obs, info = self._now(over)
        return obs, reward, over, False, info


class TensorLocks(TensorEnv):
    """A ring of cells as tensors: in cell c, action a is legal if (a + c) % 3 is not 0.

    An illegal action gives the reward NaN, which ends a run with an error.
    """

    def __init__(self) -> None:
        self.spec = EnvSpec("TensorLocks", (6,), "float32", ACTIONS)
        self.max_episode_steps = LENGTH

    def begin(self, counters: Tensor) -> State:
        return {"cell": torch.zeros_like(counters)}

    def action_masks(self, state: State) -> Tensor:
        actions = torch.arange(ACTIONS, device=state["cell"].device)
        return (actions + state["cell"].unsqueeze(1)) % 3 != 0

    def advance(self, state: State, action: Tensor, counters: Tensor) -> Outcome:
        del counters
        legal = self.action_masks(state).gather(1, action.unsqueeze(1)).squeeze(1)
        reward = torch.where(legal, (action == 4).float(), torch.nan)
        cell = (state["cell"] + action + 1) % 6
        return Outcome({"cell": cell}, reward, torch.zeros_like(legal))

    def observe(self, state: State) -> Tensor:
        return torch.nn.functional.one_hot(state["cell"], 6).float()
