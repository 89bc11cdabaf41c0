"""What names mean, and faults 11 and 12: spaces and ids that are refused before anything starts."""

from __future__ import annotations

from typing import Any

import gymnasium
import pytest

from qfleet.config.config import Config
from qfleet.core.errors import ConfigError, QfleetError, UnknownNameError, UnsupportedEnvError
from qfleet.envs.factory import make_envs
from qfleet.envs.registry import ale_game, close_names, make_single
from support.messages import says
from support.scripted_envs import Faults, OddEnv, scripted


def make(**changes: Any) -> Any:
    return make_envs(Config().replace(**changes), 2, 0, training=True, on_fault=Faults())


@pytest.mark.parametrize(
    ("env_id", "rom"),
    [
        ("ALE/Pong-v5", "pong"),
        ("ALE/MsPacman-v5", "ms_pacman"),
        ("ALE/ms_pacman-v5", "ms_pacman"),
        ("ALE/TicTacToe3D-v5", "tic_tac_toe_3d"),
        ("PongNoFrameskip-v4", "pong"),
        ("SpaceInvaders-v4", "space_invaders"),
        ("Pong-v0", "pong"),
        ("ms_pacman", "ms_pacman"),
        ("CartPole-v0", None),
        ("CartPole-v1", None),
        ("MountainCar-v0", None),
        ("Nothing-v4", None),
        ("support.scripted_envs:ScriptedEnv", None),
    ],
)
def test_ale_game(env_id: str, rom: str | None) -> None:
    assert ale_game(env_id) == rom


def test_a_users_env_named_like_a_legacy_game_is_the_users() -> None:
    gymnasium.register("Tetris-v0", entry_point="support.scripted_envs:ScriptedEnv")
    try:
        assert ale_game("Tetris-v0") is None
    finally:
        del gymnasium.registry["Tetris-v0"]
    assert ale_game("Tetris-v0") == "tetris"


@pytest.mark.parametrize(
    ("env_id", "near"),
    [
        ("CartPol-v1", "CartPole-v1"),
        ("cartpole-v1", "CartPole-v1"),
        ("CartPole-v9", "CartPole-v1"),
        ("ALE/Pomg-v5", "ALE/Pong-v5"),
        ("BreakotNoFrameskip-v4", "BreakoutNoFrameskip-v4"),
    ],
)
@pytest.mark.parametrize("vectorize", ["auto", "native"])
def test_unknown_id_names_the_nearest(env_id: str, near: str, vectorize: str) -> None:
    with pytest.raises(UnknownNameError, match=near):
        make(env=env_id, vectorize=vectorize)
    assert near in close_names(env_id)


@pytest.mark.parametrize(
    ("changes", "space"),
    [
        ({"env": "Pendulum-v1"}, "action Box --discretize-actions 5"),
        ({"env": "CartPole-v1", "discretize_actions": 5}, "action Discrete discretize_actions"),
        ({"env": "support.scripted_envs:OddEnv"}, "observation Dict"),
        (
            {"env": "support.scripted_envs:OddEnv", "env_kwargs": '{"what": "unbounded"}'},
            "action Box bounded",
        ),
        (
            {"env": "support.scripted_envs:OddEnv", "env_kwargs": '{"what": "action"}'},
            "action MultiDiscrete 1056 1024",
        ),
    ],
)
@pytest.mark.parametrize("vectorize", ["sync", "async"])
def test_unsupported_space_is_named(changes: dict[str, Any], space: str, vectorize: str) -> None:
    with pytest.raises(UnsupportedEnvError, match=says(*space.split())):
        make(vectorize=vectorize, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"imports": ("no_such_module",)}, "no_such_module"),
        ({"env": "support.scripted_envs:Nothing"}, "Nothing"),
        ({"env": "support.scripted_envs:NotAnEnv"}, "gymnasium.Env"),
        ({"env_kwargs": '{"speed": 2}'}, "speed"),
        ({"env": "support.scripted_envs:ScriptedEnv", "env_kwargs": '{"speed": 2}'}, "speed"),
        ({"env": "FrozenLake-v1", "frame_stack": 2}, "frame_stack 2"),
        ({"env": "MountainCar-v0", "vectorize": "native"}, "vectorize sync"),
        ({"vectorize": "native", "frame_stack": 2}, "frame_stack 2"),
        ({"env": "ALE/Pong-v5", "vectorize": "sync"}, "vectorize auto"),
        ({"env": "ALE/Pong-v5", "env_kwargs": '{"mode": 1}'}, "use_fire_reset"),
    ],
)
def test_refusals_are_typed_and_short(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(QfleetError, match=says(*message.split())) as caught:
        make(**changes)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"env_kwargs": '{"what": "action"}'},
        {"wrappers": ("support.scripted_envs:NotAnEnv",)},
        {
            "env_kwargs": '{"what": "action"}',
            "wrappers": ("gymnasium.wrappers:FlattenObservation",),
        },
    ],
    ids=["space", "wrapper", "space of a wrapper"],
)
def test_what_is_refused_is_closed(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, closed, init = list[OddEnv](), list[OddEnv](), OddEnv.__init__

    def noted(env: OddEnv, **kwargs: Any) -> None:
        made.append(env)
        init(env, **kwargs)

    monkeypatch.setattr(OddEnv, "__init__", noted)
    monkeypatch.setattr(OddEnv, "close", lambda env: closed.append(env))  # a method
    with pytest.raises(QfleetError):
        make(env="support.scripted_envs:OddEnv", vectorize="sync", **changes)
    assert made
    assert closed == made


def test_imports_come_first(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "registers_one.py").write_text(
        "import gymnasium\n"
        "gymnasium.register('Mine-v0', entry_point='support.scripted_envs:ScriptedEnv')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    envs = make(env="Mine-v0", imports=("registers_one",))
    assert envs.reset().tolist() == [[1, 0], [1, 0]]


@pytest.mark.parametrize("env_id", ["CartPole-v1", "support.scripted_envs:ScriptedEnv"])
def test_max_episode_steps_overrides_the_envs_own(env_id: str) -> None:
    env = make_single(Config(env=env_id, max_episode_steps=3))
    env.reset(seed=0)
    assert [env.step(0)[3] for _ in range(3)] == [False, False, True]


def test_make_single_passes_render_mode_and_kwargs() -> None:
    config = Config(env_kwargs='{"sutton_barto_reward": true}')
    env = make_single(config, render_mode="rgb_array")
    assert env.render_mode == "rgb_array"
    env.reset(seed=0)
    assert env.step(0)[1] == 0.0


def test_make_single_refuses_atari() -> None:
    with pytest.raises(ConfigError, match="make_envs"):
        make_single(Config(env="ALE/Pong-v5"))


def test_canonical_single_env_counts_actions_from_zero() -> None:
    env = make_single(scripted(env="support.scripted_envs:OffsetEnv"))
    assert env.reset(seed=0)[0] == 2
    assert env.step(1)[0] == 1
    assert env.action_space == gymnasium.spaces.Discrete(2)
