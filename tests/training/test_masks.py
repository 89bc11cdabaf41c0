"""Masks of legal actions: on every engine, for every head, in policies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from torch import tensor

import qfleet
from qfleet.agent.actor import draw_actions, legal_actions
from qfleet.algorithms.exploration import sample_actions, sample_legal
from qfleet.config.config import Config
from qfleet.core.errors import ConfigError, EnvironmentFault
from qfleet.core.types import EnvSpec
from qfleet.envs.factory import make_envs
from qfleet.envs.masks import MaskedObservations
from qfleet.envs.registry import uses_masks
from qfleet.networks.factory import build_network
from qfleet.networks.qnetwork import ILLEGAL
from qfleet.telemetry.faults import FaultLog
from support import masked_envs
from support.clusters import needs_ray
from support.configs import tiny_fields
from support.masked_envs import ACTIONS, Locks
from support.messages import says

LOCKS, TENSORS = "support.masked_envs:Locks", "support.masked_envs:TensorLocks"
VECTOR = EnvSpec("v", (3,), "float32", ACTIONS)


def train(folder: Path, env: str = LOCKS, **fields: Any) -> qfleet.Trained:
    given = {**tiny_fields(steps=400, learning_starts=50), "n_eval_episodes": 4, **fields}
    return qfleet.train(env, run_dir=folder / "run", **given)


def crashes(trained: qfleet.Trained) -> int:
    """Illegal actions raise, which restarts the environment and is counted."""
    return sum(trained.result.faults.values())


# --- parts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("stack", [1, 3])
def test_a_masked_observation_splits_into_observation_and_newest_mask(stack: int) -> None:
    frame = (2, 4)
    spec = EnvSpec("v", (stack, *frame) if stack > 1 else frame, "uint8", 3, frame_stack=stack)
    masked = spec.with_masks()
    obs = torch.randint(1, 255, (5, *spec.obs_shape), dtype=torch.uint8)
    legal = torch.rand(5, stack, 3) < 0.5
    rows = torch.cat((obs.view(5, stack, -1), legal.to(torch.uint8)), dim=2)
    rows = rows.view(5, *masked.obs_shape)
    assert masked.unmasked == spec
    assert torch.equal(masked.unmask(rows), obs)
    assert torch.equal(masked.legal(rows), legal[:, -1])
    np.testing.assert_array_equal(masked.legal(rows.numpy()), legal[:, -1].numpy())


def test_legal_actions_are_drawn_uniformly_and_all_of_them_are_legal() -> None:
    legal = np.array([[0, 1, 1, 0, 1]] * 30_000) != 0
    drawn = sample_legal(legal, np.random.default_rng(0).random(len(legal)))
    shares = np.bincount(drawn, minlength=5) / len(legal)
    np.testing.assert_allclose(shares, [0, 1 / 3, 1 / 3, 0, 1 / 3], atol=0.01)
    almost_one = np.nextafter(1.0, 0.0)
    assert sample_legal(legal[:1], np.array([almost_one])).tolist() == [4]
    assert sample_legal(legal[:1, :4], np.array([almost_one])).tolist() == [2]
    assert torch.equal(
        sample_legal(torch.from_numpy(legal[:9]), torch.linspace(0, 0.99, 9).double()),
        torch.from_numpy(sample_legal(legal[:9], np.linspace(0, 0.99, 9))),
    )


def test_without_masks_random_actions_are_the_draws_themselves() -> None:
    drawn = draw_actions(VECTOR, np.random.default_rng(1), (4, 2))
    assert drawn.dtype == np.int64
    assert legal_actions(VECTOR, np.zeros((2, 3)), drawn[0]) is not None
    np.testing.assert_array_equal(drawn, np.random.default_rng(1).integers(ACTIONS, size=(4, 2)))


def test_a_policy_never_draws_an_illegal_action_at_the_end_of_the_range() -> None:
    logits = tensor([[0.1, 0.2, 0.3, ILLEGAL]]).repeat(3, 1)
    chance = tensor([0.0, 0.5, float(np.nextafter(np.float32(1), np.float32(0)))])
    assert sample_actions(logits, chance).max() <= 2


@pytest.mark.parametrize("head", ["q", "c51", "qr", "iqn", "actor-critic"])
def test_only_legal_actions_are_compared_whatever_the_head(head: str) -> None:
    masked = VECTOR.with_masks()
    config = Config(head=head, dueling=head != "actor-critic", v_min=-1.0, v_max=1.0)  # type: ignore[arg-type]
    torch.manual_seed(0)
    network = build_network(masked, config)
    torch.manual_seed(0)
    plain = build_network(VECTOR, config)
    obs = torch.rand(64, 3)
    legal = torch.rand(64, ACTIONS) < 0.5
    legal[:, 2] = True
    values = network.q_values(torch.cat((obs, legal.float()), dim=1))
    assert torch.isfinite(values).all()
    assert legal.gather(1, values.argmax(1, keepdim=True)).all()
    assert torch.equal(values[legal], plain.q_values(obs)[legal])
    assert (values[~legal] == ILLEGAL).all()


# --- runs -------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["serial", pytest.param("pipeline", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "algo", ["dqn", "double-dqn", "munchausen-dqn", "rainbow", "c51", "iqn", "pqn", "a3c"]
)
def test_no_algorithm_takes_an_illegal_action(tmp_path: Path, engine: str, algo: str) -> None:
    on_policy = {"train_freq": 64, "envs": 2, "gradient_steps": 2, "batch_size": 32}
    more = on_policy if algo in ("pqn", "a3c") else {}
    more = {**more, "gradient_steps": 1, "batch_size": 64} if algo == "a3c" else more
    trained = train(tmp_path, algo=algo, engine=engine, device="cpu", eval_eps=0.3, **more)
    assert crashes(trained) == 0
    assert trained.result.updates > 0
    network = trained.policy("last").network
    assert all(torch.isfinite(parameter).all() for parameter in network.parameters())


def test_without_masks_illegal_actions_are_taken(tmp_path: Path) -> None:
    tolerated = {"max_env_restarts": 10**6, "max_fault_rate": 1}
    assert crashes(train(tmp_path, action_masks=False, **tolerated)) > 50


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["vector", "image", "discrete"])
@pytest.mark.parametrize("by", ["info", "method"])
@pytest.mark.parametrize("vectorize", ["sync", "async"])
def test_masks_of_every_kind_of_observation(
    tmp_path: Path, kind: str, by: str, vectorize: str
) -> None:
    kwargs = {"kind": kind, "by": by}
    trained = train(tmp_path, env_kwargs=kwargs, envs=2, vectorize=vectorize, engine="serial")
    assert crashes(trained) == 0


@pytest.mark.parametrize("stack", [0, 2])
def test_statistics_of_observations_do_not_include_masks(tmp_path: Path, stack: int) -> None:
    trained = train(tmp_path, normalize_observations=True, engine="serial", frame_stack=stack)
    mean = trained.policy("last").network.torso.statistics.mean
    assert crashes(trained) == 0
    assert mean.shape == (3,)
    assert 0 < mean.min() <= mean.max() < 1


def test_masks_of_stacked_frames(tmp_path: Path) -> None:
    trained = train(tmp_path, env_kwargs={"kind": "image"}, frame_stack=3, engine="serial")
    assert crashes(trained) == 0


@pytest.mark.parametrize("engine", ["serial", "pipeline", "device"])
@pytest.mark.parametrize("algo", ["dqn", "pqn"])
def test_masks_of_tensor_environments(tmp_path: Path, engine: str, algo: str) -> None:
    more = {"train_freq": 64, "envs": 4, "gradient_steps": 2, "batch_size": 32}
    trained = train(
        tmp_path,
        TENSORS,
        engine=engine,
        algo=algo,
        device="cpu",
        eval_eps=0.3,
        **(more if algo == "pqn" else {}),
    )  # an illegal action is a NaN, which would raise
    assert trained.result.updates > 0


def test_a_tensor_environment_without_masks_fails(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match=says("NaN")):
        train(tmp_path, TENSORS, engine="device", action_masks=False, device="cpu")


@needs_ray
@pytest.mark.slow
@pytest.mark.parametrize("engine", ["actors", "parameter-server"])
def test_masks_on_ray(tmp_path: Path, engine: str) -> None:
    trained = train(tmp_path, engine=engine, workers=2, envs=2, steps=2000, buffer_size=2000)
    assert crashes(trained) == 0


def test_a_run_with_masks_resumes(tmp_path: Path) -> None:
    half = train(tmp_path, engine="serial", steps=200)
    again = qfleet.resume(half.folder, steps=400, trust=True)
    assert crashes(again) == 0
    assert again.result.env_steps == 400


def test_a_run_that_is_older_than_masks_resumes_without_them(tmp_path: Path) -> None:
    old = train(tmp_path, "Taxi-v4", engine="serial", steps=200, action_masks=False)
    file = old.folder / "config.json"
    fields = json.loads(file.read_text())
    del fields["action_masks"]
    file.write_text(json.dumps(fields))
    again = qfleet.resume(old.folder, steps=400)
    assert again.result.env_steps == 400
    assert not again.policy("last").spec.is_masked


def test_a_wrong_mask_is_an_error_with_a_fix(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match=says("mask", "5 entries", "--no-action-masks")):
        train(tmp_path, env_kwargs={"broken": True}, engine="serial")


@pytest.mark.parametrize("mask", [None, "11111", [[1], [1, 1]], [[1] * ACTIONS], ["a"] * ACTIONS])
def test_what_is_no_mask_is_an_error_that_shows_it(mask: Any) -> None:
    class Wrong(gymnasium.Wrapper[Any, Any, Any, Any]):
        def reset(self, **_: Any) -> Any:
            return self.env.observation_space.sample(), {"action_mask": mask}

    spec = EnvSpec("wrong", (4,), "float32", ACTIONS)
    env = MaskedObservations(Wrong(gymnasium.make("CartPole-v1")), spec)
    with pytest.raises(EnvironmentFault, match=says("'wrong'", f"{ACTIONS} entries", repr(mask))):
        env.reset()


# --- policies ---------------------------------------------------------------------------------


def test_a_saved_policy_takes_masks_and_plays_by_them(tmp_path: Path) -> None:
    trained = train(tmp_path, engine="serial", env_kwargs={"kind": "discrete"})
    path = trained.policy("last").save(tmp_path / "locks")
    policy = qfleet.load(path, trust=True)
    for action in range(ACTIONS):
        only = np.arange(ACTIONS) == action
        assert policy.act(2, action_masks=only) == action + 2
        for _ in range(20):
            chosen, _ = policy.predict([1, 2], deterministic=False, action_masks=only)
            assert chosen.tolist() == [action + 2] * 2
    assert policy.act(2) == policy.act(2, action_masks=np.ones(ACTIONS))
    assert len(policy.evaluate(6).returns) == 6
    with pytest.raises(ConfigError, match=says("action_masks", "legal")):
        policy.act(2, action_masks=np.zeros(ACTIONS))
    for wrong in ("1" * ACTIONS, True, [[1], [1, 1]], [1] * (ACTIONS + 1), ["legal"] * ACTIONS):
        with pytest.raises(ConfigError, match=says("action_masks")):
            policy.act(2, action_masks=wrong)
    with pytest.raises(ConfigError, match=says("masks")):
        policy.evaluate(1, env="FrozenLake-v1")


def test_a_policy_without_masks_refuses_them(tmp_path: Path) -> None:
    policy = train(tmp_path, "CartPole-v1", engine="serial").policy("last")
    with pytest.raises(ConfigError, match=says("without action masks")):
        policy.act(np.zeros(4), action_masks=[1, 1])


def test_taxi_gives_masks_and_cartpole_does_not() -> None:
    for env, is_masked in (("Taxi-v4", True), ("CartPole-v1", False)):
        for allowed in (True, False):
            config = Config(env=env, action_masks=allowed)
            envs = make_envs(config, 2, 0, training=True, on_fault=FaultLog())
            assert envs.spec.is_masked == (is_masked and allowed)
            assert gymnasium.spec(env).id == envs.spec.env_id
            envs.close()


def test_a_class_that_was_defined_again_is_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a notebook: it may have got masks, or lost them."""

    class Plain(Locks):
        def reset(self, **kwargs: Any) -> Any:
            return super().reset(**kwargs)[0], {}

    config = Config(env=LOCKS, env_kwargs='{"kind": "image"}')
    assert uses_masks(config)
    monkeypatch.setattr(masked_envs, "Locks", Plain)
    assert not uses_masks(config)
    monkeypatch.undo()
    assert uses_masks(config)


def test_a_vector_entry_point_with_masks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = type(gymnasium.make_vec("CartPole-v1", vectorization_mode="vector_entry_point"))
    reset = kind.reset
    monkeypatch.setattr(
        kind, "reset", lambda *args, **more: (reset(*args, **more)[0], {"action_mask": 1})
    )
    for allowed in (True, False):
        config = Config(env="CartPole-v1", vectorize="native", action_masks=allowed)
        envs = make_envs(config, 8, 0, training=True, on_fault=FaultLog())
        if allowed:
            with pytest.raises(ConfigError, match=says("masks", "--vectorize sync")):
                envs.reset()
        else:
            envs.reset()
