"""CartPole, Acrobot and MountainCar against Gymnasium step for step, the maze against the lab's.

Ours calculates in float32, Gymnasium in float64, so two walks would drift apart. Steps are compared
instead: Gymnasium is put where ours is, before every one. What a step may differ by is told by
``Case.tolerance``; that the equations are the same, and not just close, is told by ours in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from qfleet.core.errors import ConfigError
from qfleet.envs import grid
from qfleet.envs.device.acrobot import Acrobot
from qfleet.envs.device.cartpole import CartPole
from qfleet.envs.device.maze import Maze
from qfleet.envs.device.mountaincar import MountainCar
from qfleet.envs.device.protocol import TensorEnv, begin_episodes, step_episodes
from qfleet.lab import maze as lab

Array = NDArray[Any]


class Reference(NamedTuple):
    """What Gymnasium made of M states and actions."""

    state: Array
    obs: Array
    reward: Array
    terminated: Array


class Case(NamedTuple):
    env: TensorEnv
    tolerance: float
    """A rounding is off by 2⁻²⁴ ≈ 6e-8 of its number at most, and a step adds up some tens of them.

    CartPole: numbers of up to 4, whose change is 1/50 of accelerations of up to 20 (seen: 2e-7).
    Acrobot: speeds of up to 28, from four stages that each square them (seen: 1e-5).
    MountainCar: numbers of at most 1.2, a handful of roundings (seen: 1e-7).
    """
    farthest: tuple[float, ...]
    """States from anywhere lie within ± this."""
    margin: Callable[[Array], Array]
    """How far reached states ``[M, …]`` are from where an episode's end is decided."""
    lively: Callable[[Array, Array], Array]
    """Better play than random: actions from states and random ones."""
    every: int
    """Gymnasium is slow: a played episode is compared in every so many steps (and at its end)."""
    envs: int


def cartpole_margin(state: Array) -> Array:
    sides = np.abs(np.abs(state[:, (0, 2)]) - (2.4, math.radians(12)))
    return sides.min(1)


def acrobot_margin(state: Array) -> Array:
    # Two angles and their sum: an error of each of them counts up to three times.
    height = -np.cos(state[:, 0]) - np.cos(state[:, 0] + state[:, 1])
    return np.abs(height - 1) / 3


def mountaincar_margin(state: Array) -> Array:
    place, speed = state.T
    return np.where(place < 0.5, 0.5 - place, np.minimum(place - 0.5, np.abs(speed)))


def balance(state: Array) -> Array:
    return (state @ (0.1, 0.3, 3.0, 1.0) > 0).astype(np.int64)


def run_aside(state: Array, random: Array) -> Array:
    """Keep the pole at a slant, mostly: the cart runs after it, to the left or to the right."""
    number = np.arange(len(state))
    chased = state @ (0.0, 0.0, 3.0, 1.0) > np.where(number % 2, 0.2, -0.2)
    return np.where(number % 8 == 0, random, chased)


def with_the_motion(state: Array, random: Array) -> Array:
    """A force along the speed always adds energy; mostly so, and at random in some envs."""
    pushed = 1 + np.sign(state[:, -1]).astype(np.int64)
    return np.where(np.arange(len(state)) % 4 == 0, random, pushed)


CASES = {
    "CartPole": Case(CartPole(), 1e-6, (2.6, 4.0, 0.25, 4.0), cartpole_margin, run_aside, 2, 128),
    "Acrobot": Case(
        Acrobot(),
        4e-5,
        (math.pi, math.pi, 4 * math.pi, 9 * math.pi),
        acrobot_margin,
        with_the_motion,
        100,
        2048,
    ),
    "MountainCar": Case(
        MountainCar(), 5e-7, (1.3, 0.08), mountaincar_margin, with_the_motion, 32, 1024
    ),
}
classic = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
SLOW = {"Acrobot": [pytest.mark.slow]}


def inner(state: dict[str, Tensor]) -> Tensor:
    """The one tensor that a classic state consists of."""
    (only,) = state.values()
    return only


