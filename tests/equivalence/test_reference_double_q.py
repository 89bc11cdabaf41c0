"""The serial engine follows the one-page double Q-learning: the same episodes, equal weights."""

from __future__ import annotations

import pytest
import torch

from qfleet.config.config import Config
from qfleet.engines import serial
from qfleet.engines.registry import build
from qfleet.lab.reference_double_q import train_reference
from qfleet.telemetry.faults import FaultLog

CONFIG = Config(
    env="CartPole-v1",
    double=True,
    loss="mse",
    optimizer="sgd",
    steps=1500,
    learning_rate=0.02,
    batch_size=16,
    buffer_size=600,
    learning_starts=100,
    train_freq=2,
    target_update_interval=0,
    tau=0.1,
    exploration_fraction=0.3,
    net_arch=(32,),
    max_grad_norm=0.0,
    seed=3,
)


def trained(config: Config) -> tuple[torch.Tensor, list[float]]:
    parts = build(config, FaultLog())
    serial.run(parts, lambda: parts.clock.env_steps < config.steps)
    episodes = [episode.reward for episode in parts.collector.take_episodes()]
    parts.close()
    return parts.learner.weights.data, episodes


def test_serial_follows_the_reference() -> None:
    ours, episodes = trained(CONFIG)
    reference, returns = train_reference(CONFIG)
    assert episodes == returns
    assert len(returns) > 20
    theirs = torch.cat([weight.reshape(-1) for weight in reference])
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "changes",
    [{"target_update_interval": 6}, pytest.param({"double": False}, marks=pytest.mark.slow)],
    ids=str,
)
def test_another_rule_gives_other_weights(changes: dict[str, object]) -> None:
    ours, _ = trained(CONFIG.replace(**changes))
    reference, _ = train_reference(CONFIG)
    theirs = torch.cat([weight.reshape(-1) for weight in reference])
    assert (ours - theirs).abs().max() > 1e-3
