"""What new users bring: packages' ids, Python objects, images, short runs, slow environments."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete
from torch import Tensor, nn

import qfleet
from qfleet.cli.main import main
from qfleet.cli.run_options import RunArguments, finish
from qfleet.core.errors import ConfigError, QfleetError, UnknownNameError
from qfleet.envs.objects import env_fields
from qfleet.envs.registry import package_of
from support.configs import tiny_fields
from support.messages import says
from support.toy_envs import Corridor

TINY = {**tiny_fields(steps=200, learning_starts=20), "n_eval_episodes": 1, "max_episode_steps": 20}


def train(tmp_path: Path, env: Any, **fields: Any) -> qfleet.Trained:
    return qfleet.train(env, run_dir=tmp_path / "run", **{**TINY, **fields})


class Torso(nn.Module):
    features = 4

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.layer = nn.Linear(shape[0], self.features)

    def forward(self, obs: Tensor) -> Tensor:
        return self.layer(obs).relu()


class Pixels(gymnasium.Env[Any, Any]):
    action_space = Discrete(2)

    def __init__(self, shape: tuple[int, ...] = (128, 128, 3)) -> None:
        self.observation_space = Box(0, 255, tuple(shape), np.uint8)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed, options=options)
        return np.zeros(self.observation_space.shape or (), np.uint8), {}

    def step(self, action: Any) -> Any:
        return np.full(self.observation_space.shape or (), 255, np.uint8), 1.0, False, False, {}


# --- ids of packages --------------------------------------------------------------------------


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An installed package that registers an id when it is imported."""
    site = tmp_path / "site"
    (site / "wind_envs").mkdir(parents=True)
    (site / "wind_envs" / "__init__.py").write_text(
        "import gymnasium\n"
        "gymnasium.register('Windmill-v3', entry_point='support.toy_envs:Corridor')\n"
    )
    info = site / "wind_envs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: wind-envs\nVersion: 1.0\nRequires-Dist: gymnasium>=1\n")
    (info / "RECORD").write_text("wind_envs/__init__.py,,\n")
    monkeypatch.syspath_prepend(str(site))
    yield "wind_envs"
    sys.modules.pop("wind_envs", None)


@pytest.fixture(autouse=True)
def registry_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gymnasium.envs.registration, "registry", gymnasium.registry.copy())


def test_a_package_before_an_id_registers_it(tmp_path: Path, package: str) -> None:
    trained = train(tmp_path, f"{package}:Windmill-v3")
    assert (trained.config.env, trained.config.imports) == ("Windmill-v3", (package,))


def test_an_unknown_id_names_the_installed_package_that_has_it(package: str) -> None:
    assert package_of("Windmill-v3") == package
    assert package_of("Windmill-v2") is None
    with pytest.raises(UnknownNameError, match=says("Windmill-v3", f"{package}:Windmill-v3")):
        qfleet.train("Windmill-v3")


def test_an_unknown_id_is_only_told_ids_that_are_close() -> None:
    with pytest.raises(UnknownNameError, match=says("roadway-fast-v0", "PACKAGE:ID")) as caught:
        qfleet.train("roadway-fast-v0")
    assert "did you mean" not in str(caught.value)
    with pytest.raises(UnknownNameError, match=says("did you mean CartPole-v1", "PACKAGE:ID")):
        qfleet.train("CartPoll-v1")


def test_the_id_is_checked_before_other_values(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "Nothing-v0", "--gamma", "3", "--steps", "10"]) == 2
    error = capsys.readouterr().err
    assert "Nothing-v0" in error
    assert "gamma" not in error
    assert main(["train", "CartPole-v1", "--gamma", "3", "--steps", "10"]) == 2
    assert "gamma" in capsys.readouterr().err


# --- objects ----------------------------------------------------------------------------------


def test_an_environment_is_rebuilt_from_its_spec() -> None:
    made = gymnasium.make("FrozenLake-v1", is_slippery=False, max_episode_steps=7)
    fields = env_fields(made)
    assert fields.pop("env_kwargs") == json.dumps({"is_slippery": False})
    assert fields == {"env": "FrozenLake-v1", "max_episode_steps": 7}
    assert env_fields(gymnasium.make("CartPole-v1", render_mode="rgb_array")) == {
        "env": "CartPole-v1",
        "env_kwargs": "{}",
    }


