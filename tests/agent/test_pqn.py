"""Learning without replay: what is refused, what it is made of, and that engines agree on it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from qfleet.agent.recorded_learner import RecordedLearner
from qfleet.agent.schedules import rows_per_block
from qfleet.config.config import Config
from qfleet.config.validation import validate
from qfleet.core.errors import ConfigError
from qfleet.core.types import FIRST, SKIP, TERMINATED, Block, Clock, EnvSpec, StateDict
from qfleet.engines import placement, registry
from qfleet.engines.auto import settle, with_short_rollouts
from qfleet.engines.cluster.state_arrays import copy_state
from qfleet.engines.factories import make_objective, make_updater
from qfleet.engines.parts import Parts
from qfleet.engines.recording import updates_at_once
from qfleet.engines.registry import build
from qfleet.memory.rollout import Rollout
from qfleet.networks.factory import make_network
from qfleet.telemetry.faults import FaultLog
from qfleet.telemetry.timers import Timers
from support.configs import tiny_config
from support.messages import says

CPU = torch.device("cpu")
FIELDS: dict[str, Any] = {
    "engine": "serial",
    "steps": 640,
    "envs": 4,
    "train_freq": 64,
    "gradient_steps": 8,
    "learning_rate": 1e-2,
    "max_episode_steps": 30,
    "seed": 2,
}


def configure(**changes: Any) -> Config:
    return tiny_config(algo="pqn", **{**FIELDS, **changes})


# --- refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"head": "c51"}, "head c51 replay"),
        ({"double": True}, "double True replay"),
        ({"munchausen": True}, "munchausen True replay"),
        ({"prioritized_replay": True}, "prioritized_replay True replay"),
        ({"n_steps": 3}, "n_steps 3 replay td_lambda"),
        ({"replay_dir": "files"}, "replay_dir files replay"),
        ({"replay_device": "cpu"}, "replay_device cpu replay"),
        ({"replay_compression": "lz4"}, "replay_compression lz4 replay"),
        ({"replay_slack": 2}, "replay_slack 2 replay"),
        ({"gradient_steps": 7}, "gradient_steps 7 batch_size 16 112"),
        ({"gradient_steps": 2}, "gradient_steps batch_size 64"),
        ({"envs": 5}, "train_freq 5 10"),
        ({"envs": 64}, "train_freq 64 envs steps"),
        ({"block_rows": 5}, "block_rows 5 16"),
        ({"td_lambda": 1.1}, "td_lambda 1.1"),
        ({"steps": 60}, "train_freq 64 steps 60"),
        ({"learning_starts": 600}, "steps 640 learning_starts 600"),
        (
            {"engine": "parameter-server", "update": "easgd", "workers": 2, "steps": 60},
            "train_freq 64",
        ),
    ],
    ids=str,
)
def test_what_cannot_work_without_replay_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=says(*words.split())):
        validate(configure(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"buffer_size": 1},
        {"learning_starts": 100},
        {"learning_starts": 576},
        {"steps": 61},  # four envs step together, so 64 are taken
        {"engine": "parameter-server", "workers": 8, "steps": 64},
        {"dueling": True, "noisy": True},
        {"loss": "huber", "optimizer": "adam"},
        {"envs": 0},
        {"block_rows": 4},
    ],
    ids=str,
)
def test_what_can_work_is_not(changes: dict[str, Any]) -> None:
    config = configure(**changes)
    assert validate(config) is config


@pytest.mark.parametrize(("train_freq", "envs"), [(64, 8), (60, 6), (14, 7), (6, 3), (7, 1)])
def test_a_number_of_envs_is_found_that_shares_a_rollout_evenly(train_freq: int, envs: int) -> None:
    config, _ = settle(configure(envs=0, train_freq=train_freq, batch_size=train_freq))
    assert config.envs == envs


def test_a_block_is_a_rollout_on_every_engine_and_in_one_burst_where_it_is_recorded() -> None:
    for engine in ("serial", "pipeline"):
        config, _ = settle(configure(engine=engine, vectorize="async"))
        assert rows_per_block(config) == 16
    assert updates_at_once(configure(gradient_steps=400), most=32) == 400


def test_engines_are_tried_with_short_rollouts_at_the_same_ratio() -> None:
    for changes in ({}, {"gradient_steps": 12}, {"envs": 32}, {"train_freq": 60, "envs": 4}):
        config = configure(**{"batch_size": 60, "gradient_steps": 16, **changes})
        config = config if "train_freq" in changes else config.replace(batch_size=16)
        short = validate(with_short_rollouts(validate(config)))
        assert short.updates_per_env_step == config.updates_per_env_step
        assert short.train_freq <= config.train_freq
    assert with_short_rollouts(configure()).train_freq == 8  # two rows of four envs


# --- the parts --------------------------------------------------------------------------------


def test_there_is_no_target_network() -> None:
    parts = build(configure(), FaultLog())
    parts.close()
    assert isinstance(parts.memory, Rollout)
    assert parts.learner.networks == [parts.learner.online]
    assert not [name for name in parts.learner.state_dict() if name.startswith("target_w")]


SPEC = EnvSpec("toy", (3,), "float32", 2)


def make_learner(config: Config, capturable: bool) -> tuple[RecordedLearner, Rollout, Clock]:
    clock = Clock()
    online = make_network(config, SPEC, CPU, 0)
    memory = Rollout(
        SPEC,
        config.envs,
        config.train_freq // config.envs,
        config.gamma,
        config.td_lambda,
        lambda obs: learner.state_values(obs),
        [1],
        CPU,
        batch_size=config.batch_size,
        epochs=config.gradient_steps * config.batch_size // config.train_freq,
    )
    learner = RecordedLearner(
        config=config,
        online=online,
        target=online,
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


def fill(memory: Rollout, clock: Clock, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    shape = (memory.rows, memory.num_envs)
    kind = torch.randint(0, 10, shape, generator=random)
    flags = (kind == 1) * TERMINATED + (kind == 2) * SKIP + (kind == 3) * FIRST
    memory.extend(
        Block(
            obs=torch.randn(*shape, 3, generator=random),
            action=torch.randint(0, 2, shape, generator=random),
            reward=torch.randn(shape, generator=random).masked_fill(kind == 2, torch.nan),
            flags=flags.to(torch.uint8),
        )
    )
    clock.env_steps += flags.numel()


@pytest.mark.parametrize("changes", [{}, {"noisy": True}, {"dueling": True}], ids=str)
def test_recorded_bursts_are_the_bursts_themselves(changes: dict[str, Any]) -> None:
    config = configure(**changes)
    plain, plain_memory, plain_clock = make_learner(config, capturable=True)
    recorded, memory, clock = make_learner(config, capturable=True)
    saved = copy_state({"learner": recorded.state_dict(), "memory": memory.state_dict()})
    recorded.record(config.gradient_steps)
    recorded.load_state_dict(saved["learner"])
    memory.load_state_dict(saved["memory"])
    for turn in range(4):
        for filled, at in ((plain_memory, plain_clock), (memory, clock)):
            fill(filled, at, turn)
        plain.learn(config.gradient_steps)
        recorded.learn(config.gradient_steps)
    assert torch.equal(recorded.weights.data, plain.weights.data)
    assert not torch.equal(recorded.weights.data, saved["learner"]["weights"])
    assert recorded.weights.data.isfinite().all()


def test_bursts_of_any_size_learn_the_same() -> None:
    """Returns are those of the rollout's first burst; later updates do not change them."""
    states = []
    for most in (8, 3, 1):
        learner, memory, clock = make_learner(configure(), capturable=False)
        learner.burst_updates = most
        for turn in range(3):
            fill(memory, clock, turn)
            learner.learn(8)
        states.append(learner.weights.data)
    assert torch.equal(states[0], states[1])
    assert torch.equal(states[0], states[2])


