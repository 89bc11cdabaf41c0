"""Training from a dataset: the clock in rows, resuming, evaluations, statistics, imitation."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import qfleet
from qfleet.config.presets import resolve
from qfleet.core.errors import RunBusyError
from qfleet.core.types import SKIP, TERMINATED, EnvSpec
from qfleet.data.manifest import Dataset
from qfleet.data.operations import fit_statistics, split, store_statistics
from qfleet.engines.offline import build, with_dataset
from qfleet.engines.parts import Setup
from qfleet.storage.checkpoint import has_checkpoint, load_checkpoint
from qfleet.storage.locks import RunLock
from qfleet.telemetry.faults import FaultLog
from qfleet.training.record_data import record
from support.configs import tiny_fields
from support.datasets import (
    CARTPOLE,
    STACK,
    read_all,
    record_block,
    scripted_block,
    telling_block,
)
from support.processes import start_qfleet
from support.waiting import wait_until


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Transitions with CartPole's shapes: an episode's first action is 0, the others are 1."""
    folder = tmp_path_factory.mktemp("data")
    record_block(folder, telling_block(400), CARTPOLE)
    return str(folder)


def train(data: str, run_dir: Path, **fields: Any) -> qfleet.Trained:
    options = fields.pop("options", None)
    fields = tiny_fields(**fields)
    fields.pop("preset")
    return qfleet.train(data=data, run_dir=run_dir, options=options, **fields)


def state_of(trained: qfleet.Trained) -> dict[str, Any]:
    return load_checkpoint(trained.folder / "checkpoints", None).parts


def test_steps_are_rows_and_every_batch_is_an_update(data: str, tmp_path: Path) -> None:
    trained = train(data, tmp_path / "run", epochs=3, log_interval=200)
    total = 3 * Dataset(data).manifest.transitions
    assert trained.result.engine == "offline"
    assert trained.result.env_steps == total
    assert trained.result.updates == total // 16
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    epochs = [line["data/epoch"] for line in lines if "data/epoch" in line]
    assert epochs == sorted(epochs)
    assert epochs[-1] == pytest.approx(3, abs=0.05)
    assert trained.result.eval_return_mean is not None


@pytest.mark.parametrize(
    "algo",
    ["dqn", "behaviour-cloning"]
    + [pytest.param(algo, marks=pytest.mark.slow) for algo in ("cql", "bcq")],
)
def test_a_resumed_run_equals_an_uninterrupted_one(algo: str, data: str, tmp_path: Path) -> None:
    fields = {"algo": algo, "steps": 2500, "batch_size": 8, "n_steps": 3, "block_rows": 0}
    whole = train(data, tmp_path / "whole", **fields)
    options = qfleet.RunOptions(stop_after=1100)
    train(data, tmp_path / "cut", options=options, **fields)
    resumed = qfleet.resume(tmp_path / "cut")
    assert isinstance(resumed, qfleet.Trained)
    ours, theirs = state_of(whole), state_of(resumed)
    assert torch.equal(ours["learner"]["weights"], theirs["learner"]["weights"])
    assert ours["memory"] == theirs["memory"]
    other = train(data, tmp_path / "other", seed=1, **fields)  # the negative control
    assert not torch.equal(state_of(other)["learner"]["weights"], ours["learner"]["weights"])


