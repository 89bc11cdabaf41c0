"""Bursts that never ask the host, as an accelerator runs them; here on the CPU, unrecorded."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from qfleet.agent.recorded_learner import RecordedLearner
from qfleet.config.config import Config
from qfleet.config.validation import validate
from qfleet.core.types import FIRST, SKIP, TERMINATED, Block, Clock, EnvSpec
from qfleet.engines.factories import make_objective, make_ring, make_updater
from qfleet.engines.placement import Placement
from qfleet.memory.ring import Ring
from qfleet.networks.factory import make_network
from qfleet.telemetry.timers import Timers
from support.configs import tiny_config

CPU = torch.device("cpu")
SPEC = EnvSpec("toy", (3,), "float32", 2)


def placed(capturable: bool) -> Placement:
    return Placement(CPU, CPU, ahead=False, capturable=capturable)


def make_pair(config: Config, capturable: bool) -> tuple[RecordedLearner, Ring, Clock]:
    clock = Clock()
    memory = make_ring(config, SPEC, placed(capturable), seed=1)
    learner = RecordedLearner(
        config=config,
        online=make_network(config, SPEC, CPU, 0),
        target=make_network(config, SPEC, CPU, 0),
        memory=memory,
        objective=make_objective(config, CPU, 2),
        updater_factory=lambda weights: make_updater(config, weights, capturable=True),
        clock=clock,
        timers=Timers(),
        device=CPU,
        seed=3,
        capturable=capturable,
    )
    return learner, memory, clock


def fill(memory: Ring, clock: Clock, rows: int, envs: int, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    kind = torch.randint(0, 10, (rows, envs), generator=random)
    flags = (kind == 1) * TERMINATED + (kind == 2) * SKIP + (kind == 3) * FIRST
    memory.extend(
        Block(
            obs=torch.randn(rows, envs, 3, generator=random),
            action=torch.randint(0, 2, (rows, envs), generator=random),
            reward=torch.randn(rows, envs, generator=random),
            flags=flags.to(torch.uint8),
        )
    )
    clock.env_steps += rows * envs


def configure(algo: str, **fields: Any) -> Config:
    base = {"envs": 2, "buffer_size": 400, "seed": 0, "steps": 10_000}
    base |= {"target_update_interval": 40, "learning_rate": 1e-2}
    return validate(tiny_config(algo=algo, **{**base, **fields}))


@pytest.mark.parametrize(
    "algo", ["dqn", "double-dqn", "rainbow", "qr-dqn", "iqn", "munchausen-dqn"]
)
def test_recorded_bursts_are_the_bursts_themselves(algo: str) -> None:
    config = configure(algo)
    plain, plain_memory, plain_clock = make_pair(config, capturable=True)
    recorded, memory, clock = make_pair(config, capturable=True)
    recorded.record(4)
    start, ring, _ = make_pair(config, capturable=True)
    recorded.load_state_dict(start.state_dict())
    memory.load_state_dict(ring.state_dict())
    plain.burst_updates = 4
    for turn in range(12):
        for filled, at in ((plain_memory, plain_clock), (memory, clock)):
            fill(filled, at, rows=20, envs=2, seed=turn)
        plain.learn(8)
        recorded.learn(8)
    assert torch.equal(recorded.weights.data, plain.weights.data)
    assert not torch.equal(recorded.weights.data, start.weights.data)
    assert clock.updates == 96
    assert recorded.read_metrics() == plain.read_metrics()
