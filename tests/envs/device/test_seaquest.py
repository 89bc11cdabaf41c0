"""MinAtar Seaquest against the package, board for board."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from qfleet.envs.device.minatar import seaquest
from qfleet.envs.device.minatar.game import DOWN, FIRE, LEFT, NOTHING, RIGHT, UP, MinAtar
from qfleet.envs.device.minatar.seaquest import (
    BULLETS,
    DIVER_ROW_LANE,
    DIVER_SIDE_LANE,
    DIVERS,
    ENEMIES,
    ENEMY_KIND_LANE,
    ENEMY_ROW_LANE,
    ENEMY_SIDE_LANE,
    LAST_LEVEL,
    Seaquest,
)
from qfleet.envs.device.protocol import State
from support.against_minatar import Dice, compare

SHELL, FISH, SUBMARINE, OXYGEN, RESCUED, DIVER = 4, 5, 6, 7, 8, 9
Policy = Callable[[Tensor, np.random.Generator], np.ndarray]


class Reached:
    """What the package's games came to, over all steps."""

    def __init__(self) -> None:
        self.most: dict[str, int] = {}
        self.least_held = 0

    def look(self, game: Any) -> None:
        now = {
            "enemies": len(game.e_fish) + len(game.e_subs),
            "divers": len(game.divers),
            "bullets": len(game.f_bullets),
            "held": game.diver_count,
            "level": game.ramp_index,
            "orphans": 0 if game.e_subs else len(game.e_bullets),
        }
        self.most = {name: max(value, self.most.get(name, 0)) for name, value in now.items()}
        self.least_held = min(self.least_held, game.diver_count)


class SeaquestDice(Dice):
    """Knows what is thrown for: enemies come before divers, and only while their timer is at 0."""

    def __init__(self, game: Any, reached: Reached) -> None:
        super().__init__(game)
        self.throws, self._act, self._reached = 0, game.act, reached
        game.act = self._act_and_look

    def rand(self) -> float:
        lanes = (DIVER_SIDE_LANE,)
        if self.game.e_spawn_timer == 0:
            lanes = (ENEMY_SIDE_LANE, ENEMY_KIND_LANE)
        lane, self.throws = lanes[self.throws], self.throws + 1
        return self.uniform(lane)

    def randint(self, low: int, high: int) -> int:
        lane = DIVER_ROW_LANE if self.throws == 1 else ENEMY_ROW_LANE
        self.throws = 0
        return low + self.draws.below(lane, high - low)[self.env]

    def uniform(self, lane: int) -> float:
        return self.draws.uniform(lane)[self.env]

    def _act_and_look(self, action: int) -> Any:
        result = self._act(action)
        self._reached.look(self.game)
        return result


class Later(Seaquest):
    """Episodes begin with a level and divers aboard that take long to come to.

    ``meeting``: with two divers in row 1, about to meet in column 7, the newer from the right.
    """

    def __init__(self, level: int, held: int, meeting: bool = False, ramping: bool = True) -> None:
        super().__init__(ramping)
        self.level, self.held, self.meeting = level, held, meeting

    def begin(self, counters: Tensor) -> State:
        fresh = super().begin(counters)
        fresh["level"], fresh["held"] = fresh["level"] + self.level, fresh["held"] + self.held
        if self.meeting:
            slots = torch.tensor([[1, 1], [8, 6], [-1, 1], [5, 5]])
            fresh["divers"] = slots.expand(len(counters), 4, 2)
            fresh["diver_due"] = torch.full_like(counters, 24)
        return fresh

    def make_dice(self, reached: Reached) -> Callable[[Any], SeaquestDice]:
        return lambda game: self._prepared(SeaquestDice(game, reached))

    def _prepared(self, dice: SeaquestDice) -> SeaquestDice:
        game = dice.game
        reset = game.reset

        def reset_later() -> None:
            reset()
            for _ in range(self.level):
                game._surface()
            game.diver_count = self.held
            if self.meeting:
                game.divers = [[6, 1, True, 5], [8, 1, False, 5]]
                game.d_spawn_timer = 24

        game.reset = reset_later
        return dice


def hunt(obs: Tensor, random: np.random.Generator) -> np.ndarray:
    """Seek divers, come up with six or short of air, shoot what is ahead, keep off what is near."""
    board, line = obs.numpy() == 255, np.arange(10)
    each = np.arange(len(board))
    row, column = np.divmod(board[..., 0].reshape(len(board), -1).argmax(1), 10)
    back = board[..., 1].reshape(len(board), -1).argmax(1) % 10
    air, held = board[:, 9, :, OXYGEN].sum(1), board[:, 9, :, RESCUED].sum(1)
    enemies = board[..., FISH] | board[..., SUBMARINE]
    near = enemies | board[..., SHELL]
    danger = near.copy()
    for shift in (1, 2):
        danger[:, :, shift:] |= near[:, :, :-shift]
        danger[:, :, :-shift] |= near[:, :, shift:]
    ahead = (line - column[:, None]) * (column - back)[:, None] > 0
    aims = (enemies[each, row] & ahead).any(1)

    far = abs(line[:, None] - row[:, None, None]) + abs(line - column[:, None, None])
    far = np.where(board[..., DIVER], far, 99).reshape(len(board), -1)
    goal_row, goal_column = np.divmod(np.where(far.min(1) < 99, far.argmin(1), 45), 10)
    up = (held == 6) | ((air < 4) & (held > 0))
    goal_row, goal_column = np.where(up, 0, goal_row), np.where(up, column, goal_column)

    costs = np.zeros((len(board), 6))
    steps = {NOTHING: (0, 0), LEFT: (0, -1), UP: (-1, 0), RIGHT: (0, 1), DOWN: (1, 0), FIRE: (0, 0)}
    for action, (down, right) in steps.items():
        to_row, to_column = np.clip(row + down, 0, 8), np.clip(column + right, 0, 9)
        costs[:, action] = abs(to_row - goal_row) + abs(to_column - goal_column)
        costs[:, action] += 50 * danger[each, to_row, to_column]
        costs[:, action] += 100 * ((to_row == 0) & (row > 0) & ~up)
    costs[:, FIRE] -= 20 * aims
    return (costs + 0.9 * random.random(costs.shape)).argmin(1)