@pytest.mark.parametrize("given", [{}, {"epochs": 1}, {"batch_size": 16}, {"data": ""}])
def test_a_loaded_model_learns_on_from_a_dataset(
    given: dict[str, Any], data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first = train(data, tmp_path / "run", epochs=2)
    planned = first.config.steps // 2 if "epochs" in given else first.config.steps
    loaded = qfleet.DQN.load(first.folder, **given).learn().trained
    assert loaded is not None
    assert loaded.result.env_steps == planned
    assert loaded.config.engine == ("offline" if loaded.config.data else "serial")
    if "epochs" not in given:
        again = qfleet.DQN.load(first.folder, **given).learn(128).trained
        assert again is not None
        assert again.result.env_steps == 128


@pytest.mark.slow
def test_a_killed_run_goes_on_as_if_it_had_not_been_killed(data: str, tmp_path: Path) -> None:
    fields = {"steps": 30_000, "checkpoint_freq": 2000, "data_memory_mb": 86, "seed": 3}
    whole = train(data, tmp_path / "whole", **fields)
    words = whole.config.to_json()
    (tmp_path / "config.json").write_text(words)
    folder = tmp_path / "killed"
    process = start_qfleet(
        "train", "--config", str(tmp_path / "config.json"), "--run-dir", str(folder)
    )
    wait_until(lambda: has_checkpoint(folder / "checkpoints"), "a checkpoint", process=process)
    process.kill()
    process.wait(60)
    assert not (folder / "result.json").exists()
    resumed = qfleet.resume(folder)
    assert isinstance(resumed, qfleet.Trained)
    ours, theirs = state_of(whole), state_of(resumed)
    assert torch.equal(ours["learner"]["weights"], theirs["learner"]["weights"])
    assert ours["memory"] == theirs["memory"]


def test_behaviour_cloning_takes_the_actions_of_the_data(data: str, tmp_path: Path) -> None:
    trained = train(data, tmp_path / "run", algo="bc", epochs=20, learning_rate=1e-2)
    rows = read_all(Dataset(data))
    usable = rows.flags & SKIP == 0
    chosen = qfleet.load(trained.folder).act(rows.obs[usable])
    assert (chosen == rows.action[usable]).mean() > 0.98
    assert len(np.unique(rows.action[usable])) == 2
    # The settings of its training, which needs a dataset, do not keep it from playing.
    played = record(qfleet.load(trained.folder), str(tmp_path / "played"), steps=64)
    assert played.manifest.transitions > 32


def test_clipped_rewards_cannot_be_learnt_from_unclipped(data: str, tmp_path: Path) -> None:
    path = Path(data) / "manifest.json"
    before = path.read_text()
    values = json.loads(before)
    values["env"]["clip_rewards"] = True
    try:
        path.write_text(json.dumps(values))
        with pytest.raises(qfleet.ConfigError, match="clip_rewards"):
            train(data, tmp_path / "run", clip_rewards=False)
    finally:
        path.write_text(before)


def test_without_the_environment_there_are_no_evaluations(tmp_path: Path) -> None:
    spec = EnvSpec("NotInstalled-v3", (4,), "float32", 2)
    record_block(tmp_path / "data", scripted_block(spec, 200, 1), spec)
    trained = train(str(tmp_path / "data"), tmp_path / "run", epochs=4, eval_freq=50)
    assert trained.result.stopped_by == "steps"
    assert trained.result.eval_return_mean is None
    assert qfleet.load(trained.folder, "last").act(np.zeros(4)) in (0, 1)


@pytest.mark.parametrize(
    "spec", [replace(CARTPOLE, obs_shape=(6,)), replace(CARTPOLE, num_actions=5)]
)
def test_an_environment_with_other_spaces_is_not_played(spec: EnvSpec, tmp_path: Path) -> None:
    record_block(tmp_path / "data", scripted_block(spec, 200, 1), spec)
    config = with_dataset(resolve(None, "dqn", "none", {
        "env": "CartPole-v1", "data": str(tmp_path / "data"), "epochs": 1, "tensorboard": False
    })[0])  # fmt: skip
    parts = build(Setup(config, FaultLog()))
    parts.close()
    assert parts.evaluator is None
    assert "no evaluations: environment 'CartPole-v1' has" in parts.notes[-1]


def test_another_environment_can_stand_in_for_one_that_is_missing(tmp_path: Path) -> None:
    spec = EnvSpec("NotInstalled-v3", (4,), "float32", 2)
    record_block(tmp_path / "data", scripted_block(spec, 60, 1), spec)
    trained = train(str(tmp_path / "data"), tmp_path / "run", epochs=1, eval_env="CartPole-v1")
    assert trained.result.eval_return_mean is not None


def test_a_dataset_may_move_while_a_run_is_stopped_but_not_change(
    data: str, tmp_path: Path
) -> None:
    shutil.copytree(data, tmp_path / "data")
    options = qfleet.RunOptions(stop_after=1100)
    train(str(tmp_path / "data"), tmp_path / "run", steps=2500, options=options)
    (tmp_path / "data").rename(tmp_path / "moved")
    with pytest.raises(qfleet.QfleetError, match="has no manifest"):
        qfleet.resume(tmp_path / "run")
    other = record_block(tmp_path / "other", scripted_block(CARTPOLE, 400, 2), CARTPOLE)
    assert other.manifest.transitions == Dataset(data).manifest.transitions
    with pytest.raises(qfleet.QfleetError, match="other files"):
        qfleet.resume(tmp_path / "run", data=str(tmp_path / "other"))
    resumed = qfleet.resume(tmp_path / "run", data=str(tmp_path / "moved"))
    assert isinstance(resumed, qfleet.Trained)
    assert resumed.result.env_steps == 2500


def test_observations_are_normalised_by_the_statistics_of_the_training_split(
    data: str, tmp_path: Path
) -> None:
    parts = split(Dataset(data), str(tmp_path / "split"), (0.5, 0.25, 0.25), stratify=False)
    trained = train(str(tmp_path / "split/train"), tmp_path / "run", epochs=1,
                    normalize_observations=True)  # fmt: skip
    policy = qfleet.load(trained.folder, "last")
    policy.save(tmp_path / "policy")
    loaded = qfleet.load(tmp_path / "policy.safetensors")
    fitted = fit_statistics(parts["train"])
    torso: Any = loaded.network.torso
    np.testing.assert_allclose(torso.statistics.mean, fitted["obs_mean"], rtol=1e-5)
    np.testing.assert_allclose(torso.statistics.variance, fitted["obs_variance"], rtol=1e-5)


def test_pixels_are_centred_by_the_mean_image_of_the_dataset(tmp_path: Path) -> None:
    dataset = record_block(tmp_path / "data", scripted_block(STACK, 300, 2), STACK)
    store_statistics(dataset, fit_statistics(dataset))
    trained = train(dataset.url, tmp_path / "run", epochs=1, normalize_observations=True)
    torso: Any = qfleet.load(trained.folder, "last", trust=True).network.torso
    mean = torch.tensor(fit_statistics(dataset)["obs_mean"])
    torch.testing.assert_close(torso.statistics.mean, mean)
    obs = torch.randint(256, (4, *STACK.obs_shape)).byte()
    with torch.no_grad():
        torch.testing.assert_close(torso(obs), torso.torso((obs - mean) / 255))
    said = list[str]()
    for normalised in (False, True):
        config, _ = resolve(
            "Stack-v0", "dqn", "none",
            fields={"data": dataset.url, "normalize_observations": normalised},
        )  # fmt: skip
        parts = build(Setup(with_dataset(config), FaultLog()))
        said.append("\n".join(parts.notes))
        parts.close()
    assert "--normalize-observations" in said[0]
    assert "--normalize-observations" not in said[1]


def test_normalising_needs_statistics(data: str, tmp_path: Path) -> None:
    with pytest.raises(qfleet.ConfigError, match="qfleet data stats"):
        train(data, tmp_path / "run", normalize_observations=True)


def test_rewards_are_clipped_and_scaled_as_asked_for(tmp_path: Path) -> None:
    """Recorded with reward_scale 2: −4 and 6 are −2 and 3, clipped −1 and 1, scaled by 5."""
    block = scripted_block(CARTPOLE, 60, 1)
    block.reward = torch.where(torch.arange(60).unsqueeze(1) % 2 == 0, -4.0, 6.0)
    record_block(tmp_path / "data", block, CARTPOLE, reward_scale=2.0)
    found = []
    for fields in ({}, {"clip_rewards": True, "reward_scale": 5.0}):
        config, _ = resolve(
            "CartPole-v1", "dqn", "none", fields={"data": str(tmp_path / "data"), **fields}
        )
        parts = build(Setup(with_dataset(config), FaultLog()))
        found.append(set(parts.memory.sample(50, 0.0).reward.tolist()))
        parts.close()
    assert found == [{-2.0, 3.0}, {-5.0, 5.0}]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"env": "Acrobot-v1"}, "env must be 'CartPole-v1'"),
        ({"prioritized_replay": True}, "prioritized_replay"),
        ({"algo": "pqn"}, "replay"),
        ({"engine": "pipeline"}, "data"),
        ({"record": "x"}, "record"),
        ({"algo": "bc", "double": True}, "double"),
        ({"data": ""}, "epochs"),
        ({"frame_stack": 4}, "frame_stack must be 0"),
        ({"steps": 400}, "steps 400 and epochs 1"),
        ({"envs": 8}, "envs 8 has no effect"),
        ({"learning_starts": 7}, "learning_starts 7 has no effect"),
        ({"replay_dir": "x"}, "replay_dir x has no effect"),
        ({"replay_compression": "lz4"}, "replay_compression lz4 has no effect"),
        ({"eval_env": "CartPol-v1"}, "did you mean CartPole-v1"),
    ],
)
def test_what_offline_training_cannot_do_is_refused(
    fields: dict[str, Any], words: str, data: str, tmp_path: Path
) -> None:
    with pytest.raises(qfleet.QfleetError, match=words):
        qfleet.train(**{"data": data, "run_dir": tmp_path / "run", "epochs": 1, **fields})
    assert not (tmp_path / "run").exists()


