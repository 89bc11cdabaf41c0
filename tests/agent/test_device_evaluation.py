"""Evaluations on the device: the returns of ``evaluate_policy``, all episodes at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from qfleet.agent import device_evaluation, evaluation
from qfleet.agent.device_actor import step_envs
from qfleet.agent.device_evaluation import CHUNK, TensorEvaluator
from qfleet.agent.evaluation import evaluate_policy
from qfleet.config.presets import resolve
from qfleet.core.errors import EnvironmentFault
from qfleet.envs.device.cartpole import CartPole
from qfleet.envs.device.names import make_tensor_env
from qfleet.envs.device.protocol import TensorEnv
from qfleet.envs.device.vector import TensorEnvs
from qfleet.networks.factory import make_network
from qfleet.networks.qnetwork import QNetwork
from support.messages import says
from support.tensor_envs import Broken, Count, constant, evaluate_on_device, scripted

CPU = torch.device("cpu")


def game(name: str) -> tuple[TensorEnv, QNetwork]:
    config, _ = resolve(name, fields={"max_episode_steps": CHUNK + 9})
    env = make_tensor_env(config)
    return env, make_network(config, env.spec, CPU, 0).eval()


@pytest.mark.parametrize(
    "name",
    [pytest.param("MinAtar/Breakout-v1", marks=pytest.mark.slow), "MinAtar/Freeway-v1"],
)
def test_greedy_returns_are_those_of_evaluate_policy(name: str) -> None:
    env, network = game(name)
    ours = evaluate_on_device(network.q_values, env, 3, 0.0, CPU, seed=3)
    theirs = evaluate_policy(network, TensorEnvs(env, 3, seed=3), 3, 0.0, CPU, 3, 125_000)
    assert ours == theirs
    assert ours is not None
    assert max(ours.lengths) > CHUNK or name == "MinAtar/Breakout-v1"


@pytest.mark.parametrize("max_steps", [1, 3 * 20, 3 * (CHUNK + 5) + 2])
def test_a_limit_of_steps_cuts_the_same_episodes_as_evaluate_policy(max_steps: int) -> None:
    env, network = game("MinAtar/Freeway-v1")
    ours = evaluate_on_device(network.q_values, env, 3, 0.0, CPU, 3, max_steps=max_steps)
    theirs = evaluate_policy(network, TensorEnvs(env, 3, seed=3), 3, 0.0, CPU, 3, max_steps)
    assert ours == theirs
    assert ours is not None
    assert (ours.unfinished, ours.lengths) == (3, [max(1, max_steps // 3)] * 3)
    enough = evaluate_on_device(network.q_values, env, 3, 0.0, CPU, 3, max_steps=3 * (CHUNK + 9))
    assert enough is not None
    assert (enough.unfinished, enough.lengths) == (0, [CHUNK + 9] * 3)


@pytest.mark.parametrize("agents", [1, 2])
def test_spare_environments_change_nothing(agents: int) -> None:
    """They are stepped where a function was compiled for more environments than episodes."""
    env, network = game("MinAtar/Breakout-v1")
    sizes, played, seen = [], [], list[int]()

    def step(*given: Any) -> Any:
        sizes.append(len(given[0].obs))
        return step_envs(env, *given)

    for more in ({}, {"step": step, "envs": 5}, {"envs": 2}):
        evaluator = TensorEvaluator(
            network.q_values, env, torch.arange(3), 0.2, CPU, 5, 9000, agents=agents, **more
        )
        played.append(evaluator.play(seen.append))
    assert played[0] == played[1] == played[2]
    assert played[0] is not None
    assert len(played[0].returns) == 3 * agents
    assert set(sizes) == {5 * agents}
    assert min(seen) == 0  # finished episodes, without the spare ones


def test_an_evaluator_that_was_cut_starts_afresh_and_each_agent_has_its_own_limit() -> None:
    seeds = torch.arange(2)
    evaluator = TensorEvaluator(constant(2), Count(), seeds, 0.0, CPU, 0, 4, agents=2)
    played = [evaluator.play(), evaluator.play()]
    assert played[0] == played[1]
    assert played[0] is not None
    assert (played[0].lengths, played[0].unfinished) == ([2] * 4, 4)


def test_an_evaluator_plays_the_same_again_and_follows_the_weights() -> None:
    values = torch.tensor([[1.0, 0.0, 0.0]])
    evaluator = TensorEvaluator(
        lambda obs: values.expand(len(obs), -1), Count(), torch.arange(6), 0.0, CPU, 0, 125_000
    )
    first, second = evaluator.play(), evaluator.play()
    assert first is not None
    assert second is not None
    assert first == second
    values.copy_(torch.tensor([[0.0, 0.0, 1.0]]))
    third = evaluator.play()
    assert third is not None
    assert third.returns == [3 * each for each in first.returns]


def test_random_actions_are_as_frequent_as_asked() -> None:
    taken: list[Tensor] = []

    class Watched(Count):
        max_episode_steps = CHUNK

        def advance(self, state: dict[str, Tensor], action: Tensor, counters: Tensor):  # type: ignore[no-untyped-def]
            taken.append(action)
            return super().advance(state, action, counters)

    assert evaluate_on_device(constant(2), Watched(), 500, 0.3, CPU, seed=1)
    share = float((torch.stack(taken) != 2).float().mean())
    assert abs(share - 0.2) < 0.01
    taken.clear()
    assert evaluate_on_device(constant(2), Watched(), 50, 0.0, CPU, seed=1)
    assert (torch.stack(taken) == 2).all()


def test_give_up_is_called_once_per_chunk() -> None:
    asked = 0

    def patient(_: int) -> bool:
        nonlocal asked
        asked += 1
        return asked == 3

    env = CartPole()
    env.max_episode_steps = 0
    alternating = balancing()
    assert evaluate_on_device(alternating, env, 2, 0.0, CPU, 0, patient) is None
    assert asked == 3


def balancing() -> Callable[[Tensor], Tensor]:
    """Push towards where the pole falls; keeps it up for a long time."""
    gains = torch.tensor([0.1, 0.5, 10.0, 2.0])

    def q_values(obs: Tensor) -> Tensor:
        lean = obs @ gains
        return torch.stack((-lean, lean), dim=1)

    return q_values


def test_an_endless_episode_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_evaluation, "LONGEST_EPISODE", 100)
    monkeypatch.setattr(evaluation, "LONGEST_EPISODE", 100)
    env = CartPole()
    env.max_episode_steps = 0
    played = evaluate_on_device(balancing(), env, 3, 0.0, CPU, seed=0)
    assert played is not None
    assert (played.returns, played.lengths) == ([100.0] * 3, [100] * 3)


@pytest.mark.parametrize("agents", [2, 3])
def test_several_agents_are_evaluated_as_one_batch(agents: int) -> None:
    """Q-values are asked for all at once, so a batch may belong to several agents."""
    seeds = torch.arange(5)
    values = [scripted(3), constant(0), constant(2)][:agents]

    def together(obs: Tensor) -> Tensor:
        parts = zip(values, obs.chunk(agents), strict=True)
        return torch.cat([q_values(part) for q_values, part in parts])

    evaluator = TensorEvaluator(together, Count(), seeds.repeat(agents), 0.0, CPU, 0, 125_000)
    played = evaluator.play()
    assert played is not None
    for agent in range(agents):
        alone = TensorEvaluator(values[agent], Count(), seeds, 0.0, CPU, 0, 125_000).play()
        assert alone is not None
        assert played.returns[agent * 5 : (agent + 1) * 5] == alone.returns


def test_a_reward_that_is_not_finite_raises() -> None:
    with pytest.raises(EnvironmentFault, match=says("NaN", "evaluation")):
        evaluate_on_device(constant(0), Broken(), 3, 0.0, CPU, seed=0)
