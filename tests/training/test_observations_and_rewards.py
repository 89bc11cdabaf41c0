"""normalize_observations, reward_scale, eval_env: by hand, across resumes and engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from torch import Tensor

import qfleet
from qfleet.core.errors import ConfigError, QfleetError
from qfleet.networks.normalizer import MOST_DEVIATIONS, NormalizedTorso, RunningStatistics
from support.configs import tiny_fields
from support.messages import says
from support.runs import assert_equal, assert_same_run, configure, final_state, resume
from support.runs import train as train_config
from support.space_envs import Drifting, Sampled

HERE = "support.space_envs"
NORMAL: dict[str, Any] = {"normalize_observations": True, "buffer_size": 1000, "engine": "serial"}
ROLLOUT = {"algo": "pqn", "envs": 4, "train_freq": 80, "gradient_steps": 5}
STATISTICS = ("mean", "variance", "count")


def statistics(folder: Path, which: str = "buffers") -> dict[str, Tensor]:
    state = final_state(folder)
    return {name: state[f"state.learner.{which}.torso.statistics.{name}"] for name in STATISTICS}


def test_running_statistics_are_those_of_all_observations() -> None:
    rows = torch.randn(7, 6, 3, generator=torch.Generator().manual_seed(0)) * 5 + 100
    running = RunningStatistics((3,))
    for block in rows.split((1, 4, 2)):
        running.observe(block)
    flat = rows.view(-1, 3)
    assert int(running.count) == 42
    torch.testing.assert_close(running.mean, flat.mean(0))
    torch.testing.assert_close(running.variance, flat.var(0, correction=0))
    far = torch.tensor([[1e6, 100.0, -1e6]])
    expected = (100 - flat.mean(0)[1]) / flat.std(0, correction=0)[1]
    normalised = running(far)[0]
    assert normalised.tolist()[::2] == [MOST_DEVIATIONS, -MOST_DEVIATIONS]
    torch.testing.assert_close(normalised[1], expected)


def test_pixels_are_centred_and_not_divided_by_deviations() -> None:
    """A pixel of the background varies almost never, and its deviation is almost 0."""
    rows = torch.randint(256, (7, 6, 2, 3), generator=torch.Generator().manual_seed(0)).byte()
    rows[..., 0, 0] = 87
    running = RunningStatistics((2, 3), of_pixels=True)
    for block in rows.split((1, 4, 2)):
        running.observe(block)
    mean = rows.flatten(0, 1).double().mean(0)
    torch.testing.assert_close(running.mean.double(), mean, rtol=1e-5, atol=1e-4)
    stacks = rows.view(21, 2, 2, 3)
    expected = ((stacks.double() - mean) / 255).float()
    torch.testing.assert_close(running(stacks), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("env", "fields"),
    [
        (f"{HERE}:Sampled", {"env_kwargs": {"space": "image"}}),
        (f"{HERE}:Sampled", {"env_kwargs": {"space": "image"}, "frame_stack": 2}),
        ("support.masked_envs:Locks", {"env_kwargs": {"kind": "image"}}),
    ],
    ids=["image", "stack", "masks"],
)
def test_a_network_of_pixels_gets_them_without_their_mean(
    env: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    trained = qfleet.train(
        env, run_dir=tmp_path, **tiny_fields(steps=300, learning_starts=50, **NORMAL, **fields)
    )
    network, spec = trained.policy().network, trained.policy().spec.unmasked
    torso = network.torso
    assert isinstance(torso, NormalizedTorso)
    assert int(torso.statistics.count) == 300
    frames = final_state(tmp_path)["state.memory.frames"].flatten(1)
    frames = frames[:, : torso.statistics.mean.numel()].double()
    mean = frames.mean(0).view(spec.frame_shape)
    torch.testing.assert_close(torso.statistics.mean.double(), mean, rtol=1e-4, atol=1e-3)
    obs = torch.randint(256, (5, *spec.obs_shape), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours = torso(obs.byte())
        theirs = torso.torso(((obs - mean) / 255).float())
        not_centred = torso.torso(obs.byte())
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert (ours - not_centred).abs().max() > 0.01


@pytest.mark.parametrize("fields", [{}, {"frame_stack": 2}, ROLLOUT])
def test_statistics_of_a_run_are_those_of_its_rows(fields: dict[str, Any], tmp_path: Path) -> None:
    config = configure(f"{HERE}:Drifting", **{**NORMAL, **fields})
    train_config(config, tmp_path)
    found = statistics(tmp_path)
    assert int(found["count"]) == config.steps
    if config.replay:
        rows = final_state(tmp_path)["state.memory.frames"].view(-1, 3).double()
        assert len(rows) == config.steps
        torch.testing.assert_close(found["mean"].double(), rows.mean(0), rtol=1e-4, atol=1e-3)
        variance = rows.var(0, correction=0)
        torch.testing.assert_close(found["variance"].double(), variance, rtol=1e-3, atol=1e-6)
        assert all(torch.equal(found[n], statistics(tmp_path, "target_buffers")[n]) for n in found)


def test_a_saved_policy_normalises_and_evaluation_changes_nothing(tmp_path: Path) -> None:
    trained = qfleet.train(
        Drifting, run_dir=tmp_path / "run", **tiny_fields(steps=300, learning_starts=50, **NORMAL)
    )
    policy = trained.policy()
    policy.save(tmp_path / "saved")
    loaded = qfleet.load(tmp_path / "saved.safetensors")
    torso = loaded.network.torso
    assert isinstance(torso, NormalizedTorso)
    running = torso.statistics
    before = {name: getattr(running, name).clone() for name in STATISTICS}
    obs = np.array([130.0, 0.5, 1.001], np.float32)
    mean, deviation = running.mean.numpy(), np.sqrt(running.variance.numpy() + 1e-8)
    by_hand = torch.from_numpy(np.clip((obs - mean) / deviation, -10, 10))
    with torch.no_grad():
        expected = loaded.network.head(torso.torso(by_hand[None]))[0].numpy()
    np.testing.assert_allclose(loaded.q_values(obs), expected, rtol=1e-5)
    assert (loaded.q_values(obs) == policy.q_values(obs)).all()
    policy.evaluate(episodes=3)
    after = policy.network.torso.statistics
    assert isinstance(after, RunningStatistics)
    assert all(torch.equal(before[name], getattr(after, name)) for name in STATISTICS)


def test_without_the_option_nothing_is_normalised(tmp_path: Path) -> None:
    """Negative control: the policy's network is a plain MLP."""
    fields = tiny_fields(steps=100, learning_starts=50, engine="serial")
    trained = qfleet.train(Drifting, run_dir=tmp_path / "run", **fields)
    assert trained.policy().network.is_plain_mlp


