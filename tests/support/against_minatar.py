"""Tensor games beside the games of the ``minatar`` package, with the same random draws.

The package's own dice are taken away: its generator is replaced by one that throws what ours drew
for that environment and step. Whatever differs then is a difference of rules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from minatar import Environment
from torch import Tensor

from qfleet.core.counter_rng import draw_below, draw_uniform
from qfleet.envs.device.minatar.game import STICKY_LANE, MinAtar
from qfleet.envs.device.protocol import begin_episodes, step_episodes


class Draws:
    """What our game drew in one step, for all environments; worked out once per lane."""

    def __init__(self, counters: Tensor) -> None:
        self._counters = counters
        self._known: dict[tuple[int, int], list[Any]] = {}

    def uniform(self, lane: int) -> list[float]:
        return self._draw(lane, 0)

    def below(self, lane: int, bound: int) -> list[int]:
        return self._draw(lane, bound)

    def _draw(self, lane: int, bound: int) -> list[Any]:
        if (lane, bound) not in self._known:
            counters = self._counters
            drawn = draw_below(counters, lane, bound) if bound else draw_uniform(counters, lane)
            self._known[lane, bound] = drawn.tolist()
        return self._known[lane, bound]


class Dice:
    """Stands in for numpy's RandomState inside one game of the package.

    A game's own dice have those of its methods that the game calls, and return what ``draws`` has
    for environment ``env``; the harness sets both before every step and reset.
    """

    env: int
    draws: Draws

    def __init__(self, game: Any) -> None:
        self.game = game


class Sticky:
    """The dice of the package's outer class: whether an action sticks."""

    def __init__(self) -> None:
        self.thrown = 0.0

    def rand(self) -> float:
        return self.thrown


def seen_by(obs: Tensor) -> np.ndarray:
    """Our pixels ``[N, C, 10, 10]`` as the package's boards ``[N, 10, 10, C]``."""
    return np.moveaxis(obs.numpy() == 255, 1, 3)


def compare(
    env: MinAtar,
    make_dice: Callable[[Any], Dice],
    *,
    ramping: bool = True,
    num_envs: int = 64,
    steps: int = 1000,
    policy: Callable[[Tensor, np.random.Generator], np.ndarray] | None = None,
) -> int:
    """Step both, compare every observation, reward and end; returns how many episodes ended.

    ``make_dice`` gets the package's inner game. Actions are random, or those of ``policy``, which
    is given our boards ``[N, 10, 10, C]``.
    """
    references, dice, sticky = [], [], Sticky()
    names = {"SpaceInvaders": "space_invaders"}
    for _ in range(num_envs):
        name = names.get(env.game.name, env.game.name.lower())
        reference = Environment(name, sticky_action_prob=env.sticky, difficulty_ramping=ramping)
        assert tuple(reference.minimal_action_set()) == env.game.useful
        reference.random = sticky
        reference.env.random = make_dice(reference.env)
        references.append(reference)
        dice.append(reference.env.random)

    def throw(number: int, draws: Draws) -> None:
        dice[number].env, dice[number].draws = number, draws
        sticky.thrown = draws.uniform(STICKY_LANE)[number]

    episodes = begin_episodes(env, torch.arange(num_envs) + 100)
    draws = Draws(episodes.counters)
    for number, reference in enumerate(references):
        throw(number, draws)
        reference.reset()
    boards = np.stack([reference.state() for reference in references])
    assert np.array_equal(seen_by(env.observe(episodes.inner)), boards)
    random, ended = np.random.default_rng(0), 0
    obs = env.observe(episodes.inner).movedim(1, 3)
    for at in range(steps):
        actions = random.integers(len(env.game.useful), size=num_envs)
        if policy is not None:
            actions = policy(obs, random)
        episodes, step = step_episodes(env, episodes, torch.from_numpy(actions))
        obs, draws = step.obs.movedim(1, 3), Draws(episodes.counters)
        seen, opened = seen_by(step.obs), step.opened.tolist()
        rewards, terminated = step.reward.tolist(), step.terminated.tolist()
        for number, reference in enumerate(references):
            throw(number, draws)
            where = f"env {number}, step {at}"
            if opened[number]:
                reference.reset()
                reference.last_action = 0  # ours starts anew, the package's remembers
                reward, over = 0.0, False
            else:
                reward, over = reference.act(env.game.useful[actions[number]])
            assert rewards[number] == reward, where
            assert terminated[number] == over, where
            assert np.array_equal(seen[number], reference.state()), where
        ended += sum(terminated)
    return ended
