"""Tensor environments behind the same interface as all others, by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from torch import Tensor

import qfleet
from qfleet.config.presets import resolve
from qfleet.config.validation import validate
from qfleet.core.errors import ConfigError, EnvironmentFault, UnknownNameError
from qfleet.core.types import EnvSpec
from qfleet.envs.device.cartpole import CartPole
from qfleet.envs.device.names import MINATAR_IDS, has_tensor_form, make_tensor_env
from qfleet.envs.device.protocol import (
    Outcome,
    State,
    TensorEnv,
    begin_episodes,
    step_episodes,
)
from qfleet.envs.device.vector import TensorEnvs
from qfleet.envs.factory import make_envs
from qfleet.networks.factory import make_network
from qfleet.telemetry.faults import FaultLog
from support.messages import says

QUICK: dict[str, Any] = {
    "steps": 400, "learning_starts": 100, "buffer_size": 300, "eval_freq": 0,
    "max_episode_steps": 30, "tensorboard": False, "envs": 4, "exploration_initial_eps": 0.1,
    "train_freq": 8, "n_eval_episodes": 1, "algo": "dqn",
}  # fmt: skip


def make(env: str, num_envs: int = 3, seed: int = 0, **fields: Any) -> Any:
    config, _ = resolve(env, fields=fields)
    return make_envs(validate(config), num_envs, seed, training=True, on_fault=FaultLog())


def play(envs: Any, steps: int, seed: int = 0) -> list[Any]:
    random = np.random.default_rng(seed)
    actions = random.integers(envs.spec.num_actions, size=(steps, envs.num_envs))
    return [tuple(np.array(column) for column in envs.step(a)[:6]) for a in actions]


def assert_same(one: list[Any], other: list[Any]) -> None:
    for left, right in zip(one, other, strict=True):
        for a, b in zip(left, right, strict=True):
            assert np.array_equal(a, b)


@pytest.mark.parametrize("env", MINATAR_IDS)
def test_every_game_plays_by_name(env: str) -> None:
    envs = make(env)
    first = envs.reset().copy()
    assert first.shape == (3, *envs.spec.obs_shape)
    assert set(np.unique(first)) <= {0, 255}
    begun = play(envs, 60)
    assert np.array_equal(envs.reset(), first)
    assert_same(play(envs, 60), begun)


@pytest.mark.parametrize("env", MINATAR_IDS)
def test_convolutions_go_over_the_board(env: str) -> None:
    """What moves a row down on the board moves a row down in the features."""
    config, _ = resolve(env, "dqn")  # without normalisation, which mixes rows
    spec = make_tensor_env(config).spec
    torso = make_network(config, spec, torch.device("cpu"), 0).torso
    board = torch.zeros((2, *spec.obs_shape), dtype=torch.uint8)
    board[0, 1, 4, 5] = board[1, 1, 5, 5] = 255
    higher, lower = torso(board).detach().view(2, 16, 8, 8)
    torch.testing.assert_close(higher[:, :-1], lower[:, 1:])
    assert not torch.allclose(higher, lower)


def test_v0_has_all_six_actions() -> None:
    assert make("MinAtar/Breakout-v0").spec.num_actions == 6
    assert make("MinAtar/Breakout-v1").spec.num_actions == 3


@pytest.mark.parametrize(
    ("env", "fields", "named"),
    [
        ("MinAtar/Brekout-v1", {}, "Breakout"),
        ("MinAtar/Breakout-v7", {}, "MinAtar/Breakout-v1"),
        ("MinAtar/Breakout-v1", {"env_kwargs": '{"ramping": true}'}, "difficulty_ramping"),
        ("MinAtar/Breakout-v1", {"env_kwargs": '{"sticky_action_prob": 2}'}, "sticky_action_prob"),
        ("MinAtar/Breakout-v1", {"env_kwargs": '{"sticky_action_prob": true}'}, "sticky_action"),
        (
            "MinAtar/Freeway-v1",
            {"env_kwargs": '{"difficulty_ramping": true}'},
            "difficulty_ramping",
        ),
        ("MinAtar/Breakout-v1", {"vectorize": "async"}, "vectorize"),
        ("MinAtar/Breakout-v1", {"sticky_actions": 0.5}, "sticky_actions"),
    ],
)
def test_mistakes_are_named(env: str, fields: dict[str, Any], named: str) -> None:
    with pytest.raises((ConfigError, UnknownNameError), match=named):
        make(env, **fields)


@pytest.mark.parametrize(
    ("env", "limit"),
    [("CartPole-v0", 200), ("CartPole-v1", 500), ("Acrobot-v1", 500), ("MountainCar-v0", 200)],
)
def test_classics_have_the_form_of_gymnasiums(env: str, limit: int) -> None:
    config, _ = resolve(env)
    assert has_tensor_form(env)
    made, theirs = make_tensor_env(config), make(env)
    assert made.max_episode_steps == limit == gymnasium.spec(env).max_episode_steps
    assert made.spec == theirs.spec
    assert not isinstance(theirs, TensorEnvs)  # elsewhere the name means Gymnasium's own
    assert make_tensor_env(config.replace(max_episode_steps=9)).max_episode_steps == 9


def test_what_has_no_tensor_form_is_told_what_has() -> None:
    assert has_tensor_form("MinAtar/Breakout-v1")
    assert not has_tensor_form("FrozenLake-v1")
    with pytest.raises(ConfigError, match=says("CartPole-v1", "docs/tensor-envs.md")):
        make_tensor_env(resolve("FrozenLake-v1")[0])


def test_options_reach_the_game() -> None:
    config, _ = resolve(
        "MinAtar/Asterix-v1",
        fields={"env_kwargs": '{"sticky_action_prob": 0.0, "difficulty_ramping": false}'},
    )
    env = make_tensor_env(config)
    assert env.sticky == 0.0  # type: ignore[attr-defined]
    assert env.game.ramping is False  # type: ignore[attr-defined]


def test_an_end_is_followed_by_a_new_beginning() -> None:
    envs = TensorEnvs(CartPole(), 16, seed=3)
    envs.reset()
    over = np.zeros(16, dtype=np.bool_)
    ends = 0
    for obs, reward, terminated, truncated, invalid, fresh in play(envs, 300):
        assert np.array_equal(invalid, over)
        assert np.array_equal(fresh, over)
        assert (np.abs(obs[over]) <= 0.05).all()
        assert (reward == ~over).all()
        assert not (terminated & over).any()
        over = terminated | truncated
        ends += int(over.sum())
    assert ends > 100


def test_time_limits_truncate() -> None:
    envs = make("MinAtar/Freeway-v1", max_episode_steps=7)
    envs.reset()
    for at, (_, _, terminated, truncated, invalid, _) in enumerate(play(envs, 40)):
        assert not terminated.any()
        assert (truncated == (at % 8 == 6)).all()
        assert (invalid == (at % 8 == 7)).all()


def test_an_environment_does_not_depend_on_those_beside_it() -> None:
    env = make_tensor_env(resolve("MinAtar/Seaquest-v1")[0])
    seeds, many = torch.tensor([11, 12, 13]), []
    for chosen in (seeds, seeds[1:2]):
        episodes = begin_episodes(env, chosen)
        seen = []
        for at in range(200):
            episodes, step = step_episodes(env, episodes, torch.full_like(chosen, at * 7 % 6))
            seen.append(step.obs[len(chosen) // 2])
        many.append(torch.stack(seen))
    assert torch.equal(*many)


def test_states_are_exact() -> None:
    envs = make("MinAtar/SpaceInvaders-v1")
    envs.reset()
    play(envs, 50)
    state = envs.state_dict()
    expected = play(envs, 100, seed=1)
    other = make("MinAtar/SpaceInvaders-v1", seed=5)
    other.load_state_dict(state)
    assert_same(play(other, 100, seed=1), expected)


@pytest.mark.parametrize("engine", ["serial", pytest.param("pipeline", marks=pytest.mark.slow)])
def test_a_run_trains_resumes_and_is_filmed(engine: str, tmp_path: Path) -> None:
    # The interval follows the number of steps otherwise, which is another one for the first half.
    fields = {**QUICK, "engine": engine, "target_update_interval": 20}
    whole = qfleet.train("MinAtar/Breakout-v1", run_dir=tmp_path / "whole", **fields)
    assert whole.result.updates == 37
    qfleet.train("MinAtar/Breakout-v1", run_dir=tmp_path / "half", **{**fields, "steps": 200})
    resumed = qfleet.resume(tmp_path / "half", steps=400)
    assert resumed.result.updates == 37
    if engine == "serial":
        one, other = (qfleet.load(tmp_path / name, which="last") for name in ("whole", "half"))
        board = make("MinAtar/Breakout-v1").reset()
        assert np.array_equal(one.q_values(board), other.q_values(board))
        from qfleet.training.video import record_video

        frames, _ = record_video(one, tmp_path / "film.gif", seed=0, max_frames=20, fps=10)
        assert 1 < frames <= 20


class Fine(TensorEnv):
    spec = EnvSpec("Fine", (1,), "float32", 2)
    max_episode_steps = 9

    def begin(self, counters: Tensor) -> State:
        return {"place": torch.zeros(len(counters))}

    def advance(self, state: State, action: Tensor, counters: Tensor) -> Outcome:
        place = state["place"] + 1
        return Outcome({"place": place}, place, place > 5)

    def observe(self, state: State) -> Tensor:
        return state["place"].unsqueeze(1)


class Flat(Fine):
    def observe(self, state: State) -> Tensor:
        return state["place"]


class Double(Fine):
    def observe(self, state: State) -> Tensor:
        return state["place"].double().unsqueeze(1)


class Slashed(Fine):
    def begin(self, counters: Tensor) -> State:
        return {**super().begin(counters), "a/b": counters}

    def advance(self, state: State, action: Tensor, counters: Tensor) -> Outcome:
        after, reward, terminated = super().advance(state, action, counters)
        return Outcome({**after, "a/b": counters}, reward, terminated)


class Growing(Fine):
    """Begins with float32 and goes on with float64: recorded work has one place for both."""

    def advance(self, state: State, action: Tensor, counters: Tensor) -> Outcome:
        after, reward, terminated = super().advance(state, action, counters)
        return Outcome({"place": after["place"].double()}, reward, terminated)

    def observe(self, state: State) -> Tensor:
        return state["place"].float().unsqueeze(1)


class Limitless(TensorEnv):
    spec = EnvSpec("Limitless", (1,), "float32", 2)
    begin, advance, observe = Fine.begin, Fine.advance, Fine.observe  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        (Flat, "obs"),
        (Double, "float64"),
        (Slashed, "a/b"),
        (Limitless, "max_episode_steps"),
        (Growing, "alike"),
    ],
)
def test_mistakes_in_your_own_are_one_line(kind: type[TensorEnv], named: str) -> None:
    assert play(TensorEnvs(Fine(), 3, 0), 20)
    with pytest.raises(ConfigError, match=named):
        TensorEnvs(kind(), 3, 0)


def test_what_is_not_finite_ends_the_run() -> None:
    class Broken(Fine):
        def advance(self, state: State, action: Tensor, counters: Tensor) -> Outcome:
            after, reward, terminated = super().advance(state, action, counters)
            return Outcome(after, torch.where(reward > 3, torch.nan, reward), terminated)

    envs = TensorEnvs(Broken(), 2, 0)
    envs.reset()
    with pytest.raises(EnvironmentFault, match="NaN"):
        play(envs, 9)