def test_a_normalised_run_resumes_bit_for_bit(tmp_path: Path) -> None:
    config = configure(f"{HERE}:Drifting", **NORMAL, envs=2, vectorize="sync")
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    train_config(config, whole)
    train_config(config, parted, stop_after=137)
    resume(parted, stop_after=400)
    resume(parted)
    assert_same_run(whole, parted, (137, 400))


@pytest.mark.parametrize("fields", [{"lockstep": True}, {"vectorize": "async"}])
def test_the_pipeline_takes_turns_and_equals_serial(fields: dict[str, Any], tmp_path: Path) -> None:
    one = configure(f"{HERE}:Drifting", **NORMAL, envs=2, vectorize="sync", block_rows=2)
    train_config(one, tmp_path / "serial")
    train_config(one.replace(engine="pipeline", **fields), tmp_path / "pipeline")
    left, right = final_state(tmp_path / "serial"), final_state(tmp_path / "pipeline")
    for name, value in left.items():
        if name.startswith(("state.learner", "state.memory")):
            assert_equal(value, right[name], name)


@pytest.mark.parametrize(
    ("env", "fields", "words"),
    [
        ("CartPole-v1", {"engine": "actors"}, "normalize_observations serial actors"),
        ("CartPole-v1", {"engine": "device"}, "normalize_observations serial device"),
        ("FrozenLake-v1", {}, "normalize_observations discrete"),
        (
            f"{HERE}:Sampled",
            {"env_kwargs": {"space": "image"}, "network": f"{HERE}:Flatten"},
            "normalize_observations Flatten",
        ),
    ],
)
def test_what_cannot_be_normalised_is_refused(
    env: str, fields: dict[str, Any], words: str, tmp_path: Path
) -> None:
    given = tiny_fields(steps=100, learning_starts=10, normalize_observations=True, **fields)
    with pytest.raises(QfleetError, match=says(*words.split())):
        qfleet.train(env, run_dir=tmp_path / "run", **given)
    assert not (tmp_path / "run").exists()


