"""MinAtar Space Invaders: a cannon in the lowest row, a block of aliens that moves down to it.

Aliens, the cannon's shots and the aliens' bombs are separate boards. The game is deterministic:
the alien nearest to the cannon drops the bombs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qfleet.envs.device.minatar.game import FIRE, LEFT, NOTHING, RIGHT, SIDE, cells
from qfleet.envs.device.protocol import Outcome, State

LAST = SIDE - 1
WAVE_ROWS, WAVE_COLUMNS = (0, 3), (2, 7)
"""First and last row, and first and last column, of a new wave."""
SHOT_TIMER, BOMB_TIMER = 5, 10
SLOWEST, FASTEST = 12, 6
"""Steps between two moves of a full wave: of the first wave, and the minimum of later waves."""


class SpaceInvaders:
    name = "SpaceInvaders"
    channels = 6
    useful: tuple[int, ...] = (NOTHING, LEFT, RIGHT, FIRE)

    def __init__(self, ramping: bool = True) -> None:
        self.ramping = ramping

    def begin(self, counters: Tensor) -> State:
        aliens = _wave(counters)
        return {
            "cannon": torch.full_like(counters, 5),
            "aliens": aliens,
            "rightwards": torch.zeros_like(counters, dtype=torch.bool),
            "shots": torch.zeros_like(aliens),
            "bombs": torch.zeros_like(aliens),
            "interval": torch.full_like(counters, SLOWEST),
            "move_timer": torch.full_like(counters, SLOWEST),
            "shot_timer": torch.zeros_like(counters),
            "bomb_timer": torch.full_like(counters, BOMB_TIMER),
        }

    def advance(self, state: State, action: Tensor, counters: Tensor) -> Outcome:
        cannon = state["cannon"] - (action == LEFT).long() + (action == RIGHT).long()
        cannon = cannon.clamp(0, LAST)
        target = cells(torch.full_like(cannon, LAST), cannon)
        fires = (action == FIRE) & (state["shot_timer"] == 0)
        line = torch.arange(SIDE, device=cannon.device)
        last_row = line.view(-1, 1) == LAST
        # roll() wraps around: objects that leave the board must not reappear at the other end.
        shots = (state["shots"] | (target & _per_board(fires))).roll(-1, 1) & ~last_row
        bombs = state["bombs"].roll(1, 1) & (line > 0).view(-1, 1)

        aliens, rightwards = state["aliens"], state["rightwards"]
        killed = ((bombs | aliens) & target).flatten(1).any(1)
        moves = state["move_timer"] == 0
        pace = torch.minimum(aliens.flatten(1).sum(1), state["interval"])
        move_timer = torch.where(moves, pace, state["move_timer"])
        ahead = line == torch.where(rightwards, LAST, 0).unsqueeze(1)
        turns = moves & (aliens.any(1) & ahead).any(1)
        landed = turns & (aliens & last_row).flatten(1).any(1)
        # No alien leaves sideways, because the wave turns first. Landed aliens do reappear at the
        # top: the game is over, but the original's last board shows this too.
        aside = torch.where(_per_board(rightwards), aliens.roll(1, 2), aliens.roll(-1, 2))
        moved = torch.where(_per_board(turns), aliens.roll(1, 1), aside)
        aliens = torch.where(_per_board(moves), moved, aliens)
        rightwards = rightwards ^ turns
        caught = (aliens & target).flatten(1).any(1)

        bombed = state["bomb_timer"] == 0
        bombs = bombs | (_nearest(aliens, cannon) & _per_board(bombed))
        bomb_timer = torch.where(bombed, BOMB_TIMER, state["bomb_timer"])
        struck = aliens & shots
        aliens, shots = aliens & ~struck, shots & ~struck

        cleared = ~aliens.flatten(1).any(1)
        aliens = aliens | (_wave(counters) & _per_board(cleared))
        interval = state["interval"]
        if self.ramping:
            interval = torch.where(cleared, (interval - 1).clamp(min=FASTEST), interval)
        shot_timer = torch.where(fires, SHOT_TIMER, state["shot_timer"])
        after = {
            "cannon": cannon,
            "aliens": aliens,
            "rightwards": rightwards,
            "shots": shots,
            "bombs": bombs,
            "interval": interval,
            "move_timer": move_timer - 1,
            "shot_timer": (shot_timer - 1).clamp(min=0),
            "bomb_timer": bomb_timer - 1,
        }
        return Outcome(after, struck.flatten(1).sum(1).float(), killed | landed | caught)

    def draw(self, state: State) -> Tensor:
        cannon = cells(torch.full_like(state["cannon"], LAST), state["cannon"])
        aliens, rightwards = state["aliens"], _per_board(state["rightwards"])
        boards = (cannon, aliens, aliens & ~rightwards, aliens & rightwards)
        return torch.stack((*boards, state["shots"], state["bombs"]), dim=3)


def _per_board(values: Tensor) -> Tensor:
    return values.view(-1, 1, 1)


def _nearest(aliens: Tensor, cannon: Tensor) -> Tensor:
    """Return bool ``[N, 10, 10]``: the lowest alien of the nearest column, left before right."""
    line = torch.arange(SIDE, device=cannon.device)
    apart = line - cannon.unsqueeze(1)
    rank = (2 * apart.abs() + (apart > 0).long()).unsqueeze(1) * SIDE + (LAST - line).view(-1, 1)
    rank = torch.where(aliens, rank, 2 * SIDE * SIDE)
    return aliens & (rank == rank.amin((1, 2), keepdim=True))


def _wave(counters: Tensor) -> Tensor:
    line = torch.arange(SIDE, device=counters.device)
    rows = (line >= WAVE_ROWS[0]) & (line <= WAVE_ROWS[1])
    columns = (line >= WAVE_COLUMNS[0]) & (line <= WAVE_COLUMNS[1])
    return (rows.view(-1, 1) & columns).expand(len(counters), SIDE, SIDE)