def test_behaviour_cloning_needs_a_dataset(tmp_path: Path) -> None:
    with pytest.raises(qfleet.ConfigError, match="--data"):
        qfleet.train("CartPole-v1", algo="bc", run_dir=tmp_path / "run")


def test_code_that_a_dataset_names_needs_consent(tmp_path: Path) -> None:
    record_block(tmp_path / "data", scripted_block(CARTPOLE, 60, 1), CARTPOLE)
    path = tmp_path / "data" / "manifest.json"
    values = json.loads(path.read_text())
    values["env"]["imports"] = ["evil"]
    path.write_text(json.dumps(values))
    with pytest.raises(qfleet.ConfigError, match="trust"):
        qfleet.train(data=str(tmp_path / "data"), run_dir=tmp_path / "run")


def test_greedy_actions_before_the_first_observation_have_their_probability(tmp_path: Path) -> None:
    """Groups of envs begin before anything is received: with ε = 0 those actions are greedy too."""
    for epsilon, expected in ((0.0, [1.0]), (1.0, [0.5])):
        url = str(tmp_path / f"data-{epsilon}")
        fields = tiny_fields(
            steps=60, learning_starts=40, engine="pipeline", envs=2, env_groups=2,
            vectorize="async", exploration_initial_eps=epsilon, exploration_final_eps=epsilon,
        )  # fmt: skip
        qfleet.train("CartPole-v1", run_dir=tmp_path / f"{epsilon}", record=url, **fields)
        rows = read_all(Dataset(url))
        assert np.unique(rows.probability[rows.flags & SKIP == 0]).tolist() == expected


