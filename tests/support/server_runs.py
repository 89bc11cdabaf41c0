"""Configurations of the parameter server, and the weights that a run of it begins with."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from qfleet.config.config import Config
from qfleet.config.validation import validate
from qfleet.engines.registry import build
from qfleet.telemetry.faults import FaultLog
from support.configs import tiny_config

STEPS = 800


def make_config(**fields: Any) -> Config:
    told = {
        "engine": "parameter-server", "workers": 1, "update": "sync", "steps": STEPS,
        "learning_starts": 200, "train_freq": 8, "gradient_steps": 2,
        "target_update_interval": 100, "threads": 1, "device": "cpu",
        "optimizer": "adam", "learning_rate": 1e-3, "max_grad_norm": 0.5, "buffer_size": 1000,
    }  # fmt: skip
    return validate(tiny_config(**{"algo": "double-dqn", **told, **fields}))


def first_weights(config: Config) -> Tensor:
    parts = build(config.replace(engine="serial"), FaultLog())
    parts.close()
    return parts.learner.weights.data.clone()
