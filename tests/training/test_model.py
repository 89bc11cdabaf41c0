"""``qfleet.DQN`` is Stable-Baselines3's model on top of ``qfleet.train`` and ``resume``."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

import qfleet
from qfleet.core.errors import ConfigError, QfleetError, UserError
from qfleet.storage.checkpoint import load_checkpoint
from qfleet.training import api
from support.configs import tiny_fields
from support.messages import says
from support.space_envs import SPACES, Sampled

TINY = tiny_fields(learning_starts=20, buffer_size=200, batch_size=4, net_arch=(8,))
TINY |= {"engine": "serial", "device": "cpu", "max_episode_steps": 30}
OBS = np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32)


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def newest(trained: qfleet.Trained | None) -> dict[str, Any]:
    assert trained is not None
    checkpoint = load_checkpoint(trained.folder / "checkpoints", None, on_alert=print)
    return checkpoint.parts["learner"]


def assert_same_learner(one: qfleet.Trained | None, other: qfleet.Trained | None) -> None:
    mine, theirs = newest(one), newest(other)
    for name in ("weights", "target_weights"):
        assert torch.equal(mine[name], theirs[name]), name
    for name, moment in mine["optimiser"].items():
        assert torch.equal(moment, theirs["optimiser"][name]), name


QUICK_START = """
import gymnasium as gym

from {package} import DQN

env = gym.make("CartPole-v1", render_mode="rgb_array")

model = DQN("MlpPolicy", env, verbose=1)
model.learn(total_timesteps=600, log_interval=4)
model.save("dqn_cartpole")

del model  # remove to demonstrate saving and loading

model = DQN.load("dqn_cartpole")

obs, info = env.reset()
for _ in range(50):
    action, _states = model.predict(obs, deterministic=True)
    obs, reward, terminated, truncated, info = env.step(action)
    if terminated or truncated:
        obs, info = env.reset()
