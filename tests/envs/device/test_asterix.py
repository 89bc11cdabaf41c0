"""MinAtar Asterix against the package, board for board."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from torch import Tensor

from qfleet.envs.device.minatar.asterix import GOLD_LANE, ROW_LANE, SIDE_LANE, Asterix
from qfleet.envs.device.minatar.game import MinAtar
from support.against_minatar import Dice, compare

AHEAD = 5
"""Steps that good play looks ahead."""


class AsterixDice(Dice):
    def __init__(self, game: Any) -> None:
        super().__init__(game)
        self.lane = GOLD_LANE

    def rand(self) -> float:
        # Two throws per arrival, the side first.
        self.lane = SIDE_LANE if self.lane == GOLD_LANE else GOLD_LANE
        return self.draws.uniform(self.lane)[self.env]

    def randint(self, bound: int) -> int:
        return self.draws.below(ROW_LANE, bound)[self.env]


class Witness:
    """Makes dice that tell what the package's games reached, as of their arrivals."""

    def __init__(self) -> None:
        self.paces: set[tuple[int, int]] = set()
        """Steps between arrivals and between moves."""
        self.crowded = False
        """Something was due while no row was empty."""

    def __call__(self, game: Any) -> Dice:
        witness = self

        class Watched(AsterixDice):
            def rand(self) -> float:
                witness.paces.add((game.spawn_speed, game.move_speed))
                witness.crowded |= None not in game.entities
                return super().rand()

        return Watched(game)


def stay_alive(obs: Tensor, random: np.random.Generator) -> np.ndarray:
    """Looks some steps ahead as if all moved at full speed, and takes gold on the way."""
    player, enemy, trail, gold = np.moveaxis(obs[:, 1:9].numpy() > 0, 3, 0)
    # A thing has its trail behind it; at an edge that may lie outside.
    behind = np.concatenate((~trail[:, :, 1:2], trail[:, :, :-1]), axis=2)
    right, left = _widened(enemy & behind, AHEAD), _widened(enemy & ~behind, AHEAD)
    column = np.arange(10)
    worth = 0.3 * gold - 0.1 * ((column < 2) | (column > 7))
    values = worth
    for steps in range(AHEAD, 0, -1):
        # Deadly are the cells an enemy leaves and those it enters.
        deadly = _window(right, -steps) | _window(right, 1 - steps)
        deadly |= _window(left, steps) | _window(left, steps - 1)
        values = np.where(deadly, -10.0, worth + 0.9 * _choices(values).max(0))
    best = (_choices(values) * player).sum((2, 3)).argmax(0)
    return np.where(random.random(len(best)) < 0.01, random.integers(5, size=len(best)), best)


def _widened(board: np.ndarray, by: int) -> np.ndarray:
    """Nothing at all around a board ``[N, 8, 10]``."""
    number, rows, columns = board.shape
    wide = np.zeros((number, rows + 2 * by, columns + 2 * by), board.dtype)
    wide[:, by:-by, by:-by] = board
    return wide


def _window(wide: np.ndarray, column: int) -> np.ndarray:
    """The board that was widened by AHEAD, seen from so many columns further right."""
    return wide[:, AHEAD:-AHEAD, AHEAD + column : AHEAD + column + 10]


def _choices(values: np.ndarray) -> np.ndarray:
    """``[5, N, 8, 10]``: what each action leads to from every cell; off the board, far worse."""
    wide = _widened(values + 100, 1)
    corners = ((1, 1), (1, 0), (0, 1), (1, 2), (2, 1))  # in the order of the actions
    return np.stack([wide[:, y : y + 8, x : x + 10] for y, x in corners]) - 100


def test_random_play_is_that_of_the_package() -> None:
    assert compare(MinAtar(Asterix()), AsterixDice, steps=400) > 300


@pytest.mark.slow
def test_good_play_is_that_of_the_package_up_to_the_hardest() -> None:
    env, witness = MinAtar(Asterix(), sticky=0.0), Witness()
    ended = compare(env, witness, num_envs=16, steps=1050, policy=stay_alive)
    hardening = ((10, 5), (9, 5), (8, 4), (7, 4), (6, 3), (5, 3), (4, 2), (3, 2), (2, 1), (1, 1))
    assert witness.paces == set(hardening)
    assert witness.crowded
    assert ended > 0


def test_without_ramping_it_is_that_of_the_package() -> None:
    env, witness = MinAtar(Asterix(ramping=False), sticky=0.0), Witness()
    compare(env, witness, ramping=False, num_envs=16, steps=300, policy=stay_alive)
    assert witness.paces == {(10, 5)}
