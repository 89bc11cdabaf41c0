"""Environments that fail on rank 1 of an all-reduce alone."""

from __future__ import annotations

import os
from typing import Any

from gymnasium.envs.classic_control.cartpole import CartPoleEnv


class FailsOnRank1(CartPoleEnv):
    """Every step raises there."""

    def step(self, action: Any) -> Any:
        if os.environ.get("RANK") == "1":
            raise RuntimeError("broken on purpose")
        return super().step(action)


class ExitsOnRank1(CartPoleEnv):
    """The process ends there, without a word, before the ranks are connected."""

    def __init__(self, **kwargs: Any) -> None:
        if os.environ.get("RANK") == "1":
            os._exit(3)
        super().__init__(**kwargs)