def ask_gymnasium(env: TensorEnv, states: Array, actions: Array) -> Reference:
    reference: Any = gymnasium.make(env.spec.env_id).unwrapped
    reference.reset()
    rows = []
    for state, action in zip(states.astype(np.float64), actions.tolist(), strict=True):
        reference.state, reference.steps_beyond_terminated = state, None
        obs, reward, terminated, truncated, _ = reference.step(action)
        assert not truncated
        rows.append((np.array(reference.state), obs, reward, terminated))
    return Reference(*(np.array(column) for column in zip(*rows, strict=True)))


class Played(NamedTuple):
    """Steps picked from play, and how many episodes they are from."""

    before: Array
    action: Array
    after: Array
    obs: Array
    reward: Array
    terminated: Array
    episodes: int


def play(case: Case, steps: int, *, lively: bool) -> Played:
    env, random = case.env, np.random.default_rng(0)
    episodes = begin_episodes(env, torch.arange(case.envs) + 7)
    picked: list[tuple[Array, ...]] = []
    begun = 0
    for at in range(steps):
        before = inner(episodes.inner).numpy()
        action = random.integers(env.spec.num_actions, size=case.envs)
        if lively:
            action = case.lively(before, action)
        episodes, step = step_episodes(env, episodes, torch.from_numpy(action))
        after, ended = inner(episodes.inner).numpy(), step.terminated.numpy()
        begun += int((episodes.steps == 1).sum())
        picks = (np.arange(case.envs) + at) % case.every == 0
        picks = (picks | ended) & ~step.opened.numpy()
        rows = (before, action, after, step.obs.numpy(), step.reward.numpy(), ended)
        picked.append(tuple(row[picks] for row in rows))
    return Played(*map(np.concatenate, zip(*picked, strict=True)), episodes=begun)


def compare(case: Case, played: Played) -> None:
    told = ask_gymnasium(case.env, played.before, played.action)
    near = case.margin(told.state) <= case.tolerance
    same_end = played.terminated == told.terminated
    assert (same_end | near).all()
    assert near.mean() < 1e-3, "the margin excuses nearly nothing"
    assert np.array_equal(played.reward[same_end], told.reward[same_end].astype(np.float32))
    off = np.abs(played.obs - told.obs)
    if isinstance(case.env, MountainCar):
        # Whether the wall is met is decided by a hair as well, and the speed is 0 or not by that.
        one_stopped = (played.after[:, 1] == 0) != (told.state[:, 1] == 0)
        at_wall = np.abs(np.stack((played.after, told.state))[:, :, 0] + 1.2).max(0)
        off[one_stopped & (at_wall <= case.tolerance), 1] = 0
    assert off.max() <= case.tolerance


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=name, marks=SLOW.get(name, [])) for name, case in CASES.items()]
)
def test_random_play_is_that_of_gymnasium(case: Case) -> None:
    steps = {"CartPole-v1": 380, "Acrobot-v1": 500, "MountainCar-v0": 401}[case.env.spec.env_id]
    played = play(case, steps, lively=False)
    assert played.episodes >= 2000
    assert (played.terminated.sum() > 0) == (case.env.spec.env_id != "MountainCar-v0")
    compare(case, played)


@classic
def test_better_play_is_that_of_gymnasium(case: Case) -> None:
    played = play(case, 150 if isinstance(case.env, Acrobot) else 300, lively=True)
    assert played.terminated.sum() > 100
    if isinstance(case.env, CartPole):
        for side in (-1, 1):
            assert (side * played.after[played.terminated, 0] > 2.4).sum() > 50
    compare(case, played)


