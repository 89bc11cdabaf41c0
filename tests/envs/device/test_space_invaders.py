"""MinAtar Space Invaders against the package, board for board."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from minatar.environments.space_invaders import Env as Reference
from torch import Tensor

from qfleet.envs.device.minatar.game import MinAtar
from qfleet.envs.device.minatar.space_invaders import SpaceInvaders
from qfleet.envs.device.protocol import State
from support.against_minatar import Dice, compare


def aim_and_dodge(obs: Tensor, random: np.random.Generator) -> np.ndarray:
    """Mostly good play, so that waves are cleared: steps aside from bombs, shoots ahead."""
    line, boards = torch.arange(10), obs == 255
    cannon, aliens = boards[:, 9, :, 0].long().argmax(1, keepdim=True), boards[:, :, :, 1]
    lowest = torch.where(aliens, line.view(-1, 1), -1).amax(1)
    heading = torch.where(boards[:, :, :, 3].flatten(1).any(1, keepdim=True), 1, -1)
    pace = aliens.flatten(1).sum(1, keepdim=True).clamp(1, 12)
    # Where each column's lowest alien will be when a shot gets there.
    meeting = line + heading * ((8 - lowest + pace // 2) // pace)
    meeting = torch.where(meeting > 9, 18 - meeting, meeting).abs().clamp(0, 9)
    far = torch.where(lowest >= 0, (meeting - cannon).abs(), 99)
    move = (meeting.gather(1, far.argmin(1, keepdim=True)) - cannon).sign()
    # The first of these that no bomb is about to fall on.
    moves = torch.cat((move, 0 * move, 0 * move - 1, 0 * move + 1), dim=1)
    places = cannon + moves
    falling = boards[:, 8, :, 5] | boards[:, 9, :, 1]
    bad = falling.gather(1, places.clamp(0, 9)) | (places < 0) | (places > 9)
    chosen = moves.gather(1, bad.long().argmin(1, keepdim=True)).squeeze(1)
    good = torch.where(chosen < 0, 1, torch.where(chosen > 0, 2, 3)).numpy()
    return np.where(random.random(len(good)) < 0.03, random.integers(4, size=len(good)), good)


def test_random_play_is_that_of_the_package() -> None:
    assert compare(MinAtar(SpaceInvaders()), Dice, num_envs=16, steps=400) > 50


@pytest.mark.slow
def test_good_play_is_that_of_the_package() -> None:
    games: list[Any] = []
    intervals: set[int] = set()

    def make(game: Any) -> Dice:
        games.append(game)
        return Dice(game)  # never thrown: nothing happens by chance

    def policy(obs: Tensor, random: np.random.Generator) -> np.ndarray:
        intervals.update(game.enemy_move_interval for game in games)
        return aim_and_dodge(obs, random)

    env = MinAtar(SpaceInvaders(), sticky=0.0)
    assert compare(env, make, num_envs=12, steps=500, policy=policy) > 0
    assert intervals >= {12, 11, 10}


def situations(count: int) -> tuple[list[Reference], State]:
    """What play hardly ever comes to: few aliens, low ones, any timers; the package's and ours."""
    random = np.random.default_rng(0)
    references = []
    for number in range(count):
        game = Reference()
        density = (0.0, 0.02, 0.1, 0.4)[number % 4]
        game.alien_map = (random.random((10, 10)) < density).astype(float)
        game.alien_map[random.integers(10), random.integers(10)] = 1.0
        game.f_bullet_map[:9] = random.random((9, 10)) < 0.2
        game.e_bullet_map[:] = random.random((10, 10)) < 0.02
        game.pos, game.alien_dir = int(random.integers(10)), int(random.choice((-1, 1)))
        game.enemy_move_interval = int(random.integers(6, 13))
        game.alien_move_timer = int(random.integers(game.enemy_move_interval))
        game.alien_shot_timer, game.shot_timer = int(random.integers(10)), int(random.integers(5))
        references.append(game)
    names = {
        "cannon": "pos",
        "aliens": "alien_map",
        "shots": "f_bullet_map",
        "bombs": "e_bullet_map",
        "interval": "enemy_move_interval",
        "move_timer": "alien_move_timer",
        "shot_timer": "shot_timer",
        "bomb_timer": "alien_shot_timer",
    }
    state = {}
    for ours, theirs in names.items():
        values = torch.from_numpy(np.stack([getattr(game, theirs) for game in references]))
        state[ours] = values.bool() if values.is_floating_point() else values
    state["rightwards"] = torch.tensor([game.alien_dir > 0 for game in references])
    return references, state


@pytest.mark.parametrize("ramping", [True, False])
def test_every_situation_goes_on_as_in_the_package(ramping: bool) -> None:
    references, state = situations(600)
    ours, random, reached = SpaceInvaders(ramping), np.random.default_rng(1), Counter[str]()
    counters = torch.zeros(len(references), dtype=torch.int64)
    for at in range(25):
        actions = random.integers(6, size=len(references))  # two of them do nothing here
        state, reward, over = ours.advance(state, torch.from_numpy(actions), counters)
        boards, rewards, ends = ours.draw(state).numpy(), reward.tolist(), over.tolist()
        intervals = state["interval"].tolist()
        for number, game in enumerate(references):
            if game.terminal:
                continue
            game.ramping, where = ramping, f"situation {number}, step {at}"
            low, heading, interval = game.alien_map[9].any(), game.alien_dir, intervals[number]
            interval_before = game.enemy_move_interval
            reward_there, over_there = game.act(actions[number])
            assert (rewards[number], ends[number]) == (reward_there, over_there), where
            assert np.array_equal(boards[number], game.state()), where
            assert interval == game.enemy_move_interval, where
            aliens = game.alien_map
            cleared = reward_there > 0 and aliens.sum() == aliens[:4, 2:8].sum() == 24
            reached["landed"] += bool(low and game.alien_dir != heading)
            reached["cleared"] += bool(cleared)
            reached["cleared at the highest pace"] += bool(cleared and interval_before == 6)
            reached["faster"] += interval < interval_before
            reached["several shot"] += bool(reward_there > 1)
    for rule in ("landed", "cleared", "cleared at the highest pace", "several shot"):
        assert reached[rule] >= 5, rule
    assert (reached["faster"] >= 5) == ramping
