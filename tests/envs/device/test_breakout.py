"""MinAtar Breakout against the package, board for board."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from qfleet.envs.device.minatar.breakout import SIDE_LANE, Breakout
from qfleet.envs.device.minatar.game import MinAtar
from support.against_minatar import Dice, compare


class BreakoutDice(Dice):
    def randint(self, bound: int) -> int:
        return self.draws.below(SIDE_LANE, bound)[self.env]


def follow_the_ball(obs: Tensor, random: np.random.Generator) -> np.ndarray:
    """Mostly good play, so that walls are cleared."""
    paddle = obs[:, 9, :, 0].float().argmax(1)
    ball = obs[:, :, :, 1].flatten(1).float().argmax(1) % 10
    good = torch.where(ball < paddle, 1, torch.where(ball > paddle, 2, 0)).numpy()
    return np.where(random.random(len(good)) < 0.02, random.integers(3, size=len(good)), good)


@pytest.mark.slow
def test_random_play_is_that_of_the_package() -> None:
    assert compare(MinAtar(Breakout()), BreakoutDice) > 1000


@pytest.mark.slow
def test_good_play_is_that_of_the_package() -> None:
    env = MinAtar(Breakout(), sticky=0.0)
    assert compare(env, BreakoutDice, num_envs=32, steps=1500, policy=follow_the_ball) > 0