def test_a_wrapped_environment_is_rebuilt_with_its_wrappers(tmp_path: Path) -> None:
    wrapped = gymnasium.wrappers.TimeAwareObservation(gymnasium.make("CartPole-v1"))
    assert train(tmp_path, wrapped).policy("last").spec.obs_shape == (5,)


def test_a_monitor_of_stable_baselines3_is_left_out() -> None:
    monitor = type("Monitor", (Nameless,), {"__module__": "stable_baselines3.common.monitor"})
    assert env_fields(monitor(gymnasium.make("CartPole-v1")))["env"] == "CartPole-v1"


@pytest.mark.parametrize("name", ["EvalCallback", "Another"])
def test_callbacks_of_stable_baselines3_are_refused(name: str) -> None:
    other = type(name, (), {})()
    word = "eval_freq" if name == "EvalCallback" else "called"
    with pytest.raises(ConfigError, match=says("callback", name, word)):
        qfleet.train("CartPole-v1", callbacks=other)


class Nameless(gymnasium.Wrapper[Any, Any, Any, Any]):
    """A wrapper that does not record its arguments."""


@pytest.mark.parametrize(
    ("env", "words"),
    [
        (lambda: Corridor(), "Corridor class env_kwargs"),
        (lambda: Nameless(gymnasium.make("CartPole-v1")), "rebuilt function"),
        (lambda: gymnasium.make_vec("CartPole-v1", 2), "vector envs=2"),
        (lambda: 3, "id class function 3"),
    ],
)
def test_one_sentence_says_why_an_object_cannot_be_used(env: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=says(*words.split())) as caught:
        qfleet.train(env())
    assert "\n" not in str(caught.value)


def test_a_class_a_function_and_a_network_are_accepted(tmp_path: Path) -> None:
    trained = train(tmp_path, Corridor, network=Torso, name=None)
    assert trained.config.env == "support.toy_envs:Corridor"
    assert trained.config.network.endswith("test_first_contact:Torso")
    trained = train(tmp_path / "two", lambda: Corridor())
    assert trained.config.env.startswith("object:")
    assert trained.policy("last").act(np.eye(5, dtype=np.float32)[1]) in (0, 1)


def test_arguments_of_a_class_are_a_dict(tmp_path: Path) -> None:
    trained = train(tmp_path, Pixels, env_kwargs={"shape": [6, 6]}, network="mlp")
    assert trained.policy("last").spec.obs_shape == (6, 6)


def test_a_network_that_is_an_instance_is_refused_in_one_line() -> None:
    with pytest.raises(ConfigError, match=says("Torso", "class")) as caught:
        qfleet.train("CartPole-v1", network=Torso((4,)))
    assert "\n" not in str(caught.value)


def test_an_object_that_processes_cannot_import_says_so(tmp_path: Path) -> None:
    with pytest.raises(QfleetError, match=says("object:", "module", "processes")):
        train(tmp_path, lambda: Corridor(), vectorize="async", envs=2)


# --- images, short runs, slow environments ----------------------------------------------------


def test_images_train_for_a_few_steps_with_the_largest_buffer(tmp_path: Path) -> None:
    pixels = {"shape": [128, 128, 3]}
    trained = train(tmp_path, Pixels, env_kwargs=pixels, steps=40, buffer_size=10**6)
    assert trained.result.env_steps == 40


def test_a_longer_total_gives_a_resumed_run_more_room(tmp_path: Path) -> None:
    trained = train(tmp_path, "CartPole-v1", steps=40, prioritized_replay=True)
    again = qfleet.resume(trained.folder, steps=900)
    assert again.result.env_steps == 900


def test_a_tiny_run_of_a_large_preset_is_not_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["train", "MountainCar-v0", "--steps", "60", "--run-dir", str(tmp_path / "run")]
    assert main([*line, "--n-eval-episodes", "1"]) == 0
    progress = capsys.readouterr().err
    assert "preset mountaincar for 60 steps: learning_starts" in progress
    assert "network mlp for 2 float32 observations" in progress


