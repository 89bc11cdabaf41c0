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


@pytest.mark.parametrize(
    "changes",
    [{}, {"target_network": True}, {"layer_norm": True, "max_grad_norm": 5.0, "seed": 5}],
    ids=["plain", "target network", "layer norm"],
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