# --- rewards ------------------------------------------------------------------------------------


def test_scaled_rewards_are_learnt_from_and_not_reported(tmp_path: Path) -> None:
    plain = configure(f"{HERE}:Sampled", steps=300, env_kwargs={"reward": 3.0})
    train_config(plain, tmp_path / "plain")
    train_config(plain.replace(reward_scale=0.5), tmp_path / "scaled")
    # The same rewards to learn from, by other means.
    halved = plain.replace(env_kwargs={"reward": 1.5})
    train_config(halved, tmp_path / "halved")
    states = [final_state(tmp_path / name) for name in ("plain", "scaled", "halved")]
    assert torch.equal(states[1]["state.memory.reward"], states[2]["state.memory.reward"])
    assert torch.equal(states[1]["state.learner.weights"], states[2]["state.learner.weights"])
    assert not torch.equal(states[0]["state.learner.weights"], states[1]["state.learner.weights"])
    for name, best in (("plain", 15), ("scaled", 15), ("halved", 7.5)):
        assert qfleet.load(tmp_path / name, trust=True).evaluate(episodes=1).mean == best


def test_the_device_engine_scales_rewards_too(tmp_path: Path) -> None:
    for name, scale in (("plain", 1.0), ("scaled", 0.25)):
        config = configure(steps=320, engine="device", reward_scale=scale, device="cpu", envs=4)
        train_config(config, tmp_path / name)
    plain, scaled = (final_state(tmp_path / name) for name in ("plain", "scaled"))
    assert set(plain["state.memory.reward"].unique().tolist()) == {0.0, 1.0}
    assert set(scaled["state.memory.reward"].unique().tolist()) == {0.0, 0.25}


# --- environments of evaluations ----------------------------------------------------------------


def short(folder: Path, env: Any = Sampled, **fields: Any) -> qfleet.Trained:
    given = tiny_fields(steps=100, learning_starts=20, engine="serial", **fields)
    return qfleet.train(env, run_dir=folder, **given)


def test_evaluations_have_keyword_arguments_of_their_own(tmp_path: Path) -> None:
    kwargs = {"space": "bits", "reward": 2.0}
    trained = short(tmp_path / "run", env_kwargs=kwargs, eval_env_kwargs={"reward": 7.0})
    assert trained.result.eval_return_mean == 35
    assert trained.policy().evaluate(episodes=1).mean == 35
    assert short(tmp_path / "same", env_kwargs=kwargs).result.eval_return_mean == 10


def rich() -> Sampled:
    return Sampled(reward=9.0)


@pytest.mark.parametrize("eval_env", [rich, f"{HERE}:Sampled"])
def test_evaluations_have_an_environment_of_their_own(eval_env: Any, tmp_path: Path) -> None:
    fields = {} if eval_env is rich else {"eval_env_kwargs": {"reward": 9.0}}
    trained = short(tmp_path / "run", eval_env=eval_env, **fields)
    assert trained.result.eval_return_mean == 45


def test_an_eval_env_from_gymnasium_make_is_rebuilt(tmp_path: Path) -> None:
    slippery = gymnasium.make("FrozenLake-v1", is_slippery=False)
    trained = short(tmp_path / "run", "FrozenLake-v1", eval_env=slippery)
    assert trained.config.eval_env == "FrozenLake-v1"
    assert trained.config.eval_env_kwargs == '{"is_slippery": false}'
    assert trained.config.env_kwargs == "{}"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"eval_env": "CartPole-v1"}, "evaluations obs_shape eval_env"),
        ({"eval_env_kwargs": {"actions": "digits"}}, "evaluations num_actions eval_env_kwargs"),
        ({"eval_env": "CartPol-v1"}, "CartPol-v1 CartPole-v1"),
        ({"eval_env_kwargs": "[1]"}, "eval_env_kwargs JSON"),
    ],
)
def test_a_wrong_eval_env_is_refused_before_the_run(
    fields: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises((ConfigError, QfleetError), match=says(*words.split())):
        short(tmp_path / "run", **fields)
    assert not (tmp_path / "run").exists()
