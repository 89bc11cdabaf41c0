"""Environments with spaces that are converted, and environments of other libraries' kinds."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete

PICTURE = Box(0, 255, (6, 7, 3), np.uint8)
SPACES: dict[str, spaces.Space[Any]] = {
    "nothing": Box(-1, 1, (0,)),
    "dict": spaces.Dict({"speed": Box(-1, 3, (2,), np.float32), "gear": Discrete(3, start=1)}),
    "image": spaces.Dict(
        {"eye": PICTURE, "gear": Discrete(3), "arm": Box(-1, 3, (1,)), "said": spaces.Text(4)}
    ),
    "tuple": spaces.Tuple((Discrete(2), spaces.Dict({"a": MultiBinary(2)}), Box(0, 1, (), float))),
    "bits": MultiBinary((2, 2)),
    "digits": MultiDiscrete([2, 3], start=[5, 0]),
    "text": spaces.Text(4),
}


class Sampled(gymnasium.Env[Any, Any]):
    """Episodes of five sampled observations. It can be resumed within an episode."""

    def __init__(self, space: str = "dict", actions: str = "two", reward: float = 1.0) -> None:
        self.observation_space = SPACES[space]
        self.action_space = {
            "two": Discrete(2),
            "digits": MultiDiscrete([2, 3], start=[0, 4]),
            "bits": MultiBinary(2),
            "box": Box(np.array([-1, 0]), np.array([1, 4]), dtype=np.float32),
        }[actions]
        self.reward, self.actions = reward, list[Any]()

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.time = 0
        return self._observe(), {}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action), action
        self.actions.append(action)
        self.time += 1
        return self._observe(), self.reward, self.time == 5, False, {}

    def _observe(self) -> Any:
        self.observation_space.seed(int(self.np_random.integers(2**31)))
        return self.observation_space.sample()

    def get_state(self) -> dict[str, Any]:
        return {"time": self.time}

    def set_state(self, state: dict[str, Any]) -> None:
        self.time = state["time"]


class Lamps(gymnasium.Env[Any, Any]):
    """One step: each of three lamps shows which of three positions its switch must have."""

    observation_space = MultiDiscrete([3, 3, 3])
    action_space = MultiDiscrete([3, 3, 3])

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.shown = self.np_random.integers(3, size=3)
        return self.shown, {}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action)
        return self.shown, float((action == self.shown).mean()), True, False, {}


class Drifting(gymnasium.Env[Any, Any]):
    """Observations far from 0 and of very different sizes. It can be resumed."""

    observation_space = Box(-np.inf, np.inf, (3,), np.float32)
    action_space = Discrete(2)

    def __init__(self, offset: float = 100.0) -> None:
        self.offset, self.time = offset, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.time = 0
        return self._observe(), {}

    def step(self, action: Any) -> Any:
        self.time += 1
        return self._observe(), float(action), self.time == 20, False, {}

    def _observe(self) -> Any:
        noise = self.np_random.normal(size=3)
        return (np.array([self.offset, 0, 1]) + noise * [50, 1, 1e-3]).astype(np.float32)

    def get_state(self) -> dict[str, Any]:
        return {"time": self.time}

    def set_state(self, state: dict[str, Any]) -> None:
        self.time = state["time"]


class Doubled(gymnasium.RewardWrapper[Any, Any]):
    def reward(self, reward: Any) -> Any:
        return 2 * reward


class Plus(gymnasium.RewardWrapper[Any, Any]):
    def reward(self, reward: Any) -> Any:
        return reward + 1


class SeveralAgents:
    """An environment with the interface of PettingZoo."""

    possible_agents = ("first", "second")


class FourValues(Drifting):
    """A gymnasium.Env whose step returns four values, as in old Gym."""

    def step(self, action: Any) -> Any:
        obs, reward, terminated, _, info = super().step(action)
        return obs, reward, terminated, info


class NoSeed(Drifting):
    """A gymnasium.Env whose reset takes no seed, as in old Gym."""

    def reset(self) -> Any:  # type: ignore[override]
        return super().reset()[0]


OldGym = type("OldGym", (), {"__module__": "gym.core", "step": None})


class NoSpaces(gymnasium.Env[Any, Any]):
    """Forgets to set its spaces."""


class Flatten(torch.nn.Module):
    """A user's torso of pixels as they are."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        return obs.flatten(1).float()
