"""qfleet: DQN-family agents, trained fast on whatever hardware you have.

import qfleet
trained = qfleet.train("CartPole-v1", steps=50_000)
action = qfleet.load(trained.folder).act(observation)

Every public name is an attribute of this package; modules below it may move.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qfleet.agent.evaluation import Evaluation
    from qfleet.agent.policy import Policy
    from qfleet.config.config import Config
    from qfleet.core.counter_rng import draw_below, draw_uniform
    from qfleet.core.errors import ConfigError, QfleetError
    from qfleet.core.types import EnvSpec
    from qfleet.deploy.client import PolicyClient
    from qfleet.envs.device.protocol import Outcome, State, TensorEnv
    from qfleet.training.api import evaluate, load, resume, train, train_seeds
    from qfleet.training.callbacks import Callback
    from qfleet.training.model import DQN
    from qfleet.training.result import Result
    from qfleet.training.run import Run
    from qfleet.training.run_state import RunOptions
    from qfleet.training.scaling import Scaled, scale
    from qfleet.training.trained import Trained, TrainedSeeds

_HOMES = {
    "DQN": "training.model",
    "Callback": "training.callbacks",
    "Config": "config.config",
    "ConfigError": "core.errors",
    "EnvSpec": "core.types",
    "Evaluation": "agent.evaluation",
    "Outcome": "envs.device.protocol",
    "Policy": "agent.policy",
    "PolicyClient": "deploy.client",
    "QfleetError": "core.errors",
    "Result": "training.result",
    "Run": "training.run",
    "RunOptions": "training.run_state",
    "Scaled": "training.scaling",
    "State": "envs.device.protocol",
    "TensorEnv": "envs.device.protocol",
    "Trained": "training.trained",
    "TrainedSeeds": "training.trained",
    "draw_below": "core.counter_rng",
    "draw_uniform": "core.counter_rng",
    "evaluate": "training.api",
    "load": "training.api",
    "resume": "training.api",
    "scale": "training.scaling",
    "train": "training.api",
    "train_seeds": "training.api",
}
"""Public name → module."""

__all__ = [
    "DQN",
    "Callback",
    "Config",
    "ConfigError",
    "EnvSpec",
    "Evaluation",
    "Outcome",
    "Policy",
    "PolicyClient",
    "QfleetError",
    "Result",
    "Run",
    "RunOptions",
    "Scaled",
    "State",
    "TensorEnv",
    "Trained",
    "TrainedSeeds",
    "draw_below",
    "draw_uniform",
    "evaluate",
    "load",
    "resume",
    "scale",
    "train",
    "train_seeds",
]


def __getattr__(name: str) -> Any:
    """Import on first use: the command line's --help must not wait for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'qfleet' has no attribute '{name}'")
    import importlib

    from qfleet.core.errors import check_platform

    check_platform()
    return getattr(importlib.import_module(f"qfleet.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    """Return the public names, which notebooks complete, before they are imported."""
    return __all__
