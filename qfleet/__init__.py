"""qfleet: DQN-family agents, trained fast on whatever hardware you have.

import qfleet
trained = qfleet.train("CartPole-v1", steps=50_000)
action = qfleet.load(trained.folder).act(observation)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qfleet.agent.policy import Policy
    from qfleet.config.config import Config
    from qfleet.training.api import (
        Scaled,
        Trained,
        TrainedSeeds,
        evaluate,
        load,
        resume,
        scale,
        train,
        train_seeds,
    )
    from qfleet.training.result import Result
    from qfleet.training.run import Callback

__all__ = [
    "Callback",
    "Config",
    "Policy",
    "Result",
    "Scaled",
    "Trained",
    "TrainedSeeds",
    "evaluate",
    "load",
    "resume",
    "scale",
    "train",
    "train_seeds",
]

_HOMES = {"Config": "config", "Policy": "policy", "Callback": "run", "Result": "result"}


def __getattr__(name: str) -> Any:
    """Import on first use: the command line's --help must not wait for torch."""
    if name not in __all__:
        raise AttributeError(f"module 'qfleet' has no attribute '{name}'")
    import importlib

    return getattr(importlib.import_module(f"qfleet.{_HOMES.get(name, 'api')}"), name)
