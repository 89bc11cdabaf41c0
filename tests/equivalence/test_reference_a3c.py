"""The serial engine follows the one-page A3C: the same episodes, and weights equal to rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from qfleet.config.presets import resolve
from qfleet.config.validation import validate
from qfleet.engines import serial
from qfleet.engines.registry import build
from qfleet.lab.reference_a3c import train_reference
from qfleet.telemetry.faults import FaultLog

FIELDS: dict[str, Any] = {
    "steps": 1000,
    "envs": 4,
    "vectorize": "sync",
    "train_freq": 20,
    "batch_size": 20,
    "learning_rate": 1e-2,
    "value_weight": 0.3,
    "entropy_weight": 0.05,
    "target_update_interval": 70,
    "tau": 0.3,
    "net_arch": (16, 16),
    "seed": 3,
}
TEXTBOOK: dict[str, Any] = {
    "target_network": True,
    "target_update_interval": 0,
    "separate_networks": True,
    "steps": 992,  # whole rollouts
    "value_learning_rate": 2e-2,
    "sum_gradients": True,
    "value_weight": 0.5,
    "entropy_weight": 0.0,
    "max_grad_norm": 0.0,
    "td_lambda": 1.0,
    "lr_schedule": "constant",
    "envs": 1,
    "train_freq": 16,
    "batch_size": 16,
}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"target_network": True},
        {"layer_norm": True, "max_grad_norm": 5.0, "seed": 5},
        TEXTBOOK,
        {**TEXTBOOK, "optimizer": "sgd", "learning_rate": 1e-3, "value_learning_rate": 3e-3},
    ],
    ids=["plain", "target network", "layer norm", "textbook", "textbook with SGD"],
)
def test_serial_follows_the_reference(changes: dict[str, object]) -> None:
    config, _ = resolve("CartPole-v1", "a3c", "none", fields={**FIELDS, **changes})
    parts = build(validate(config), FaultLog())
    before = parts.learner.weights.data.clone()
    serial.run(parts, lambda: parts.clock.env_steps < config.steps)
    episodes = [episode.reward for episode in parts.collector.take_episodes()]
    parts.close()
    reference, returns = train_reference(config)
    assert episodes == returns
    assert len(episodes) > 10
    theirs = torch.cat([weight.reshape(-1) for weight in reference])
    torch.testing.assert_close(parts.learner.weights.data, theirs, rtol=1e-3, atol=1e-4)
    assert (parts.learner.weights.data - before).abs().max() > 0.04
