"""MinAtar Breakout: a ball, a paddle in the lowest row, three rows of bricks that are refilled.

The ball's direction is two signs. A ball that has just hit a brick passes through the next brick
that it meets.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qfleet.core.counter_rng import draw_below
from qfleet.envs.device.minatar.game import LEFT, NOTHING, RIGHT, SIDE, cells
from qfleet.envs.device.protocol import Outcome, State

SIDE_LANE = 1
LAST = SIDE - 1
BRICK_ROWS = (1, 2, 3)


class Breakout:
    name = "Breakout"
    channels = 4
    useful: tuple[int, ...] = (NOTHING, LEFT, RIGHT)

    def begin(self, counters: Tensor) -> State:
        from_right = draw_below(counters, SIDE_LANE, 2)
        column, row = LAST * from_right, torch.full_like(counters, 3)
        return {
            "paddle": torch.full_like(counters, 4),
            "row": row,
            "column": column,
            "right": 1 - 2 * from_right,
            "down": torch.ones_like(counters),
            "last_row": row,
            "last_column": column,
            "striking": torch.zeros_like(counters, dtype=torch.bool),
            "bricks": _wall(counters),
        }

    def advance(self, state: State, action: Tensor, counters: Tensor) -> Outcome:
        paddle = state["paddle"] - (action == LEFT).long() + (action == RIGHT).long()
        paddle = paddle.clamp(0, LAST)
        last_row, last_column = state["row"], state["column"]
        right, down = state["right"], state["down"]
        row, column = last_row + down, last_column + right
        aside = (column < 0) | (column > LAST)
        right = torch.where(aside, -right, right)
        column = column.clamp(0, LAST)

        above = row < 0
        row = row.clamp(min=0)
        bricks = state["bricks"]
        meets = ~above & (bricks & cells(row, column)).flatten(1).any(1)
        strikes = meets & ~state["striking"]
        bricks = bricks & ~(cells(row, column) & strikes.view(-1, 1, 1))

        low = ~above & ~meets & (row == LAST)
        cleared = low & ~bricks.flatten(1).any(1)
        bricks = bricks | (_wall(counters) & cleared.view(-1, 1, 1))
        caught = low & (last_column == paddle)
        edge = low & ~caught & (column == paddle)
        lost = low & ~caught & ~edge

        down = torch.where(above | strikes | caught | edge, -down, down)
        right = torch.where(edge, -right, right)
        row = torch.where(strikes | caught | edge, last_row, row)
        after = {
            "paddle": paddle,
            "row": row,
            "column": column,
            "right": right,
            "down": down,
            "last_row": last_row,
            "last_column": last_column,
            "striking": meets,
            "bricks": bricks,
        }
        return Outcome(after, strikes.float(), lost)

    def draw(self, state: State) -> Tensor:
        paddle = cells(torch.full_like(state["paddle"], LAST), state["paddle"])
        ball = cells(state["row"], state["column"])
        trail = cells(state["last_row"], state["last_column"])
        return torch.stack((paddle, ball, trail, state["bricks"]), dim=3)


def _wall(counters: Tensor) -> Tensor:
    line = torch.arange(SIDE, device=counters.device)
    rows = (line >= BRICK_ROWS[0]) & (line <= BRICK_ROWS[-1])
    return rows.view(1, -1, 1).expand(len(counters), SIDE, SIDE)
