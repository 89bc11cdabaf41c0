"""MinAtar Freeway against the package, board for board."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from torch import Tensor

from qfleet.envs.device.minatar.freeway import DIRECTIONS_LANE, SPEEDS_LANE, Freeway
from qfleet.envs.device.minatar.game import MinAtar
from support.against_minatar import Dice, compare


class FreewayDice(Dice):
    """One draw of ours is the package's eight: its digits, those of the first car last."""

    def __init__(self, game: Any) -> None:
        super().__init__(game)
        self.throws = 0
        """Of speeds: one per episode, and one per arrival."""

    def randint(self, low: int, high: int, count: int) -> np.ndarray:
        self.throws += 1
        digits = np.base_repr(self.draws.below(SPEEDS_LANE, 5**8)[self.env], 5).zfill(8)
        assert (low, high, count) == (1, 6, len(digits))
        return np.array([int(digit) + 1 for digit in reversed(digits)])

    def rand(self, count: int) -> np.ndarray:
        digits = f"{self.draws.below(DIRECTIONS_LANE, 2**8)[self.env]:08b}"
        assert count == len(digits)
        return np.array([0.75 if digit == "1" else 0.25 for digit in reversed(digits)])


def mostly_up(obs: Tensor, random: np.random.Generator) -> np.ndarray:
    """Random play hardly ever arrives, this does all the time."""
    return random.choice(3, size=len(obs), p=(0.1, 0.85, 0.05))


def test_random_play_is_that_of_the_package() -> None:
    # Nothing but time ends an episode.
    assert compare(MinAtar(Freeway()), FreewayDice, num_envs=32, steps=200) == 0


@pytest.mark.slow
def test_good_play_until_after_the_end_is_that_of_the_package() -> None:
    dice: list[FreewayDice] = []

    def make(game: Any) -> FreewayDice:
        dice.append(FreewayDice(game))
        return dice[-1]

    ended = compare(MinAtar(Freeway()), make, num_envs=4, steps=2520, policy=mostly_up)
    assert ended == 4
    arrivals = sum(one.throws for one in dice) - 2 * 4
    assert arrivals > 50