def test_a_policy_is_recorded_with_its_epsilon(tmp_path: Path) -> None:
    trained = qfleet.train(
        "CartPole-v1", run_dir=tmp_path / "run", **tiny_fields(steps=200, learning_starts=100)
    )
    policy = qfleet.load(trained.folder)
    dataset = record(policy, str(tmp_path / "data"), steps=1500, epsilon=0.5, envs=3)
    rows = read_all(dataset)
    usable = rows.flags & SKIP == 0
    assert usable.sum() == pytest.approx(1500, rel=0.1)
    greedy = policy.act(rows.obs[usable])
    expected = np.where(greedy == rows.action[usable], 0.75, 0.25)
    np.testing.assert_allclose(rows.probability[usable], expected)
    assert (greedy == rows.action[usable]).mean() == pytest.approx(0.75, abs=0.05)
    assert (rows.flags & TERMINATED != 0).sum() > 5
    with pytest.raises(qfleet.ConfigError, match="holds a dataset already"):
        record(policy, str(tmp_path / "data"))
    (tmp_path / "busy").mkdir()
    with RunLock(tmp_path / "busy"), pytest.raises(RunBusyError):  # another recording
        record(policy, str(tmp_path / "busy"))
    with pytest.raises(qfleet.ConfigError, match="steps must be > envs"):
        record(policy, str(tmp_path / "few"), steps=8, envs=8)
    again = record(policy, str(tmp_path / "again"), steps=1500, epsilon=0.5, envs=3)
    assert np.array_equal(read_all(again).episode, rows.episode)  # so splits are the same


def test_statistics_are_stored(tmp_path: Path) -> None:
    record_block(tmp_path, scripted_block(CARTPOLE, 60, 1), CARTPOLE)
    dataset = Dataset(str(tmp_path))
    store_statistics(dataset, fit_statistics(dataset))
    assert Dataset(str(tmp_path)).manifest.statistics == fit_statistics(dataset)
