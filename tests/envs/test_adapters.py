"""Converted spaces: the values by hand, refusals, policies that act on raw observations."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

import qfleet
from qfleet.cli.main import main
from qfleet.config.config import Config
from qfleet.config.trust import needs_trust
from qfleet.core.errors import CheckpointError, ConfigError, QfleetError, UnsupportedEnvError
from qfleet.core.types import EnvSpec
from qfleet.envs.adapters import describe_conversions, stored_converters
from qfleet.envs.factory import make_envs
from qfleet.envs.registry import make_single, single_spec
from qfleet.envs.state import load_env, save_env
from qfleet.networks.torsos import choose_network, image_layout
from support.configs import tiny_fields
from support.messages import says
from support.scripted_envs import Faults
from support.space_envs import SPACES, Doubled, Lamps, Sampled, SeveralAgents

HERE = "support.space_envs"


def config(space: str = "dict", actions: str = "two", **fields: Any) -> Config:
    kwargs = {"space": space, "actions": actions}
    return Config(env=f"{HERE}:Sampled", env_kwargs=kwargs, **fields)  # type: ignore[arg-type]


def spec_of(one: Config) -> EnvSpec:
    return single_spec(one, make_single(one))


def converted(space: str, obs: Any) -> Any:
    converter, _ = stored_converters(spec_of(config(space)))
    assert converter is not None
    return converter(obs)


def test_a_dict_becomes_a_vector_with_one_hot_parts() -> None:
    # Gymnasium sorts the keys: gear before speed.
    obs = {"speed": np.array([0.5, -1], np.float32), "gear": 2}
    assert converted("dict", obs).tolist() == [0, 1, 0, 0.5, -1]


def test_a_tuple_with_a_dict_inside_becomes_a_vector() -> None:
    assert converted("tuple", (1, {"a": np.array([1, 0])}, 0.25)).tolist() == [0, 1, 1, 0, 0.25]


def test_multi_binary_and_multi_discrete_become_vectors() -> None:
    assert converted("bits", np.array([[1, 0], [0, 1]])).tolist() == [1, 0, 0, 1]
    assert converted("digits", np.array([6, 1])).tolist() == [0, 1, 0, 1, 0]


def test_an_image_keeps_its_pixels_and_gets_constant_channels() -> None:
    spec, obs = spec_of(config("image")), SPACES["image"].sample()
    obs |= {"gear": 1, "arm": np.array([1.0], np.float32)}
    image = converted("image", obs)
    assert image.dtype == np.uint8
    assert image.shape == spec.obs_shape == (7, 6, 7)
    # arm: 1 is half-way from −1 to 3.
    assert [image[channel].tolist() for channel in (0, 4, 5, 6)] == [
        [[level] * 7] * 6 for level in (128, 0, 255, 0)
    ]
    assert (image[1:4] == np.moveaxis(obs["eye"], -1, 0)).all()
    layout = image_layout(spec)
    assert layout is not None
    assert (layout.channels, layout.height, layout.width) == (7, 6, 7)
    assert not layout.channels_last
    assert choose_network(spec) == "minatar"


def test_image_max_scales_the_image_alone_and_does_not_wrap_around() -> None:
    one = config("image", image_max=10)
    converter, _ = stored_converters(spec_of(one))
    assert converter is not None
    obs = {"eye": np.full((6, 7, 3), 200, np.uint8), "gear": 1, "arm": np.ones(1, np.float32)}
    obs["eye"][0, 0] = (1, 10, 11)
    image = converter(obs)
    assert image[1:4, 0, 0].tolist() == [25, 250, 250]
    assert image[:, 5, 5].tolist() == [128, 250, 250, 250, 0, 255, 0]


def test_an_unbounded_number_beside_an_image_is_squashed_and_never_wraps_around() -> None:
    space = gymnasium.spaces.Dict(
        {"eye": SPACES["image"]["eye"], "far": gymnasium.spaces.Box(-np.inf, np.inf, (3,))}  # type: ignore[index]
    )
    SPACES["far"] = space
    try:
        obs = {"eye": np.zeros((6, 7, 3), np.uint8), "far": np.array([-1e9, 0, 1e9], np.float32)}
        assert converted("far", obs)[3:, 0, 0].tolist() == [0, 128, 255]
    finally:
        del SPACES["far"]


def test_the_conversion_is_reported_with_what_is_dropped() -> None:
    (line,) = describe_conversions(spec_of(config("image")))
    for word in ("image", "7×6×7", "gear", "said", "Text", "dropped"):
        assert word in line
    (line,) = describe_conversions(spec_of(config("dict", "two")))
    assert "dropped" not in line
    *_, line = describe_conversions(spec_of(config("dict", "box", discretize_actions=5)))
    assert "25 combinations" in line


def test_plain_spaces_are_left_alone() -> None:
    spec = spec_of(Config())
    assert (spec.raw_obs, spec.raw_actions, describe_conversions(spec)) == ("", "", [])


@pytest.mark.parametrize(
    ("actions", "points", "number", "expected"),
    [
        ("digits", 0, 4, [1, 5]),
        ("bits", 0, 2, [1, 0]),
        ("box", 5, 0, [-1, 0]),
        ("box", 5, 8, [-0.5, 3]),
        ("box", 5, 24, [1, 4]),
    ],
)
def test_a_number_is_a_combination_of_values(
    actions: str, points: int, number: int, expected: list[float]
) -> None:
    env = make_single(config("dict", actions, discretize_actions=points))
    env.reset(seed=0)
    env.step(number)
    (taken,) = env.unwrapped.actions  # type: ignore[attr-defined]
    assert taken.tolist() == expected
    assert taken.dtype == env.unwrapped.action_space.dtype


@pytest.mark.parametrize(
    ("one", "words"),
    [
        (config("text"), "observation Text"),
        (config("nothing"), "observation no values"),
        (config("dict", "box"), "action Box --discretize-actions"),
        (config("dict", "box", discretize_actions=33), "1089 1024"),
        (config("dict", "digits", discretize_actions=5), "MultiDiscrete discretize_actions 5"),
    ],
)
def test_what_cannot_be_converted_is_refused(one: Config, words: str) -> None:
    with pytest.raises(UnsupportedEnvError, match=says("Sampled", *words.split())):
        make_envs(one, 1, 0, training=True, on_fault=Faults())


@pytest.mark.parametrize("vectorize", ["sync", "async"])
def test_every_kind_of_vector_env_converts(vectorize: str) -> None:
    one = config("image", "digits", vectorize=vectorize)
    envs = make_envs(one, 2, 7, training=True, on_fault=Faults())
    try:
        first = envs.reset().copy()
        assert first.shape == (2, 7, 6, 7)
        raw = Sampled("image").reset(seed=envs.seeds[1])[0]
        assert (first[1] == converted("image", raw)).all()
        for _ in range(7):
            envs.step(np.array([5, 0]))
    finally:
        envs.close()


def test_a_converted_env_goes_on_from_its_state() -> None:
    one = config("tuple", "digits", max_episode_steps=9)
    env, other = make_single(one), make_single(one)
    env.reset(seed=3)
    env.step(1)
    state = save_env(env)
    assert state is not None
    other.reset(seed=8)
    load_env(other, state)
    assert (env.step(2)[0] == other.step(2)[0]).all()


def test_frames_of_converted_images_are_stacked() -> None:
    one = config("image", frame_stack=2)
    assert spec_of(one).obs_shape == (2, 7, 6, 7)
    layout = image_layout(spec_of(one))
    assert layout is not None
    assert (layout.channels, layout.height, layout.width) == (14, 6, 7)


# --- policies -----------------------------------------------------------------------------------


def train(folder: Path, env: Any = Sampled, **fields: Any) -> qfleet.Trained:
    short = {"steps": 60, "learning_starts": 20, "engine": "serial", "device": "cpu"}
    return qfleet.train(env, run_dir=folder, **tiny_fields(**short | fields))


@pytest.mark.parametrize("space", ["dict", "image", "tuple", "bits", "digits"])
def test_a_saved_policy_acts_on_raw_observations(space: str, tmp_path: Path) -> None:
    trained = train(tmp_path / "run", env_kwargs={"space": space, "actions": "digits"})
    trained.policy().save(tmp_path / "saved")
    policy = qfleet.load(tmp_path / "saved.safetensors")
    assert policy.spec == trained.policy().spec
    own = Sampled(space, "digits")
    obs = [SPACES[space].sample() for _ in range(3)]
    for one in obs:
        action = policy.act(one)
        assert own.action_space.contains(action)
        by_hand = policy.greedy(converted(space, one)[None])[0]
        assert np.asarray(action).tolist() == [by_hand // 3, by_hand % 3 + 4]
        assert (policy.predict(one)[0] == action).all()
        assert policy.q_values(one).shape == (6,)
    batch = gymnasium.vector.utils.concatenate(
        SPACES[space], obs, gymnasium.vector.utils.create_empty_array(SPACES[space], 3)
    )
    assert np.asarray(policy.act(batch)).tolist() == [
        np.asarray(policy.act(o)).tolist() for o in obs
    ]
    assert trained.policy().evaluate(episodes=2).returns == [5, 5]


@pytest.mark.parametrize("space", ["dict", "image", "tuple", "bits"])
def test_a_policy_acts_on_stacks_of_raw_observations(space: str, tmp_path: Path) -> None:
    policy = train(tmp_path / "run", env_kwargs={"space": space}, frame_stack=2).policy()
    empty = gymnasium.vector.utils.create_empty_array
    frames = [SPACES[space].sample() for _ in range(6)]
    stacked = gymnasium.vector.utils.batch_space(SPACES[space], 2)
    stacks = [
        gymnasium.vector.utils.concatenate(SPACES[space], pair, empty(SPACES[space], 2))
        for pair in zip(frames[::2], frames[1::2], strict=True)
    ]
    batch = gymnasium.vector.utils.concatenate(stacked, stacks, empty(stacked, 3))
    rows = np.array([converted(space, frame) for frame in frames])
    by_hand = policy.greedy(rows.reshape(3, *policy.spec.obs_shape)).tolist()
    assert np.asarray(policy.act(batch)).tolist() == by_hand
    assert [policy.act(stack) for stack in stacks] == by_hand
    with pytest.raises(ConfigError, match=says("observation", "shape")):
        policy.act(frames[0])


def test_a_policy_refuses_an_observation_that_does_not_fit(tmp_path: Path) -> None:
    policy = train(tmp_path / "run").policy()
    for wrong in (
        {"speed": np.zeros(2)},
        {"speed": np.zeros(3), "gear": 1},
        {"speed": np.zeros(2), "gear": 9},
        {"speed": np.array([np.nan, 0]), "gear": 1},
        7,
    ):
        with pytest.raises(ConfigError, match="observation"):
            policy.act(wrong)


def test_malformed_stored_spaces_are_refused() -> None:
    spec = spec_of(config("dict", "digits"))
    huge = json.dumps([[[0, 1]] * 40, [40], "int64"])
    for field, text in (
        ("raw_obs", "["),
        ("raw_obs", "[[1]]"),
        ("raw_obs", '[[[], "Box", [3]]]'),
        ("raw_actions", "{}"),
        ("raw_actions", huge),
        ("raw_actions", '[[[0, 1]], [1], "O"]'),
    ):
        values = {**spec.__dict__, field: text}
        with pytest.raises(CheckpointError, match="malformed"):
            stored_converters(EnvSpec(**values))


def test_discretised_actions_train_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = "--steps 300 --learning-starts 50 --net-arch 8 --eval-freq 0 --n-eval-episodes 1"
    words = ["train", "Pendulum-v1", *line.split(), "--run-dir", str(tmp_path / "run")]
    assert main(words) == 2
    assert "--discretize-actions 5" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert main([*words, "--discretize-actions", "5"]) == 0
    policy = qfleet.load(tmp_path / "run")
    action = policy.act([1.0, 0.0, 0.0])
    assert isinstance(action, np.ndarray)
    assert action.shape == (1,)
    assert action[0] in (-2, -1, 0, 1, 2)


@pytest.mark.slow
def test_a_task_with_several_discrete_actions_is_learnt(tmp_path: Path) -> None:
    trained = qfleet.train(Lamps, run_dir=tmp_path / "run", steps=6000, tensorboard=False)
    assert trained.policy().evaluate(episodes=30).mean > 0.9


# --- wrappers -----------------------------------------------------------------------------------


def test_wrappers_apply_in_their_order_in_training_and_evaluation(tmp_path: Path) -> None:
    trained = train(tmp_path / "a", wrappers=[Doubled, f"{HERE}:Plus"])
    assert trained.config.wrappers == (f"{HERE}:Doubled", f"{HERE}:Plus")
    assert trained.result.eval_return_mean == 5 * 3
    assert trained.policy().evaluate(episodes=1).mean == 5 * 3
    other = train(tmp_path / "b", wrappers=[f"{HERE}:Plus", Doubled])
    assert other.result.eval_return_mean == 5 * 4


def test_wrappers_repeat_on_the_command_line_and_need_trust_when_stored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = "--preset none --steps 60 --learning-starts 20 --net-arch 8 --n-eval-episodes 1"
    names = ["--wrapper", f"{HERE}:Doubled", "--wrapper", f"{HERE}:Plus"]
    run = str(tmp_path / "run")
    assert main(["train", f"{HERE}:Drifting", *line.split(), *names, "--run-dir", run]) == 0
    stored = json.loads((tmp_path / "run" / "config.json").read_text())
    assert stored["wrappers"] == [f"{HERE}:Doubled", f"{HERE}:Plus"]
    assert needs_trust(Config(wrappers=(f"{HERE}:Doubled",)))
    capsys.readouterr()
    assert main(["evaluate", run]) == 2
    assert f"{HERE}:Doubled" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"wrappers": ("no_colon",)}, "wrappers no_colon"),
        ({"wrappers": (f"{HERE}:Nothing",)}, "wrapper Nothing"),
        ({"wrappers": (f"{HERE}:Sampled",)}, "wrapper Sampled"),
        ({"wrappers": (f"{HERE}:Doubled",), "vectorize": "native"}, "wrappers --vectorize"),
        ({"wrappers": (f"{HERE}:Doubled",), "env": "ALE/Pong-v5"}, "wrappers"),
        ({"discretize_actions": 1}, "discretize_actions 0 2"),
    ],
)
def test_wrong_wrappers_are_refused(fields: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(QfleetError, match=says(*words.split())):
        train(tmp_path / "run", fields.pop("env", "CartPole-v1"), **fields)


# --- environments of other libraries ------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("SeveralAgents", "PettingZoo SuperSuit"),
        ("OldGym", "gym shimmy"),
        ("FourValues", "Gym shimmy"),
        ("NoSeed", "Gym shimmy seed"),
    ],
)
def test_an_env_of_another_library_is_named_with_its_adapter(
    name: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ["--steps", "200", "--run-dir", str(tmp_path / "run")]
    assert main(["train", f"{HERE}:{name}", *run]) != 0
    assert says_all(capsys.readouterr().err, name, *words.split())


def test_an_env_without_spaces_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = ["--steps", "200", "--run-dir", str(tmp_path / "run")]
    assert main(["train", f"{HERE}:NoSpaces", *run]) != 0
    assert says_all(capsys.readouterr().err, "NoSpaces", "observation_space", "__init__")


def says_all(text: str, *words: str) -> bool:
    return all(word in text for word in words)


def test_an_object_of_another_library_is_named_too(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedEnvError, match=says("PettingZoo", "SuperSuit")):
        train(tmp_path / "run", SeveralAgents())


@pytest.mark.slow
def test_neither_pettingzoo_nor_gym_is_imported() -> None:
    code = "import qfleet, sys; qfleet.train; print({'gym', 'pettingzoo'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