def test_without_hidden_layers_a_network_of_discrete_observations_is_a_table(
    tmp_path: Path,
) -> None:
    trained = train(tmp_path, "FrozenLake-v1", net_arch=())
    table, bias = trained.policy("last").network.parameters()
    assert table.shape == (16, 4)
    np.testing.assert_allclose(
        trained.policy("last").q_values(np.arange(16)), (table + bias).detach().numpy(), rtol=1e-6
    )


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["serial", "pipeline", "device"])
@pytest.mark.parametrize("algo", ["dqn", "rainbow", "iqn", "pqn"])
def test_every_head_and_engine_learns_without_hidden_layers(
    tmp_path: Path, engine: str, algo: str
) -> None:
    rollout = (
        {"train_freq": 64, "envs": 2, "gradient_steps": 4, "batch_size": 16}
        if algo == "pqn"
        else {}
    )
    trained = train(
        tmp_path, "CartPole-v1", algo=algo, engine=engine, net_arch=(), device="cpu", **rollout
    )
    assert trained.result.updates > 0


def test_a_slow_environment_gets_the_advice_and_a_quick_one_does_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(4)))
    trained = train(tmp_path, Pixels, env_kwargs={"shape": [2, 2]}, network="mlp", engine="serial")
    measured = trained.result.time_share["env"]
    assert measured is not None
    assert 0 < measured < 1
    # 20 ms a step; 0.02 ms a step; 20 ms a step, most of them elsewhere.
    for share, step_s, advised in ((0.9, 0.02, True), (0.9, 2e-5, False), (0.1, 0.02, False)):
        result = dataclasses.replace(
            trained.result, time_share={"env": share}, wall_s=trained.result.env_steps * step_s
        )
        assert finish(dataclasses.replace(trained, result=result), RunArguments()) == 0
        assert ("--vectorize async" in capsys.readouterr().out) == advised


def test_packages_are_read_without_being_imported(package: str) -> None:
    assert package_of("Windmill-v3") == package
    assert package not in sys.modules
    assert any(d.metadata["Name"] == "wind-envs" for d in importlib.metadata.distributions())


def test_a_callback_may_answer_with_numpy(tmp_path: Path) -> None:
    trained = qfleet.train(
        "CartPole-v1", run_dir=tmp_path / "run", callbacks=lambda _: np.mean([1.0]) < 0,
        **tiny_fields(steps=2000),
    )  # fmt: skip
    assert trained.result.stopped_by == "callback"


def test_a_lifted_time_limit_stays_lifted() -> None:
    limited = env_fields(gymnasium.make("MountainCar-v0", max_episode_steps=50))
    assert (limited["env"], limited["max_episode_steps"]) == ("MountainCar-v0", 50)
    assert env_fields(gymnasium.make("MountainCar-v0", max_episode_steps=-1))["env"] != (
        "MountainCar-v0"
    )


@pytest.mark.parametrize("algo", ["rainbow", "n-step-dqn"])
def test_the_name_of_an_algorithm_alone_is_no_algorithm(algo: str) -> None:
    with pytest.raises(ConfigError, match=says(algo, "n_steps", "qfleet.train(algo=")):
        qfleet.train(config=qfleet.Config(env="CartPole-v1", algo=algo))
    with pytest.raises(UnknownNameError, match="rainbw"):
        qfleet.train(config=qfleet.Config(env="CartPole-v1", algo="rainbw"))


def test_a_run_is_not_removed_for_one_that_cannot_start(tmp_path: Path) -> None:
    qfleet.train("CartPole-v1", run_dir=tmp_path / "run", **tiny_fields(steps=200))
    with pytest.raises(QfleetError, match="typo"):
        qfleet.train(
            "CartPole-v1", run_dir=tmp_path / "run", overwrite=True, env_kwargs={"typo": 1}
        )
    assert qfleet.load(tmp_path / "run", "last").act(np.zeros(4)) in (0, 1)


def test_a_folder_of_several_seeds_takes_no_other_run(tmp_path: Path) -> None:
    fields = tiny_fields(steps=200, run_dir=tmp_path / "run")
    qfleet.train_seeds(1, "CartPole-v1", **fields)
    for start in (qfleet.train, lambda *a, **k: qfleet.train_seeds([5], *a, **k)):
        with pytest.raises(ConfigError, match="holds a run already"):
            start("CartPole-v1", **fields)