@classic
def test_the_equations_are_those_of_gymnasium(case: Case) -> None:
    """From anywhere, in float64, where nothing but a rule can make a difference one can see."""
    env, random = case.env, np.random.default_rng(1)
    states = random.uniform(-1, 1, (3000, len(case.farthest))) * case.farthest
    actions = random.integers(env.spec.num_actions, size=len(states))
    told = ask_gymnasium(env, states, actions)
    counters = torch.zeros(len(states), dtype=torch.int64)
    outcome = env.advance(
        {name: torch.from_numpy(states) for name in env.begin(counters)},
        torch.from_numpy(actions),
        counters,
    )
    assert 0.02 < told.terminated.mean() < 0.98
    assert np.array_equal(outcome.terminated.numpy(), told.terminated)
    assert np.array_equal(outcome.reward.numpy(), told.reward.astype(np.float32))
    assert np.abs(inner(outcome.state).numpy() - told.state).max() < 1e-9
    seen = env.observe(outcome.state).numpy()
    assert np.allclose(seen, told.obs, rtol=1e-6, atol=1e-6)
    if isinstance(env, Acrobot):  # Both bounds of both speeds were met, and angles were wrapped.
        for joint, bound in enumerate((4 * math.pi, 9 * math.pi)):
            assert {-bound, bound} <= set(told.state[:, 2 + joint])
        assert (np.abs(states[:, 1] + 0.2 * states[:, 3]) > 2 * math.pi).any()
    if isinstance(env, MountainCar):
        assert ((told.state[:, 0] == -1.2) & (told.state[:, 1] == 0)).sum() > 50
        assert (told.state[:, 0] == 0.6).any()


@classic
def test_starts_are_spread_like_those_of_gymnasium(case: Case) -> None:
    reference: Any = gymnasium.make(case.env.spec.env_id).unwrapped
    theirs = np.array([reference.reset(seed=seed)[0] for seed in range(1000)])
    begun = case.env.begin(begin_episodes(case.env, torch.arange(4096)).counters)
    ours = case.env.observe(begun).numpy()
    width = np.ptp(theirs, axis=0)
    for quantile in (0, 0.25, 0.5, 0.75, 1):
        apart = np.quantile(ours, quantile, axis=0) - np.quantile(theirs, quantile, axis=0)
        assert (np.abs(apart) <= 0.06 * width).all()
    drawn = inner(begun).numpy().T
    drawn = drawn[np.ptp(drawn, axis=1) > 0]
    between = np.corrcoef(drawn) - np.eye(len(drawn))
    assert np.abs(between).max() < 4 / math.sqrt(4096)


@classic
def test_what_is_told_of_an_env_is_true(case: Case) -> None:
    registered = gymnasium.spec(case.env.spec.env_id)
    assert case.env.max_episode_steps == registered.max_episode_steps
    reference = gymnasium.make(registered)
    assert reference.observation_space.shape == case.env.spec.obs_shape
    assert reference.action_space.n == case.env.spec.num_actions  # type: ignore[attr-defined]
    begun = begin_episodes(case.env, torch.arange(3))
    _, step = step_episodes(case.env, begun, torch.zeros(3, dtype=torch.int64))
    assert step.obs.shape == (3, *case.env.spec.obs_shape)
    assert (step.obs.dtype, step.reward.dtype) == (case.env.spec.torch_dtype, torch.float32)


