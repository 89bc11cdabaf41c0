"""A policy acts without its environment, is saved as one file, and predicts as SB3's do."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import qfleet
from qfleet.agent import policy as policies
from qfleet.cli.main import main
from qfleet.core.errors import CheckpointError, ConfigError, QfleetError
from qfleet.storage.checkpoint import load_checkpoint, load_policy
from qfleet.storage.spec_json import spec_from_json, spec_to_json
from support import populations
from support.configs import tiny_fields
from support.messages import says

TINY = tiny_fields(
    steps=60, learning_starts=20, buffer_size=100, batch_size=4, net_arch=(8,), engine="serial"
)
A3C = tiny_fields(algo="a3c", envs=4, train_freq=64, batch_size=64, steps=128)
MANY = np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32)


@pytest.fixture(scope="module")
def cartpole(tmp_path_factory: pytest.TempPathFactory) -> qfleet.Trained:
    return qfleet.train("CartPole-v1", **TINY, run_dir=tmp_path_factory.mktemp("policy") / "run")


@pytest.fixture
def no_envs(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("an environment was made")

    monkeypatch.setattr(policies, "make_envs", refuse)


def own_env(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch, **fields: Any) -> Path:
    """Train in an environment of a user's module; from then on, importing it is an error."""
    source = "from support.odd_envs import Offset\nfrom torch.nn import Identity\n"
    source += "class Net(Identity):\n    def forward(self, obs): return obs.float()[:, None]\n"
    (folder / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(str(folder))
    run = qfleet.train(f"{name}:Offset", **TINY | fields, run_dir=folder / "run").folder
    (folder / f"{name}.py").write_text("raise AssertionError('imported')\n")
    del sys.modules[name]
    importlib.invalidate_caches()
    return run


# --- without the environment ------------------------------------------------------------------


@pytest.mark.parametrize("which", ["best", "last"])
def test_a_policy_is_loaded_without_its_environment_and_without_trust(
    which: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = own_env(tmp_path, f"gone_{which}", monkeypatch)
    policy = qfleet.load(run, which)
    assert policy.act(3) in (7, 8)  # the environment's own numbers, from 3 and from 7
    for path in (run, policy.save(tmp_path / "policy")):
        loaded = qfleet.load(path)
        for play in (loaded.evaluate, lambda p=path: qfleet.evaluate(p)):
            with pytest.raises(ConfigError, match=says(f"gone_{which}:Offset", "--trust")):
                play()
        assert main(["video", str(path)]) == 2
        # Negative control: with consent the module is imported.
        with pytest.raises(ConfigError, match="imported"):
            qfleet.load(path, trust=True).evaluate(1)


def test_a_network_of_the_user_still_needs_trust(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = own_env(tmp_path, "own_net", monkeypatch, network="own_net:Net")
    with pytest.raises(ConfigError, match=says("own_net:Net", "own_net:Offset", "--trust")):
        qfleet.load(run)
    with pytest.raises(ConfigError, match="imported"):
        qfleet.load(run, trust=True)


@pytest.mark.parametrize(
    ("env", "fields"),
    [
        ("CartPole-v1", {"engine": "pipeline", "vectorize": "sync"}),
        ("support.toy_envs:Drift", {"frame_stack": 2, "max_episode_steps": 10}),
        ("CartPole-v1", populations.FIELDS | {"algo": "pqn", "batch_size": 16}),
    ],
)
def test_best_policies_and_checkpoints_hold_the_whole_spec(
    env: str, fields: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = tiny_fields() if "population" in fields else TINY
    run = qfleet.train(env, **tiny | fields, run_dir=tmp_path / "run").folder
    stored = [load_policy(run / "best"), load_checkpoint(run / "checkpoints")]
    folders = [run]
    if "population" in fields:
        folders = [run / "agents" / "0", run / "agents" / "1"]
        stored.append(load_policy(folders[1] / "best"))
    config = qfleet.load(run, trust=True).config
    envs = policies.make_envs(config, 1, 0, training=False, on_fault=lambda *_: None)
    envs.close()
    for one in stored:
        assert spec_from_json(one.meta["spec"]) == envs.spec
    monkeypatch.delattr(policies, "make_envs")
    for folder in folders:
        for which in ("best", "last"):
            assert qfleet.load(folder, which).spec == envs.spec  # type: ignore[arg-type]


def test_a_users_spec_with_numpy_integers_is_stored() -> None:
    spec = qfleet.EnvSpec("x", (np.int64(4),), "float32", np.int64(2))  # type: ignore[arg-type]
    assert spec_from_json(json.loads(json.dumps(spec_to_json(spec)))) == spec


@pytest.mark.parametrize(
    "change",
    [
        {"obs_shape": 4}, {"obs_shape": [-4]}, {"obs_shape": ["4"]}, {"obs_dtype": "object"},
        {"num_actions": 0}, {"num_actions": True}, {"num_actions": 2.0}, {"env_id": None},
        {"first_action": 10**30}, {"num_obs_values": -1}, {"code": "import os"},
    ],
)  # fmt: skip
def test_a_malformed_spec_is_refused(change: dict[str, Any]) -> None:
    values = spec_to_json(qfleet.EnvSpec("x", (4,), "float32", 2))
    spec_from_json(values)  # negative control
    for bad in (values | change, None, [], {}):
        with pytest.raises(CheckpointError, match="spec"):
            spec_from_json(bad)


# --- one file ---------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [TINY, TINY | {"noisy": True, "algo": "iqn"}, A3C])
@pytest.mark.usefixtures("no_envs")
def test_a_saved_policy_is_the_same_policy(fields: dict[str, Any], tmp_path: Path) -> None:
    policy = qfleet.train("CartPole-v1", **fields, run_dir=tmp_path / "run").policy()
    path = policy.save(tmp_path / "deep" / "v1.2")
    assert path == tmp_path / "deep" / "v1.2.safetensors"
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    assert policy.save(str(path)) == path  # replaces it
    loaded = qfleet.load(str(path))
    assert (loaded.config, loaded.spec) == (policy.config, policy.spec)
    assert np.array_equal(loaded.q_values(MANY), policy.q_values(MANY))


def test_the_verbs_take_a_file_in_place_of_a_run(
    cartpole: qfleet.Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = cartpole.policy().save(tmp_path / "policy")
    for source in (path, cartpole.folder):
        assert main(["evaluate", str(source), "--episodes", "2", "--json"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert json.loads(first) == json.loads(second)
    pytest.importorskip("pygame")
    assert main(["video", str(path), "--max-frames", "2", "--seed", "4"]) == 0
    assert (tmp_path / "policy-seed4.gif").exists()
    with pytest.raises(ConfigError, match="last"):
        qfleet.load(path, "last")


def without(*names: str) -> Callable[[dict[str, str]], None]:
    def change(metadata: dict[str, str]) -> None:
        for name in names:
            del metadata[name]

    return change


def with_field(part: str, **fields: Any) -> Callable[[dict[str, str]], None]:
    def change(metadata: dict[str, str]) -> None:
        metadata[part] = json.dumps(json.loads(metadata[part]) | fields)

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without("format"), ["not a file that policy.save"]),
        (without("config"), ["config"]),
        (without("spec"), ["spec"]),
        (lambda metadata: metadata.update(config="{"), ["damaged"]),
        (lambda metadata: metadata.update(spec="[" * 100_000), ["damaged"]),
        (lambda metadata: metadata.update(config="[1]"), ["config"]),
        (with_field("config", nosuch=1), ["nosuch"]),
        (with_field("config", gamma=2.0), ["gamma"]),
        (with_field("config", learning_rate=10**400), ["config"]),
        (with_field("config", env_kwargs="[" * 100_000), ["config"]),
        (with_field("config", net_arch=[9]), ["weights"]),
        (with_field("config", net_arch=[2**40, 2**20]), ["cannot be built"]),
        (with_field("config", net_arch=[10**30]), ["net_arch"]),
        (with_field("config", noisy=True), ["weights"]),
        (with_field("spec", obs_shape=[5]), ["weights"]),
        (with_field("spec", num_actions=2**40), ["cannot be built"]),
        (with_field("spec", num_actions="2"), ["spec"]),
        (with_field("config", network="json:decoder"), ["json:decoder", "--trust"]),
    ],
)
def test_a_file_with_wrong_metadata_is_refused_in_one_line(
    change: Callable[[dict[str, str]], None],
    words: list[str],
    cartpole: qfleet.Trained,
    tmp_path: Path,
) -> None:
    path = cartpole.policy().save(tmp_path / "policy")
    tensors, metadata = load_file(path), policies.load_policy_file(path).meta
    metadata = {name: json.dumps(value) for name, value in metadata.items()}
    metadata["format"] = "qfleet-policy-1"
    save_file(tensors, path, metadata)
    qfleet.load(path)  # negative control: the file is good before the change
    change(metadata)
    save_file(tensors, path, metadata)
    with pytest.raises(QfleetError, match=says(*words)) as caught:
        qfleet.load(path)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_no_policy_is_refused_in_one_line(
    cartpole: qfleet.Trained, tmp_path: Path
) -> None:
    path = cartpole.policy().save(tmp_path / "policy")
    whole = path.read_bytes()
    # Copies: load_file maps the file, whose pages are gone once it is shorter.
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    for contents in (b"", b"no tensors", whole[:-1], whole[: len(whole) // 2]):
        path.write_bytes(contents)
        with pytest.raises(CheckpointError, match="safetensors"):
            qfleet.load(path)
    for bad in ({"w": torch.zeros(3)}, tensors | {"more": torch.zeros(3)}):
        save_file(bad, path, {"format": "qfleet-policy-1", "config": "{}", "spec": "{}"})
        with pytest.raises(CheckpointError):
            qfleet.load(path)
    with pytest.raises(CheckpointError, match=says("not a file that policy.save")):
        qfleet.load(cartpole.folder / "best" / "policy.safetensors")
    with pytest.raises(CheckpointError, match="no policy file"):
        qfleet.load(tmp_path / "nosuch.safetensors")


def test_a_policy_that_cannot_be_written_leaves_the_old_file(
    cartpole: qfleet.Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = cartpole.policy()
    path = policy.save(tmp_path / "policy")
    before = path.read_bytes()

    def full(name: str) -> None:
        if name.startswith("sync"):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("qfleet.core.files.write_point", full)
    with pytest.raises(CheckpointError, match="No space left"):
        policy.save(path)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


# --- predict ----------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", ["x", {}, None, [[0.0] * 4, None], [0.0, 0.0, 0.0, "x"]])
def test_what_is_no_observation_is_refused(wrong: Any, cartpole: qfleet.Trained) -> None:
    with pytest.raises(ConfigError, match=says("observation")):
        cartpole.policy().act(wrong)


def test_predict_returns_what_stable_baselines3_returns(cartpole: qfleet.Trained) -> None:
    sb3 = pytest.importorskip("stable_baselines3")
    theirs = sb3.DQN("MlpPolicy", "CartPole-v1", buffer_size=10, device="cpu")
    ours = qfleet.load(cartpole.folder)
    for obs in (MANY[0], MANY[:1], MANY):
        action, state = ours.predict(obs)
        like, _ = theirs.predict(obs, deterministic=True)
        assert state is None
        assert isinstance(action, np.ndarray)
        assert (action.shape, action.dtype) == (like.shape, like.dtype)
        assert np.array_equal(action, ours.act(obs))


def test_sb3s_evaluate_policy_plays_a_policy(cartpole: qfleet.Trained) -> None:
    evaluation = pytest.importorskip("stable_baselines3.common.evaluation")
    policy = qfleet.load(cartpole.folder)
    env = gymnasium.make("CartPole-v1")
    env.reset(seed=0)
    mean, _ = evaluation.evaluate_policy(policy, env, n_eval_episodes=3, warn=False)
    assert 5 <= mean <= 500


def test_predict_explores_with_the_final_epsilon(cartpole: qfleet.Trained) -> None:
    policy = qfleet.load(cartpole.folder)
    obs = np.repeat(MANY[:1], 4000, axis=0)
    greedy = policy.act(MANY[0])
    for epsilon in (0.0, 0.3, 1.0):
        policy.config = policy.config.replace(exploration_final_eps=epsilon)
        actions, _ = policy.predict(obs, deterministic=False)
        assert actions.dtype == np.int64
        assert np.mean(actions != greedy) == pytest.approx(epsilon / 2, abs=0.05)
        assert policy.predict(MANY[0], deterministic=False)[0].shape == ()


def test_predict_draws_from_the_policy_of_an_actor_critic(tmp_path: Path) -> None:
    policy = qfleet.train("CartPole-v1", **A3C, run_dir=tmp_path / "run").policy()
    logits = torch.from_numpy(policy.q_values(MANY[0]))
    obs = np.repeat(MANY[:1], 4000, axis=0)
    actions, _ = policy.predict(obs, deterministic=False)
    assert actions.mean() == pytest.approx(float(logits.softmax(0)[1]), abs=0.05)
    assert (policy.predict(obs)[0] == policy.act(MANY[0])).all()


# --- evaluate in another environment ----------------------------------------------------------


def test_a_policy_is_evaluated_in_another_environment(cartpole: qfleet.Trained) -> None:
    policy = qfleet.load(cartpole.folder)
    other = policy.evaluate(2, env="gymnasium.envs.classic_control.cartpole:CartPoleEnv")
    assert len(other.returns) == 2
    with pytest.raises(ConfigError, match=says("Acrobot-v1", "(6,)", "3", "(4,)", "2")):
        policy.evaluate(1, env="Acrobot-v1")


def test_an_environment_of_the_caller_needs_no_trust_and_imports_nothing_stored(
    cartpole: qfleet.Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stored_import.py").write_text("raise AssertionError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    policy = qfleet.load(cartpole.folder)
    policy.config = policy.config.replace(
        env="stored_import:Env", imports=("stored_import",), env_kwargs='{"length": 6}'
    )
    assert len(policy.evaluate(1, env="CartPole-v1").returns) == 1
    policy.trust = True  # negative control: with consent the stored import is used
    with pytest.raises(ConfigError, match="imported"):
        policy.evaluate(1, env="CartPole-v1")
