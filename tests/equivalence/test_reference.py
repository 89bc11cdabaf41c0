"""The serial engine equals the one-page DQN bit for bit."""

from __future__ import annotations

import pytest
import torch

from qfleet.config.config import Config
from qfleet.core.types import Episode
from qfleet.engines import serial
from qfleet.engines.registry import build
from qfleet.lab.reference_dqn import train_reference
from qfleet.telemetry.faults import FaultLog

BASE = Config(
    env="CartPole-v1",
    steps=1500,
    learning_rate=1e-3,
    batch_size=32,
    buffer_size=600,  # wraps around twice
    learning_starts=100,
    train_freq=4,
    target_update_interval=50,
    exploration_fraction=0.3,
    net_arch=(32, 32),
    max_grad_norm=0.5,  # small enough to clip often
    seed=3,
)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"train_freq": 64, "gradient_steps": 32},
        {"tau": 0.05, "target_update_interval": 2},
        pytest.param({"train_freq": 1, "seed": 4, "net_arch": (64,)}, marks=pytest.mark.slow),
    ],
    ids=["plain", "bursts", "soft target", "every step"],
)
def test_serial_equals_the_reference_bit_for_bit(changes: dict[str, object]) -> None:
    config = BASE.replace(**changes)
    parts = build(config, FaultLog())
    serial.run(parts, lambda: parts.clock.env_steps < config.steps)
    episodes: list[Episode] = parts.collector.take_episodes()
    parts.close()
    weights, returns = train_reference(config)
    assert [episode.reward for episode in episodes] == returns
    assert len(returns) > 20
    ours = torch.cat([p.detach().reshape(-1) for p in parts.learner.online.parameters()])
    assert torch.equal(ours, torch.cat([w.reshape(-1) for w in weights]))
