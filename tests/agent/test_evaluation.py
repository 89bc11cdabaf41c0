"""Evaluations on the host: shares of episodes; fault 53 of docs/faults.md, the limit of steps."""

from __future__ import annotations

import pytest
import torch

from qfleet.agent import evaluation
from qfleet.agent.evaluation import Evaluation, evaluate_policy
from qfleet.config.presets import resolve
from qfleet.config.recipes import PRESETS
from qfleet.core.types import EnvSpec
from qfleet.envs.device.protocol import TensorEnv
from qfleet.envs.device.vector import TensorEnvs
from qfleet.networks.factory import make_network
from support.configs import tiny_config
from support.messages import holds
from support.tensor_envs import Count

CPU = torch.device("cpu")
PAYS = [1.0, -1.0, 2.0, -2.0, 3.0]
"""Returns of ``Count`` after 1, 2 … steps, if every action is 0."""


class Six(Count):
    """Every episode has 6 steps, and actions do not matter."""

    spec = EnvSpec("Six", (2,), "float32", 1)

    def begin(self, counters: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"at": torch.zeros_like(counters), "end": torch.full_like(counters, 6)}


def play(episodes: int, envs: int, max_steps: int, env: TensorEnv | None = None) -> Evaluation:
    made = TensorEnvs(env or Six(), envs, seed=0)
    network = make_network(tiny_config(), made.spec, CPU, 0)
    played = evaluate_policy(network, made, episodes, 0.0, CPU, 0, max_steps)
    assert played is not None
    return played


def test_the_limit_counts_steps_of_all_envs() -> None:
    cut = play(episodes=2, envs=2, max_steps=10)
    assert (cut.lengths, cut.unfinished) == ([5, 5], 2)
    assert cut.returns == [PAYS[4]] * 2
    whole = play(episodes=2, envs=2, max_steps=12)
    assert (whole.lengths, whole.unfinished) == ([6, 6], 0)


def test_a_limit_below_one_step_of_each_env_lets_each_env_step_once() -> None:
    assert play(episodes=3, envs=3, max_steps=1).lengths == [1, 1, 1]


def test_running_episodes_count_and_those_not_begun_do_not() -> None:
    # Of 3 episodes of one env: one is over after 6 steps, step 7 begins the second.
    for rows, lengths, unfinished in [
        (3, [3], 1),
        (6, [6], 0),
        (7, [6], 0),
        (9, [6, 2], 1),
        (13, [6, 6], 0),
        (20, [6, 6, 6], 0),
    ]:
        cut = play(episodes=3, envs=1, max_steps=rows)
        assert (cut.lengths, cut.unfinished) == (lengths, unfinished), rows


def test_an_env_that_has_played_its_share_adds_no_unfinished_episode() -> None:
    # Env 0 plays two episodes, env 1 one: its second episode is not asked for.
    cut = play(episodes=3, envs=2, max_steps=2 * 9)
    assert (cut.lengths, cut.unfinished) == ([6, 2, 6], 1)


def test_an_episode_that_is_cut_at_the_longest_is_unfinished_and_its_env_plays_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The env is not reset: what it would play next is the rest of the same episode."""
    monkeypatch.setattr(evaluation, "LONGEST_EPISODE", 4)
    cut = play(episodes=4, envs=2, max_steps=100)
    assert (cut.lengths, cut.returns, cut.unfinished) == ([4, 4], [PAYS[3]] * 2, 2)
    assert holds(cut.why_ended(4, 100) or "", "2 of 4", "2 not begun")


def test_the_line_about_a_cut_evaluation_names_the_option_and_the_counts() -> None:
    assert play(episodes=2, envs=2, max_steps=12).why_ended(2, 12) is None
    cut = play(episodes=3, envs=1, max_steps=9)
    assert holds(cut.why_ended(3, 9) or "", "9 steps", "1 of 3", "1 not begun", "--eval-max-steps")


@pytest.mark.parametrize("preset", [name for name in PRESETS if "atari" in name or name == "pong"])
def test_atari_presets_evaluate_with_a_published_epsilon(preset: str) -> None:
    config, _ = resolve(None, preset=preset)
    if config.env.startswith("MinAtar/"):
        assert config.eval_eps == 0.0
    else:
        assert config.eval_eps == (0.05 if preset == "atari-dqn-nature" else 0.01)