@pytest.mark.parametrize(
    ("env", "act"),
    [
        (CartPole(), lambda state: torch.from_numpy(balance(state.numpy()))),
        (Acrobot(), lambda state: torch.ones(len(state), dtype=torch.int64)),
        (MountainCar(), lambda state: torch.ones(len(state), dtype=torch.int64)),
        (Maze("S.G"), lambda state: torch.zeros(len(state), dtype=torch.int64)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_time_limit_truncates(env: TensorEnv, act: Callable[[Tensor], Tensor]) -> None:
    episodes = begin_episodes(env, torch.arange(16))
    for at in range(1, env.max_episode_steps + 1):
        episodes, step = step_episodes(env, episodes, act(inner(episodes.inner)))
        assert not step.terminated.any()
        assert step.truncated.all() == step.truncated.any() == (at == env.max_episode_steps)
    last = inner(episodes.inner)
    episodes, step = step_episodes(env, episodes, act(last))
    assert step.opened.all()
    assert not step.truncated.any()
    assert torch.equal(inner(episodes.inner), inner(env.begin(episodes.counters)))


def test_an_end_at_the_time_limit_terminates() -> None:
    env = Maze("SG")
    env.max_episode_steps = 1
    _, step = step_episodes(env, begin_episodes(env, torch.arange(1)), torch.full((1,), 3))
    assert step.terminated.all()
    assert not step.truncated.any()


@pytest.mark.parametrize("env", [CartPole(), Acrobot(), MountainCar(), Maze("S..\n.#G")])
def test_the_step_after_an_end_opens_an_episode(env: TensorEnv) -> None:
    random = torch.Generator().manual_seed(0)
    episodes = begin_episodes(env, torch.arange(64))
    over, seen = torch.zeros(64, dtype=torch.bool), 0
    for _ in range(210):
        action, other = torch.randint(env.spec.num_actions, (2, 64), generator=random)
        if isinstance(env, Acrobot):
            action = 1 + episodes.inner["joints"][:, 3].sign().long()
        kept = {name: tensor.clone() for name, tensor in episodes.inner.items()}
        after, step = step_episodes(env, episodes, action)
        assert all(torch.equal(kept[name], episodes.inner[name]) for name in kept)
        assert torch.equal(step.opened, over)
        assert torch.equal(step.obs[over], env.observe(env.begin(after.counters))[over])
        if over.any():
            _, otherwise = step_episodes(env, episodes, other)
            assert torch.equal(step.obs[over], otherwise.obs[over]), "its action is ignored"
        ended = step.terminated | step.truncated
        for nothing in (step.reward, ended, after.steps):
            assert not nothing[over].any()
        over = ended
        seen += int(step.opened.sum())
        episodes = after
    assert seen >= 64


ROOMY = "\n".join(
    (
        "S....#.........#....",
        ".##..#..####...#.##.",
        "..#.....#  #.....#..",
        "#.##.#..#..#...#.#.#",
        "..#..#.........#....",
        ".######..#######..#.",
        "...................G",
    )
)
"""140 cells: more than the bits of two words; a wall where the second word begins."""


@pytest.mark.parametrize("text", [grid.MAZE, "SG", "S#.\n..G", ROOMY])
def test_every_move_is_that_of_the_lab(text: str) -> None:
    theirs, env = grid.Maze.from_text(text), Maze(text)
    open_cells = [cell for cell in range(theirs.num_states) if not theirs.is_wall(cell)]
    pairs = [(cell, action) for cell in open_cells for action in range(len(grid.ACTIONS))]
    cells, actions = torch.tensor(pairs).T
    outcome = env.advance({"cell": cells}, actions, torch.zeros_like(cells))
    told = []
    for cell, action in pairs:
        theirs.state = cell
        told.append(theirs.step(action))
    assert outcome.state["cell"].tolist() == [reached for reached, _, _ in told]
    assert outcome.reward.tolist() == [reward for _, reward, _ in told]
    assert outcome.terminated.tolist() == [terminated for _, _, terminated in told]


@pytest.mark.parametrize("text", [grid.MAZE, "S#.\n..G"])
def test_walks_are_those_of_the_lab(text: str) -> None:
    env, theirs = Maze(text), [grid.Maze.from_text(text) for _ in range(32)]
    random, arrived = np.random.default_rng(0), 0
    episodes = begin_episodes(env, torch.arange(32))
    assert env.observe(episodes.inner).tolist() == [maze.reset() for maze in theirs]
    for _ in range(600):
        actions = random.integers(len(grid.ACTIONS), size=32)
        episodes, step = step_episodes(env, episodes, torch.from_numpy(actions))
        opened = step.opened.tolist()
        told = [
            (maze.reset(), 0.0, False) if opened[number] else maze.step(int(actions[number]))
            for number, maze in enumerate(theirs)
        ]
        ours = (step.obs.tolist(), step.reward.tolist(), step.terminated.tolist())
        assert list(zip(*ours, strict=True)) == told
        arrived += int(step.terminated.sum())
    assert arrived > 5


def test_what_is_told_of_the_maze_is_true() -> None:
    env = Maze()
    assert (env.spec.obs_shape, env.spec.obs_dtype) == ((), "int64")
    assert (env.spec.num_obs_values, env.spec.num_actions) == (48, 4)
    assert env.max_episode_steps == lab._MAX_STEPS_PER_CELL * 48
    assert env.begin(torch.arange(3))["cell"].tolist() == [grid.Maze.from_text(grid.MAZE).start] * 3
    with pytest.raises(ConfigError, match="no way"):
        Maze("S#G")
