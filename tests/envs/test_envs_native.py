"""NativeEnvs: the rows of CartPole's vector entry point, and what it must refuse."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.envs.classic_control.cartpole import CartPoleEnv, CartPoleVectorEnv
from gymnasium.vector import AutoresetMode

from qfleet.config.config import Config
from qfleet.core.errors import ConfigError, EnvironmentFault
from qfleet.envs.native import NativeEnvs
from support.messages import says


def test_rows_equal_a_plain_env_put_into_the_same_state() -> None:
    envs = NativeEnvs(Config(max_episode_steps=15), 4, seed=2)
    assert len(envs.seeds) == 1
    pool: Any = envs._envs
    envs.reset()
    plain = CartPoleEnv()
    plain.reset(seed=0)
    rng, over, lengths = np.random.default_rng(0), np.zeros(4, dtype=bool), np.zeros(4, dtype=int)
    truncations = terminations = 0
    for _ in range(150):
        before = pool.state.T.copy()
        actions = rng.integers(2, size=4)
        step = envs.step(actions)
        assert step.obs.dtype == np.float32
        assert step.obs.flags.c_contiguous
        assert np.array_equal(step.invalid, over)
        assert np.array_equal(step.fresh, over)
        lengths = np.where(over, 0, lengths + 1)
        for i in range(4):
            if over[i]:
                assert np.abs(step.obs[i]).max() <= 0.05
                assert not step.terminated[i]
                assert not step.truncated[i]
                continue
            plain.state = before[i]
            obs, _, terminated, _, _ = plain.step(int(actions[i]))
            plain.steps_beyond_terminated = None
            np.testing.assert_allclose(step.obs[i], obs, rtol=1e-6)
            assert step.terminated[i] == terminated
            assert step.truncated[i] == (lengths[i] == 15)
        over = step.terminated | step.truncated
        truncations += step.truncated.sum()
        terminations += step.terminated.sum()
    assert truncations > 3
    assert terminations > 3


def test_reset_repeats_the_first_episodes() -> None:
    envs = NativeEnvs(Config(), 4, seed=2)
    first = envs.reset()
    for _ in range(30):
        envs.step(np.ones(4, dtype=np.int64))
    assert np.array_equal(envs.reset(), first)
    assert not np.array_equal(NativeEnvs(Config(), 4, seed=3).reset(), first)


@pytest.mark.parametrize("value", [np.nan, 1e39])
@pytest.mark.parametrize("what", ["observation", "reward"])
@pytest.mark.filterwarnings("ignore:overflow")
def test_a_value_that_is_not_finite_as_float32_names_the_env(
    what: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    envs = NativeEnvs(Config(), 4, seed=0)
    envs.reset()
    plain_step = CartPoleVectorEnv.step

    def step(self: CartPoleVectorEnv, action: Any) -> Any:
        obs, reward, *rest = plain_step(self, action)
        obs, reward = obs.astype(np.float64), reward.astype(np.float64)
        (obs if what == "observation" else reward)[2] = value
        return obs, reward, *rest

    monkeypatch.setattr(CartPoleVectorEnv, "step", step)
    with pytest.raises(EnvironmentFault, match=says("env 2", what)):
        envs.step(np.zeros(4, dtype=np.int64))


class SameStepEnv(CartPoleVectorEnv):
    metadata = CartPoleVectorEnv.metadata | {"autoreset_mode": AutoresetMode.SAME_STEP}


class Limitless(CartPoleVectorEnv):
    def __init__(self, num_envs: int) -> None:
        super().__init__(num_envs)


@pytest.mark.parametrize(
    ("cls", "limit", "message"),
    [(SameStepEnv, 0, "autoreset"), (Limitless, 9, "max_episode_steps")],
)
def test_refused_entry_points(cls: type, limit: int, message: str) -> None:
    gymnasium.register("Odd-v0", entry_point=CartPoleEnv, vector_entry_point=cls)
    try:
        with pytest.raises(ConfigError, match=says(message, "--vectorize sync")):
            NativeEnvs(Config(env="Odd-v0", max_episode_steps=limit), 4, 0)
    finally:
        del gymnasium.registry["Odd-v0"]
