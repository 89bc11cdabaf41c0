"""The serial engine follows the one-page PQN: the same episodes, and weights equal to rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from qfleet.config.config import Config
from qfleet.config.presets import resolve
from qfleet.config.validation import validate
from qfleet.engines import serial
from qfleet.engines.registry import build
from qfleet.lab.reference_pqn import train_reference
from qfleet.telemetry.faults import FaultLog

FIELDS: dict[str, Any] = {
    "steps": 768,
    "envs": 4,
    "vectorize": "sync",
    "train_freq": 64,
    "gradient_steps": 8,
    "batch_size": 16,
    "learning_rate": 1e-2,
    "td_lambda": 0.8,
    "exploration_fraction": 0.3,
    "net_arch": (16, 16),
    "max_grad_norm": 0.5,  # small enough to clip often
    "seed": 3,
}


def train(config: Config) -> tuple[torch.Tensor, list[float], torch.Tensor]:
    parts = build(validate(config), FaultLog())
    before = parts.learner.weights.data.clone()
    serial.run(parts, lambda: parts.clock.env_steps < config.steps)
    episodes = [episode.reward for episode in parts.collector.take_episodes()]
    parts.close()
    return parts.learner.weights.data, episodes, before


@pytest.mark.parametrize(
    "changes",
    [{}, {"td_lambda": 0.0}, {"td_lambda": 1.0, "seed": 4}, {"layer_norm": False, "seed": 5}],
    ids=["plain", "one step", "whole rollouts", "plain MLP"],
)
def test_serial_follows_the_reference(changes: dict[str, object]) -> None:
    config, _ = resolve("CartPole-v1", "pqn", "none", fields={**FIELDS, **changes})
    weights, episodes, before = train(config)
    reference, returns = train_reference(config)
    assert episodes == returns
    assert len(episodes) > 10
    theirs = torch.cat([weight.reshape(-1) for weight in reference])
    torch.testing.assert_close(weights, theirs, rtol=1e-3, atol=1e-4)
    assert (weights - before).abs().max() > 0.04
