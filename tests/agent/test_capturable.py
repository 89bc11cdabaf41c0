"""Bursts that never ask the host, as an accelerator runs them; here on the CPU, unrecorded."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from qfleet.agent.learner import Learner
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
SUMMED = {"sum_gradients": True, "optimizer": "sgd", "learning_rate": 1e-3, "max_grad_norm": 0.0}


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
    "algo",
    ["dqn", "double-dqn", "iqn", "munchausen-dqn"]
    + [pytest.param(algo, marks=pytest.mark.slow) for algo in ("rainbow", "qr-dqn")],
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


@pytest.mark.parametrize("fields", [{"target_update_interval": 0, "tau": 0.2}, SUMMED], ids=str)
def test_it_is_the_plain_learner_with_other_rules_for_target_and_gradient(
    fields: dict[str, Any],
) -> None:
    config = configure("double-dqn", **fields)
    recorded, memory, clock = make_pair(config, capturable=True)
    plain_clock = Clock()
    plain_memory = make_ring(config, SPEC, placed(True), seed=1)
    plain = Learner(
        config=config,
        online=make_network(config, SPEC, CPU, 0),
        target=make_network(config, SPEC, CPU, 0),
        memory=plain_memory,
        objective=make_objective(config, CPU, 2),
        updater_factory=lambda weights: make_updater(config, weights, capturable=False),
        clock=plain_clock,
        timers=Timers(),
        device=CPU,
        seed=3,
    )
    recorded.burst_updates = plain.burst_updates
    for turn in range(6):
        for filled, at in ((plain_memory, plain_clock), (memory, clock)):
            fill(filled, at, rows=20, envs=2, seed=turn)
        plain.learn(8)
        recorded.learn(8)
    state, plain_state = recorded.state_dict(), plain.state_dict()
    for name in ("weights", "target_weights"):
        torch.testing.assert_close(state[name], plain_state[name], rtol=1e-4, atol=1e-5)
    assert not torch.equal(state["target_weights"], state["weights"])


def test_a_target_network_that_follows_gradients_moves_after_the_pull() -> None:
    config = configure("dqn", target_update_interval=0, tau=1.0)
    learner, memory, clock = make_pair(config, capturable=True)
    seen: list[torch.Tensor] = []

    class Puller:
        """An updater that fetches other weights before every gradient."""

        def before_gradient(self) -> None:
            learner.weights.data.add_(1.0)

        def apply(self, *_: object) -> dict[str, float]:
            seen.append(learner.state_dict()["target_weights"] - learner.weights.data)
            return {"grad_norm": 0.0, "skipped": 0.0}

        def state_dict(self) -> dict[str, Any]:
            return {}

    learner._updater = Puller()  # type: ignore[assignment]
    fill(memory, clock, rows=20, envs=2, seed=0)
    learner.learn(2)
    # ``before_gradient`` is called again by the step, where a worker has the newest weights.
    assert [float(difference.abs().max()) for difference in seen] == pytest.approx([1.0, 1.0])
