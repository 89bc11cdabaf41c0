"""Exact env state: a loaded copy goes on step for step like the original."""

from __future__ import annotations

import json
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

from qfleet.config.config import Config
from qfleet.core.errors import CheckpointError
from qfleet.core.types import VectorEnv
from qfleet.envs.factory import make_envs
from qfleet.envs.registry import make_single
from qfleet.envs.state import load_env, save_env
from support.scripted_envs import Faults, scripted


def make(config: Config, num_envs: int, seed: int) -> VectorEnv:
    return make_envs(config, num_envs, seed, training=True, on_fault=Faults())


def through_json(value: Any) -> Any:
    """As a checkpoint does it: tensors aside, everything else through JSON."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: through_json(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [through_json(entry) for entry in value]
    return json.loads(json.dumps(value))


@pytest.mark.parametrize(
    ("config", "num_envs"),
    [
        (Config(), 2),
        (Config(frame_stack=3, max_episode_steps=13), 2),
        (Config(vectorize="native", max_episode_steps=13), 4),
        (Config(env="FrozenLake-v1"), 2),
        (Config(env="MountainCar-v0", max_episode_steps=30), 2),
        (Config(env="Acrobot-v1", max_episode_steps=30), 2),
        (Config(env="Taxi-v4", max_episode_steps=30), 2),
        (Config(env="Taxi-v4", env_kwargs='{"fickle_passenger": true}', max_episode_steps=30), 2),
        (Config(env="CliffWalking-v1", env_kwargs='{"is_slippery": true}'), 2),
        (Config(env="support.scripted_envs:MemoryEnv"), 2),
    ],
    ids=lambda value: f"{value.env}-{value.vectorize}" if isinstance(value, Config) else "",
)
@pytest.mark.parametrize("steps_before", [0, 20])
def test_a_loaded_copy_goes_on_identically(
    config: Config, num_envs: int, steps_before: int
) -> None:
    envs, copy = make(config, num_envs, 1), make(config, num_envs, 2)
    envs.reset()
    rng = np.random.default_rng(0)
    for _ in range(steps_before):
        envs.step(rng.integers(envs.spec.num_actions, size=num_envs))
    state = envs.state_dict()
    assert state is not None
    saved = through_json(state)
    # What was saved must not move along with the env it came from.
    actions = rng.integers(envs.spec.num_actions, size=(200, num_envs))
    trace = [[np.array(entry) for entry in envs.step(row) if entry is not None] for row in actions]
    copy.load_state_dict(saved)
    for row, expected in zip(actions, trace, strict=True):
        for got, want in zip(copy.step(row), expected, strict=False):
            assert np.array_equal(got, want)


def test_saved_state_does_not_follow_the_env() -> None:
    envs = make(Config(env="support.scripted_envs:MemoryEnv"), 1, 0)
    envs.reset()
    state = envs.state_dict()
    assert state is not None
    before = json.dumps(through_json(state), default=torch.Tensor.tolist)
    for _ in range(5):
        envs.step(np.zeros(1, dtype=np.int64))
    assert json.dumps(through_json(state), default=torch.Tensor.tolist) == before


def test_unknown_env_or_wrapper_gives_none() -> None:
    envs = make(scripted(), 1, 0)
    envs.reset()
    assert envs.state_dict() is None
    wrapped = gymnasium.wrappers.RecordEpisodeStatistics(make_single(Config()))
    wrapped.reset(seed=0)
    assert save_env(wrapped) is None


def test_state_of_another_make_is_refused() -> None:
    env = make_single(Config())
    env.reset(seed=0)
    state = save_env(env)
    assert state is not None
    with pytest.raises(CheckpointError, match="FrameStackObservation"):
        load_env(make_single(Config(frame_stack=2)), state)
    with pytest.raises(CheckpointError, match="AcrobotEnv"):
        load_env(make_single(Config(env="Acrobot-v1")), state)


def test_another_number_of_envs_is_refused() -> None:
    envs = make(Config(), 2, 0)
    envs.reset()
    state = envs.state_dict()
    assert state is not None
    with pytest.raises(CheckpointError, match="--envs 2"):
        make(Config(), 3, 0).load_state_dict(state)


class Board(gymnasium.Env[Any, Any]):
    """Has methods of these names, which are for something else."""

    def get_state(self, player: int) -> int:
        return player

    def set_state(self, state: int, player: int) -> None: ...


def test_methods_of_the_same_names_are_no_state() -> None:
    assert save_env(Board()) is None