def test_rows_that_led_nowhere_teach_nothing() -> None:
    """Whatever their actions and rewards: weights are the same without them."""
    learnt = []
    for other in (False, True):
        learner, memory, clock = make_learner(configure(), capturable=False)
        fill(memory, clock, 0)
        if other:
            state = memory.state_dict()
            skipped = (state["flags"] & SKIP) != 0
            state["action"][skipped] = 1 - state["action"][skipped]
            state["reward"][skipped] = 1e6
            memory.load_state_dict(state)
        learner.learn(8)
        learnt.append(learner.weights.data)
    assert torch.equal(*learnt)


# --- engines ----------------------------------------------------------------------------------


def state_after(config: Config) -> tuple[Parts, StateDict]:
    parts = build(validate(config), FaultLog())
    try:
        registry.run(parts, lambda: parts.clock.env_steps < config.steps)
        return parts, {**parts.learner.state_dict(), **parts.memory.state_dict()}
    finally:
        parts.close()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"noisy": True, "block_rows": 4},
        pytest.param({"vectorize": "async", "frame_stack": 2}, marks=pytest.mark.slow),
    ],
    ids=["plain", "noisy", "async stacks"],
)
def test_in_lockstep_the_pipeline_is_serial_bit_for_bit(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "MEASURE_S", 0.01)
    _, serial = state_after(configure(**changes))
    parts, pipeline = state_after(configure(engine="pipeline", lockstep=True, **changes))
    assert parts.clock.updates == 80
    for name in ("weights", "frames", "flags", "returns", "order", "shuffles"):
        assert torch.equal(serial[name], pipeline[name]), name


def test_ahead_it_learns_every_rollout_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "MEASURE_S", 0.01)
    config = configure(engine="pipeline", vectorize="async")
    one, first = state_after(config)
    _, second = state_after(config)
    assert one.clock.updates == 80
    assert one.channel.lag.largest == 8  # the updates of one rollout
    assert torch.equal(first["weights"], second["weights"])