def as_listed(actions: np.ndarray) -> Policy:
    """The actions ``[steps, N]``, one row after the other."""
    rows = iter(actions)
    return lambda *_: next(rows)


def as_bad_as_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every four environments two have only fish, two only submarines; all from one side."""

    def side_or_kind(env: Any, lane: int) -> Any:
        return (env % 2 if lane == ENEMY_SIDE_LANE else env // 2 % 2) * 0.75

    def draw_uniform(counters: Tensor, lane: int) -> Tensor:
        return side_or_kind(torch.arange(len(counters)), lane)

    def uniform(dice: SeaquestDice, lane: int) -> float:
        return side_or_kind(dice.env, lane)

    monkeypatch.setattr(seaquest, "draw_uniform", draw_uniform)
    monkeypatch.setattr(SeaquestDice, "uniform", uniform)


def test_random_play_is_that_of_the_package() -> None:
    env, reached = MinAtar(Seaquest()), Reached()
    ended = compare(env, lambda game: SeaquestDice(game, reached), num_envs=128, steps=100)
    assert ended > 300


@pytest.mark.slow
def test_good_play_is_that_of_the_package() -> None:
    env, reached = MinAtar(Seaquest(), sticky=0.0), Reached()
    compare(env, lambda game: SeaquestDice(game, reached), num_envs=96, steps=230, policy=hunt)
    # Six were brought up, which leaves one less than none.
    assert reached.most["held"] == 6
    assert reached.least_held == -1


def test_the_last_level_is_that_of_the_package() -> None:
    game, reached = Later(LAST_LEVEL, held=-1), Reached()
    compare(MinAtar(game), game.make_dice(reached), num_envs=128, steps=100)
    assert reached.least_held < -3


def test_without_ramping_the_level_stays() -> None:
    game, reached = Later(0, held=-1, ramping=False), Reached()
    env, bobs = MinAtar(game), np.resize([DOWN, UP], 80).repeat(8).reshape(80, 8)
    compare(
        env,
        game.make_dice(reached),
        ramping=False,
        num_envs=8,
        steps=len(bobs),
        policy=as_listed(bobs),
    )
    assert reached.least_held < -10
    assert reached.most["level"] == 0


@pytest.mark.parametrize("level", [0, LAST_LEVEL])
def test_the_slots_hold_as_many_as_there_can_be(
    level: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_bad_as_can_be(monkeypatch)
    game, reached = Later(level, held=-1), Reached()
    # The level rises as fast as it can. Then the boat shoots along row 0, where it is safe, from
    # the right to the left; at last it goes anywhere.
    rise, aim = [DOWN, UP] * (LAST_LEVEL - level), [RIGHT] * 4 + [LEFT]
    play = np.repeat(rise + aim + [FIRE] * 45, 4).reshape(-1, 4)
    play = np.concatenate((play, np.random.default_rng(0).integers(6, size=(40, 4))))
    compare(
        MinAtar(game, sticky=0.0),
        game.make_dice(reached),
        num_envs=4,
        steps=len(play),
        policy=as_listed(play),
    )
    # Within a step there is one more: it comes before the oldest leaves.
    assert reached.most["enemies"] == ENEMIES - 1
    assert reached.most["divers"] == DIVERS
    assert reached.most["bullets"] == BULLETS


def test_the_newer_of_two_divers_is_the_sixth_and_six_leave_less_than_none() -> None:
    game, reached = Later(0, held=5, meeting=True), Reached()
    # One boat waits where they meet, the other comes when they have met.
    waits = [RIGHT, RIGHT, DOWN] + [NOTHING] * 12
    comes = [RIGHT, RIGHT] + [NOTHING] * 5 + [DOWN] + [NOTHING] * 7
    # Then both come up again and again: after six, less than none is enough.
    ups = [UP, DOWN, UP, DOWN, UP]
    play = np.array([waits + ups, comes + ups]).T
    compare(
        MinAtar(game, sticky=0.0),
        game.make_dice(reached),
        num_envs=2,
        steps=len(play),
        policy=as_listed(play),
    )
    assert reached.most["held"] == 6
    assert reached.least_held == -3


def test_a_submarine_fires_in_the_step_it_is_shot_down_by_its_own_move(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # It moves and fires in the same step only after it has become faster: it comes in step 21, the
    # boat comes up in step 23, and in step 31 they meet where the boat is in its row.
    as_bad_as_can_be(monkeypatch)
    game, reached = Later(1, held=-1), Reached()
    play = np.full((31, 80), NOTHING)
    play[21], play[22] = DOWN, UP
    depth = 1 + np.arange(80) // 4 % 5
    play[23:28] = np.where(np.arange(5)[:, None] < depth, DOWN, NOTHING)
    play[28] = FIRE
    compare(
        MinAtar(game, sticky=0.0),
        game.make_dice(reached),
        num_envs=80,
        steps=len(play),
        policy=as_listed(play),
    )
    assert reached.most["orphans"] == 1
