"""AtariEnvs: the properties of ale-py's pool that the memory and the actor rely on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from qfleet.config.config import Config
from qfleet.core.types import VectorEnv
from qfleet.envs.factory import make_envs
from support.scripted_envs import Faults


def make(env: str = "ALE/Breakout-v5", num_envs: int = 2, **changes: Any) -> VectorEnv:
    training = changes.pop("training", True)
    config = Config(env=env).replace(**changes)
    return make_envs(config, num_envs, 1, training=training, on_fault=Faults())


@pytest.mark.parametrize(
    ("env", "limit", "num_steps"), [("ALE/Breakout-v5", 0, 250), ("PongNoFrameskip-v4", 20, 50)]
)
def test_stacks_shift_and_restart(env: str, limit: int, num_steps: int) -> None:
    envs = make(env, max_episode_steps=limit)
    assert envs.spec.obs_shape == (4, 84, 84)
    assert (envs.spec.frame_stack, envs.spec.frame_skip, envs.spec.frame_shape) == (4, 4, (84, 84))
    stack = envs.reset()
    assert stack.dtype == np.uint8
    assert stack.shape == (2, 4, 84, 84)
    assert not stack[:, :3].any()
    assert stack[:, 3].any()
    rng, over = np.random.default_rng(0), np.zeros(2, dtype=bool)
    ends = terminations = 0
    for _ in range(num_steps):
        step = envs.step(rng.integers(envs.spec.num_actions, size=2))
        assert np.array_equal(step.invalid, over)
        assert np.array_equal(step.fresh, over)
        for i in range(2):
            if over[i]:
                assert not step.obs[i, :3].any()
                assert step.reward[i] == 0
                assert not step.terminated[i]
                assert not step.truncated[i]
            else:
                # Also on the step that ends an episode: its observation is the true final one.
                assert np.array_equal(step.obs[i, :3], stack[i, 1:])
        stack, over = step.obs, step.terminated | step.truncated
        ends += over.sum()
        terminations += step.terminated.sum()
    assert ends >= 2
    assert bool(terminations) == (limit == 0)
    envs.close()


def test_max_episode_steps_counts_env_steps() -> None:
    envs = make(num_envs=1, max_episode_steps=10, frame_skip=3)
    envs.reset()
    truncated = [envs.step(np.zeros(1, dtype=np.int64)).truncated[0] for _ in range(22)]
    assert [i for i, cut in enumerate(truncated, start=1) if cut] == [10, 21]


def play(envs: VectorEnv, num_steps: int) -> tuple[list[Any], int, int]:
    """The observations, how many lives were reported lost, and how many games ended."""
    observations, lost, ends = [envs.reset().copy()], 0, 0
    rng = np.random.default_rng(3)
    for _ in range(num_steps):
        step = envs.step(rng.integers(envs.spec.num_actions, size=envs.num_envs))
        observations.append(step.obs.copy())
        ends += int(step.terminated.sum())
        if step.life_lost is not None:
            assert not (step.life_lost & step.terminated).any()
            lost += int(step.life_lost.sum())
    return observations, lost, ends


def test_lives_end_the_task_but_not_the_game() -> None:
    envs = make(num_envs=1, episodic_life=True)
    _, lost, ends = play(envs, 250)
    assert ends >= 1
    # Breakout has five lives: four losses before each end, and up to four more in an open game.
    assert 4 * ends <= lost <= 4 * ends + 4


@pytest.mark.parametrize("changes", [{"training": False}, {"episodic_life": False}])
def test_no_lives_in_evaluation_or_unasked(changes: dict[str, Any]) -> None:
    envs = make(num_envs=1, noop_max=0, **({"episodic_life": True} | changes))
    envs.reset()
    assert envs.step(np.zeros(1, dtype=np.int64)).life_lost is None


def test_seeds_decide_everything() -> None:
    first, again = make(sticky_actions=0.25), make(sticky_actions=0.25)
    assert len(set(first.seeds)) == 2
    trace, *_ = play(first, 25)
    repeated, *_ = play(again, 25)
    restarted, *_ = play(first, 25)
    assert all(map(np.array_equal, trace, repeated))
    assert all(map(np.array_equal, trace, restarted))
    assert any(not np.array_equal(obs[0], obs[1]) for obs in trace)


def test_options_reach_the_emulator() -> None:
    changes = {"frame_stack": 2, "noop_max": 0, "env_kwargs": '{"img_height": 42}'}
    envs = make(num_envs=1, full_action_space=True, **changes)
    assert envs.reset().shape == (1, 2, 42, 84)
    assert envs.spec.num_actions == 18
    assert envs.spec.frame_stack == 2
    assert envs.state_dict() is None


def test_rewards_are_not_clipped() -> None:
    envs = make("ALE/SpaceInvaders-v5")
    envs.reset()
    rewards = [envs.step(np.ones(2, dtype=np.int64)).reward.max() for _ in range(100)]
    assert max(rewards) >= 5


def test_no_banner(capfd: pytest.CaptureFixture[str]) -> None:
    make(num_envs=1, noop_max=0).reset()
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")
