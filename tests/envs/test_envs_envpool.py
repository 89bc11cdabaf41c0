"""EnvPoolEnvs: what ale-py's pool is tested for, and that the two give the same games."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qfleet.config.config import Config
from qfleet.core.errors import CheckpointError, ConfigError, UnknownNameError
from qfleet.core.types import Step, VectorEnv
from qfleet.envs.atari import AtariEnvs
from qfleet.envs.envpool import EnvPoolEnvs
from support.messages import says

needs_envpool = pytest.mark.skipif(
    importlib.util.find_spec("envpool") is None,
    reason="EnvPool is not installed (pip install envpool)",
)


def make(game: str = "breakout", num_envs: int = 2, **changes: Any) -> EnvPoolEnvs:
    training, seed = changes.pop("training", True), changes.pop("seed", 1)
    config = Config(env=game).replace(**changes)
    return EnvPoolEnvs(config, game, num_envs, seed, training=training)


@needs_envpool
@pytest.mark.parametrize(
    ("game", "limit", "num_steps"), [("breakout", 0, 250), ("pong", 20, 50), ("pong", 2, 10)]
)
def test_stacks_shift_and_restart(game: str, limit: int, num_steps: int) -> None:
    envs = make(game, max_episode_steps=limit)
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
                assert step.obs[i, 3].any()
                assert step.reward[i] == 0
                assert not step.terminated[i]
                assert not step.truncated[i]
            else:
                # Also right behind an episode's start, where the pool's own stack holds repeats,
                # and on the step that ends one: its observation is the true final one.
                assert np.array_equal(step.obs[i, :3], stack[i, 1:])
        stack, over = step.obs, step.terminated | step.truncated
        ends += over.sum()
        terminations += step.terminated.sum()
    assert ends >= 2
    assert bool(terminations) == (limit == 0)
    envs.close()


def assert_equal_steps(step: Step, other: Step) -> None:
    for name, mine, theirs in zip(Step._fields, step, other, strict=True):
        assert (mine is None) == (theirs is None), name
        if mine is not None and theirs is not None:
            assert np.array_equal(mine, theirs), name


@needs_envpool
@pytest.mark.parametrize(
    ("game", "changes", "num_steps"),
    [
        ("breakout", {"episodic_life": True}, 250),
        ("pong", {"max_episode_steps": 9, "frame_stack": 3, "frame_skip": 3}, 30),
        ("space_invaders", {"full_action_space": True, "env_kwargs": '{"img_width": 42}'}, 40),
    ],
)
def test_plays_the_games_of_ale_py(game: str, changes: dict[str, Any], num_steps: int) -> None:
    # The two draw their no-ops differently; without them a game is a function of its actions.
    envs = make(game, noop_max=0, **changes)
    others = AtariEnvs(
        Config(env=game, noop_max=0).replace(**changes), game, 2, seed=1, training=True
    )
    assert envs.spec == others.spec
    assert envs.seeds == others.seeds
    assert np.array_equal(envs.reset(), others.reset())
    rng, ends = np.random.default_rng(4), 0
    for _ in range(num_steps):
        actions = rng.integers(envs.spec.num_actions, size=2)
        step, other = envs.step(actions), others.step(actions)
        # ale-py's frame limit cuts the truncating step itself short, so its newest frame differs.
        for obs in (step.obs, other.obs):
            obs[step.truncated, -1] = 0
        assert_equal_steps(step, other)
        ends += int((step.terminated | step.truncated).sum())
    assert ends >= 1 or game == "space_invaders"


@needs_envpool
def test_max_episode_steps_counts_env_steps() -> None:
    envs = make(num_envs=1, max_episode_steps=10, frame_skip=3)
    envs.reset()
    truncated = [envs.step(np.zeros(1, dtype=np.int64)).truncated[0] for _ in range(22)]
    assert [i for i, cut in enumerate(truncated, start=1) if cut] == [10, 21]


def first_end(limit: int) -> tuple[int, bool, bool]:
    """Length of a first game of Breakout, and how it ended."""
    envs = make(num_envs=1, noop_max=0, max_episode_steps=limit)
    envs.reset()
    rng = np.random.default_rng(0)
    for length in range(1, 1000):
        step = envs.step(rng.integers(4, size=1))
        if step.terminated[0] or step.truncated[0]:
            return length, bool(step.terminated[0]), bool(step.truncated[0])
    raise AssertionError("a random player of Breakout lives for 1000 steps")


@needs_envpool
def test_a_game_that_ends_in_its_last_step_is_terminated() -> None:
    length, *ending = first_end(limit=0)
    assert ending == [True, False]
    assert first_end(limit=length) == (length, True, False)
    assert first_end(limit=length - 1) == (length - 1, False, True)


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


@needs_envpool
def test_lives_end_the_task_but_not_the_game() -> None:
    _, lost, ends = play(make(num_envs=1, episodic_life=True), 400)
    assert ends >= 1
    # Breakout has five lives: four losses before each end, and up to four more in an open game.
    assert 4 * ends <= lost <= 4 * ends + 4


@needs_envpool
@pytest.mark.parametrize("changes", [{"training": False}, {"episodic_life": False}])
def test_no_lives_in_evaluation_or_unasked(changes: dict[str, Any]) -> None:
    envs = make(num_envs=1, **({"episodic_life": True} | changes))
    envs.reset()
    assert envs.step(np.zeros(1, dtype=np.int64)).life_lost is None


@needs_envpool
def test_seeds_decide_everything() -> None:
    first, again = make(sticky_actions=0.25), make(sticky_actions=0.25)
    assert len(set(first.seeds)) == 2
    trace, *_ = play(first, 25)
    repeated, *_ = play(again, 25)
    restarted, *_ = play(first, 25)
    other, *_ = play(make(sticky_actions=0.25, seed=2), 25)
    assert all(map(np.array_equal, trace, repeated))
    assert all(map(np.array_equal, trace, restarted))
    assert not all(map(np.array_equal, trace, other))
    assert any(not np.array_equal(obs[0], obs[1]) for obs in trace)


@needs_envpool
@pytest.mark.parametrize(
    ("game", "noop_max", "sticky_actions", "are_equal"),
    [
        ("breakout", 0, 0.0, True),
        ("breakout", 0, 0.5, False),
        ("space_invaders", 0, 0.0, True),
        ("space_invaders", 30, 0.0, False),
    ],
)
def test_what_parts_games_of_equal_actions(
    game: str, noop_max: int, sticky_actions: float, are_equal: bool
) -> None:
    envs = make(game, noop_max=noop_max, sticky_actions=sticky_actions)
    envs.reset()
    stacks = [envs.step(np.full(2, action)).obs for action in (2, 3, 2, 3, 2, 3, 2, 3)]
    assert all(np.array_equal(stack[0], stack[1]) for stack in stacks) == are_equal


@needs_envpool
def test_alternating_pools_play_as_each_alone() -> None:
    pools = [make(num_envs=1, max_episode_steps=5), make(num_envs=2, max_episode_steps=5)]
    alone = [make(num_envs=1, max_episode_steps=5), make(num_envs=2, max_episode_steps=5)]
    for envs in pools + alone:
        envs.reset()
    rng = np.random.default_rng(0)
    plans = [[rng.integers(4, size=envs.num_envs) for _ in range(12)] for envs in pools]
    pools[0].send(plans[0][0])
    for turn in range(12):
        actions = plans[1][turn].copy()
        pools[1].send(actions)
        actions[:] = -1  # whoever sent them may use the array again
        steps = [pools[0].recv()]
        if turn < 11:
            pools[0].send(plans[0][turn + 1])
        steps.append(pools[1].recv())
        for step, envs, plan in zip(steps, alone, plans, strict=True):
            assert_equal_steps(step, envs.step(plan[turn]))


@needs_envpool
def test_one_step_in_flight() -> None:
    envs = make(num_envs=1)
    envs.reset()
    actions = np.zeros(1, dtype=np.int64)
    with pytest.raises(AssertionError, match="without a send"):
        envs.recv()
    envs.send(actions)
    with pytest.raises(AssertionError, match="before the recv"):
        envs.send(actions)
    envs.close()
    envs.close()
    # A pool that was closed in mid-step can be opened again.
    envs.reset()
    assert not envs.step(actions).invalid[0]


@needs_envpool
def test_options_reach_the_emulator() -> None:
    changes: dict[str, Any] = {"frame_stack": 2, "noop_max": 0, "env_kwargs": '{"img_height": 42}'}
    envs = make(num_envs=1, full_action_space=True, **changes)
    assert envs.reset().shape == (1, 2, 42, 84)
    assert envs.spec.num_actions == 18
    assert envs.spec.frame_stack == 2
    assert envs.state_dict() is None
    with pytest.raises(CheckpointError, match=says("resumed")):
        envs.load_state_dict({})


@needs_envpool
def test_rewards_are_not_clipped() -> None:
    envs = make("space_invaders")
    envs.reset()
    rewards = [envs.step(np.ones(2, dtype=np.int64)).reward.max() for _ in range(100)]
    assert max(rewards) >= 5


@needs_envpool
def test_no_banner(capfd: pytest.CaptureFixture[str]) -> None:
    make(num_envs=1).reset()
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")


@needs_envpool
def test_unknown_game_names_a_near_one() -> None:
    with pytest.raises(UnknownNameError, match=says("EnvPool", "breakot", "breakout")):
        make("breakot")


@needs_envpool
@pytest.mark.parametrize(
    ("env_kwargs", "error", "match"),
    [
        ('{"maxpool": false}', UnknownNameError, "env_kwargs maxpool"),
        ('{"img_height": "tall"}', ConfigError, "breakout tall"),
        ('{"img_height": -1}', ConfigError, "breakout -1"),
        ('{"img_width": 0}', ConfigError, "pixel"),
    ],
)
def test_wrong_options_are_refused(env_kwargs: str, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=says(*match.split())):
        make(env_kwargs=env_kwargs)


def test_missing_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "envpool", None)
    with pytest.raises(ConfigError, match=says("pip install envpool")):
        make()


def test_library_without_its_files_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delitem(sys.modules, "envpool", raising=False)
    (tmp_path / "envpool").mkdir()
    (tmp_path / "envpool" / "__init__.py").write_text("raise FileNotFoundError('no ROMs')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=says("import", "no ROMs")):
        make()