"""


@pytest.mark.parametrize("package", ["qfleet", "stable_baselines3"])
def test_the_quick_start_of_sb3_runs_after_changing_the_import_line(package: str) -> None:
    pytest.importorskip(package)
    names: dict[str, Any] = {}
    exec(QUICK_START.format(package=package), names)  # the text is above
    assert names["action"].shape == ()
    assert names["DQN"].__module__.startswith(package)


def test_a_model_learns_what_train_learns_bit_for_bit() -> None:
    model = qfleet.DQN("MlpPolicy", "CartPole-v1", **TINY).learn(120)
    trained = qfleet.train("CartPole-v1", steps=120, **TINY)
    assert_same_learner(model.trained, trained)
    assert model.trained is not None
    assert model.trained.config == trained.config.replace(network="mlp")
    actions, state = model.predict(OBS, deterministic=True)
    assert (actions == trained.policy().act(OBS)).all()
    assert state is None
    other = qfleet.DQN("CartPole-v1", seed=1, **TINY).learn(120)
    assert not torch.equal(newest(other.trained)["weights"], newest(trained)["weights"])


def test_learn_again_goes_on_as_resume_does() -> None:
    model = qfleet.DQN("CartPole-v1", **TINY)
    assert model.num_timesteps == 0
    model.learn(100, reset_num_timesteps=True)  # Stable-Baselines3's default
    folder = model.trained and model.trained.folder
    assert model.learn(60) is model
    assert model.trained is not None
    assert model.trained.folder == folder
    assert model.num_timesteps == model.trained.result.env_steps == 160
    trained = qfleet.train("CartPole-v1", steps=100, **TINY)
    assert_same_learner(model.trained, qfleet.resume(trained.folder, steps=160))
    assert model.learn().trained is not None
    assert model.trained.result.env_steps == 220  # as many as before
    with pytest.raises(ConfigError, match="reset_num_timesteps"):
        model.learn(60, reset_num_timesteps=True)


def test_learn_without_a_number_makes_up_for_a_stop() -> None:
    def stop(run: qfleet.Run) -> bool:
        return run.parts.clock.env_steps < 40

    model = qfleet.DQN("CartPole-v1", **TINY).learn(120, callback=stop)
    assert model.trained is not None
    assert model.trained.result.env_steps < 120
    model.learn()
    assert model.trained.result.env_steps == 120


def test_a_loaded_model_predicts_and_starts_from_its_weights() -> None:
    model = qfleet.DQN("CartPole-v1", **TINY).learn(120)
    path = model.save("saved")
    assert path == Path("saved.safetensors")
    weights = model.policy.weights.data
    assert model.trained is not None
    for source in ("saved", path, str(model.trained.folder)):
        loaded = qfleet.DQN.load(source, learning_rate=1e-30)
        assert (loaded.predict(OBS, deterministic=True)[0] == model.policy.act(OBS)).all()
        loaded.learn(60)
        assert loaded.trained is not None
        assert loaded.trained.folder != model.trained.folder
        assert loaded.trained.result.updates > 0
        torch.testing.assert_close(newest(loaded.trained)["weights"], weights)
        assert loaded.trained.config.learning_starts == TINY["learning_starts"]
        loaded.learn(20)
        assert loaded.trained.result.env_steps == 80
    # Negative control: a new model has other weights.
    fresh = qfleet.DQN("CartPole-v1", learning_rate=1e-30, **TINY).learn(60)
    assert not torch.allclose(newest(fresh.trained)["weights"], weights)


def test_a_loaded_model_may_have_another_environment() -> None:
    qfleet.DQN("CartPole-v1", **TINY).learn(60).save("saved")
    loaded = qfleet.DQN.load("saved", env=gymnasium.make("CartPole-v0"), seed=3).learn(60)
    assert loaded.trained is not None
    assert (loaded.trained.config.env, loaded.trained.config.seed) == ("CartPole-v0", 3)
    with pytest.raises(ConfigError, match=says("init_from", "(4, 8)", "(2, 8)")):
        qfleet.DQN.load("saved", env="MountainCar-v0").learn(60)


def test_a_loaded_model_makes_an_imported_environment_only_with_trust(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "from gymnasium.envs.classic_control import CartPoleEnv as Own\n"
    (tmp_path / "own_env.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    qfleet.DQN("own_env:Own", **TINY).learn(60).save("saved")
    loaded = qfleet.DQN.load("saved")
    assert loaded.predict(OBS, deterministic=True)[0].shape == (50,)
    with pytest.raises(ConfigError, match=says("own_env:Own", "trust=True")):
        loaded.learn(60)
    for consenting in (
        qfleet.DQN.load("saved", trust=True),
        qfleet.DQN.load("saved", env="own_env:Own"),
        qfleet.DQN.load("saved", env="CartPole-v1"),
    ):
        consenting.learn(60)


@pytest.mark.parametrize(
    ("arguments", "fields"),
    [
        ({"train_freq": (8, "step")}, {"train_freq": 8}),
        ({"seed": None, "optimize_memory_usage": True, "policy_kwargs": None}, {}),
        ({"device": torch.device("cpu")}, {"device": "cpu"}),
        ({"policy_kwargs": {"net_arch": [16, 16]}}, {"net_arch": (16, 16)}),
        ({"activation_fn": torch.nn.Tanh}, {"activation": "tanh"}),
        (
            {"policy_kwargs": {"activation_fn": torch.nn.ELU, "optimizer_kwargs": {"eps": 1e-5}}},
            {"activation": "elu", "optimizer_eps": 1e-5},
        ),
        ({"optimizer_class": torch.optim.AdamW}, {"optimizer": "adamw", "weight_decay": 0.01}),
        (
            {"optimizer_class": torch.optim.AdamW, "optimizer_kwargs": {"weight_decay": 0.3}},
            {"optimizer": "adamw", "weight_decay": 0.3},
        ),
        ({"optimizer_kwargs": {"weight_decay": 0.1}}, {"weight_decay": 0.1}),
        ({"tau": 0.5, "gamma": 0.9, "exploration_fraction": 0.3}, None),
        ({"target_update_interval": 50, "gradient_steps": 2, "max_grad_norm": 1}, None),
    ],
    ids=str,
)
def test_arguments_of_sb3_are_fields(
    arguments: dict[str, Any], fields: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs = list[qfleet.Config]()

    def begin(config: qfleet.Config, *_: Any) -> None:
        configs.append(config)
        raise KeyboardInterrupt

    monkeypatch.setattr(api, "Run", begin)
    base = {name: value for name, value in TINY.items() if name not in arguments}
    expected = arguments if fields is None else fields
    with pytest.raises(KeyboardInterrupt):
        qfleet.DQN("CartPole-v1", **base, **arguments).learn(60)
    with pytest.raises(KeyboardInterrupt):
        qfleet.train("CartPole-v1", steps=60, **base | expected)
    assert configs[0] == configs[1]
    assert {name: getattr(configs[0], name) for name in expected} == expected


def test_a_model_with_other_layers_and_optimiser_learns() -> None:
    kwargs = {"net_arch": [8, 8], "activation_fn": torch.nn.Tanh}
    kwargs |= {"optimizer_class": torch.optim.AdamW, "optimizer_kwargs": {"weight_decay": 0.3}}
    base = {name: value for name, value in TINY.items() if name != "net_arch"}
    model = qfleet.DQN("MlpPolicy", "CartPole-v1", policy_kwargs=kwargs, **base).learn(60)
    layers = list(model.policy.network.torso.modules())
    assert [type(layer) for layer in layers[2:]] == [torch.nn.Linear, torch.nn.Tanh] * 2
    plain = base | {"net_arch": (8, 8), "activation": "tanh", "weight_decay": 0.0}
    without = qfleet.train("CartPole-v1", steps=60, **plain)
    assert newest(model.trained)["weights"].norm() < newest(without)["weights"].norm()


def test_every_argument_of_sb3_is_translated_or_refused_by_name() -> None:
    sb3 = pytest.importorskip("stable_baselines3")
    accepted, refused = set(), set()
    for name, parameter in inspect.signature(sb3.DQN.__init__).parameters.items():
        if name in ("self", "policy", "env", "_init_setup_model"):
            continue
        given = {name: parameter.default}
        try:
            qfleet.DQN("MlpPolicy", "CartPole-v1", **given)
            accepted.add(name)
        except QfleetError:
            with pytest.raises(ConfigError, match=name):
                qfleet.DQN("MlpPolicy", "CartPole-v1", **given)
            refused.add(name)
    assert refused == {"replay_buffer_class", "replay_buffer_kwargs", "stats_window_size"}
    assert len(accepted) > 18
    ours = inspect.signature(qfleet.DQN.learn).parameters
    assert list(ours) == list(inspect.signature(sb3.DQN.learn).parameters)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"train_freq": (1, "episode")}, ("train_freq", "episode")),
        ({"activation_fn": torch.nn.Softmax}, ("activation_fn", "Softmax", "Tanh")),
        ({"optimizer_class": torch.optim.RMSprop}, ("optimizer_class", "RMSprop", "AdamW")),
        ({"optimizer_kwargs": {"betas": (0.9, 0.99)}}, ("optimizer_kwargs", "betas")),
        ({"policy_kwargs": {"features_extractor_class": int}}, ("features_extractor_class",)),
        ({"learning_rate": len}, ("learning_rate", "float")),
        ({"learning_rte": 1e-3}, ("learning_rte", "learning_rate")),
        ({"policy": "LstmPolicy"}, ("policy", "LstmPolicy", "MlpPolicy")),
        ({"policy": "MlpPolicy", "env": None}, ("env",)),
    ],
    ids=str,
)
def test_what_has_no_counterpart_is_refused_before_anything_starts(
    arguments: dict[str, Any], words: tuple[str, ...]
) -> None:
    with pytest.raises(UserError, match=says(*words)):
        qfleet.DQN(**{"env": "CartPole-v1", **arguments})
    assert not Path("runs").exists()


def test_what_a_model_does_not_have_is_said_in_one_sentence() -> None:
    model = qfleet.DQN("CartPole-v1", **TINY)
    with pytest.raises(AttributeError, match=says("get_env", "gymnasium")):
        model.get_env()
    with pytest.raises(UserError, match=says("learn", "load")):
        model.predict(OBS)
    with pytest.raises(AttributeError, match=says("logger", ".trained", ".policy")):
        _ = model.logger


def test_cnn_policy_is_the_nature_cnn() -> None:
    """SB3 refuses its CnnPolicy on vectors too."""
    with pytest.raises(ConfigError, match=says("nature", "image")):
        qfleet.DQN("CnnPolicy", "CartPole-v1", **TINY).learn(60)


def test_tensorboard_log_is_the_folder_of_the_runs() -> None:
    pytest.importorskip("tensorboard")
    fields = TINY | {"tensorboard": True}
    for number in (1, 2):
        model = qfleet.DQN("CartPole-v1", tensorboard_log="logs", **fields).learn(60)
        assert model.trained is not None
        assert model.trained.folder == Path(f"logs/DQN_{number}").absolute()
        assert list(model.trained.folder.rglob("events.out.tfevents*"))


def test_steps_are_words_whenever_a_model_learns() -> None:
    model = qfleet.DQN("CartPole-v1", **TINY)
    for steps in ("0.1k", 1e2):
        model.learn(steps)
    assert model.trained is not None
    assert model.trained.result.env_steps == 200
    for wrong in (0, -5, 0.5, "many"):
        with pytest.raises(ConfigError, match=says(str(wrong).lstrip("-"))):
            model.learn(wrong)


def test_a_policy_of_many_inputs_takes_dict_observations() -> None:
    model = qfleet.DQN("MultiInputPolicy", Sampled, **TINY).learn(60)
    assert model.predict(SPACES["dict"].sample(), deterministic=True)[0].shape == ()


# --- callbacks --------------------------------------------------------------------------------


def test_a_function_is_called_between_turns_and_stops_the_run() -> None:
    seen = list[int]()

    def watch(run: qfleet.Run) -> bool:
        seen.append(run.parts.clock.env_steps)
        return run.parts.clock.env_steps < 40

    class Counter(qfleet.Callback):
        steps = ends = 0

        def on_step(self, run: Any) -> None:
            self.steps += 1

        def on_end(self, run: Any, result: qfleet.Result) -> None:
            self.ends += 1

    counter = Counter()
    trained = qfleet.train("CartPole-v1", steps=120, callbacks=[watch, counter], **TINY)
    assert (trained.result.stopped_by, seen[0]) == ("callback", 0)
    assert 40 <= trained.result.env_steps == seen[-1] < 120
    assert (counter.steps, counter.ends) == (len(seen), 1)
    model = qfleet.DQN("CartPole-v1", **TINY).learn(120, callback=watch)
    assert model.trained is not None
    assert model.trained.result.stopped_by == "callback"
    whole = qfleet.train("CartPole-v1", steps=120, callbacks=lambda _: None, **TINY)
    assert whole.result.stopped_by == "steps"


def test_a_callback_of_another_library_is_refused() -> None:
    sb3 = pytest.importorskip("stable_baselines3.common.callbacks")
    with pytest.raises(ConfigError, match=says("callback", "qfleet.Callback")):
        qfleet.DQN("CartPole-v1", **TINY).learn(120, sb3.CheckpointCallback(10, "."))
    assert not list(Path("runs").glob("*"))


def test_a_function_of_two_arguments_is_refused_before_the_run() -> None:
    def in_the_way_of_sb3(local: Any, outer: Any) -> bool:
        return bool(local and outer)

    with pytest.raises(ConfigError, match=says("callback", "function of the run", "outer")):
        qfleet.train("CartPole-v1", callbacks=in_the_way_of_sb3, **TINY)  # type: ignore[arg-type]
    assert not list(Path("runs").glob("*"))


# --- notebooks --------------------------------------------------------------------------------


def test_dir_lists_the_public_names() -> None:
    assert dir(qfleet) == sorted(qfleet.__all__)
    assert {"DQN", "train", "Policy"} <= set(dir(qfleet))
    for name in dir(qfleet):
        assert getattr(importlib.import_module("qfleet"), name) is not None


def test_reprs_are_short() -> None:
    model = qfleet.DQN("CartPole-v1", **TINY)
    assert repr(model) == "DQN(CartPole-v1)"
    model.learn(60)
    for shown in (model, model.trained, model.policy):
        assert "CartPole-v1" in repr(shown)
        assert len(repr(shown)) < 200
    assert str(model.trained and model.trained.folder) in repr(model)


def test_history_is_arrays_and_a_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    trained = qfleet.train("CartPole-v1", **TINY | {"steps": 120, "eval_freq": 40})
    history = trained.history
    assert history["eval/mean_reward"].shape == (3,)
    assert history.steps["eval/mean_reward"].tolist() == [40, 80, 120]
    assert history["eval/mean_reward"].max() == trained.result.best_eval_return
    assert history["train/loss"].dtype == np.float64
    assert "train/loss" in repr(history)
    pandas = pytest.importorskip("pandas")
    frame = history.frame()
    assert isinstance(frame, pandas.DataFrame)
    assert frame.index.name == "env_steps"
    assert frame["eval/mean_reward"].dropna().tolist() == history["eval/mean_reward"].tolist()
    monkeypatch.setitem(importlib.import_module("sys").modules, "pandas", None)
    with pytest.raises(ConfigError, match="pip install pandas"):
        history.frame()


def test_a_plot_is_a_figure_that_notebooks_show() -> None:
    from matplotlib.figure import Figure

    trained = qfleet.train("CartPole-v1", **TINY | {"steps": 120, "eval_freq": 40})
    files = {path for path in trained.folder.rglob("*") if path.is_file()}
    for metric in ("eval/mean_reward", "train/loss"):
        figure = trained.plot(metric)
        assert isinstance(figure, Figure)
        assert len(figure.axes) == 1
        assert figure._repr_png_().startswith(b"\x89PNG")
    assert {path for path in trained.folder.rglob("*") if path.is_file()} == files
    with pytest.raises(UserError, match=says("train/los", "train/loss")):
        trained.plot("train/los")


def test_progress_shows_lines_where_nothing_can_be_redrawn(
    capfd: pytest.CaptureFixture[str],
) -> None:
    qfleet.train("CartPole-v1", steps=120, **TINY)
    assert "120/120 steps" not in capfd.readouterr().err
    qfleet.train("CartPole-v1", steps=120, progress=True, **TINY)
    assert "120/120 steps" in capfd.readouterr().err
    model = qfleet.DQN("CartPole-v1", **TINY).learn(120, progress_bar=True)
    assert "120/120 steps" in capfd.readouterr().err
    model.learn(60)
    assert "180/180 steps" not in capfd.readouterr().err
