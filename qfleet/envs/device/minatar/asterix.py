"""MinAtar Asterix: enemies and gold cross the board; the player avoids enemies and takes gold.

Each of the eight rows that the player can reach holds at most one object, so each row is a slot.
With ramping, objects appear and move more often over time.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from qfleet.core.counter_rng import draw_below, draw_uniform
from qfleet.envs.device.minatar.game import DOWN, LEFT, NOTHING, RIGHT, SIDE, UP, cells
from qfleet.envs.device.protocol import Outcome, State

SIDE_LANE, GOLD_LANE, ROW_LANE = 1, 2, 3
LAST = SIDE - 1
FIRST_ROW, LAST_ROW = 1, SIDE - 2
ROWS = LAST_ROW - FIRST_ROW + 1
EMPTY, ENEMY, GOLD = range(3)
SPAWN_EVERY, MOVE_EVERY = 10, 5
"""Steps between two arrivals of objects, and between two moves, before any ramping."""
RAMP_WAIT = 100


class Asterix:
    name = "Asterix"
    channels = 4
    useful: tuple[int, ...] = (NOTHING, LEFT, UP, RIGHT, DOWN)

    def __init__(self, ramping: bool = True) -> None:
        self.ramping = ramping

    def begin(self, counters: Tensor) -> State:
        slots = torch.zeros_like(counters).view(-1, 1).expand(-1, ROWS)
        spawn_every = torch.full_like(counters, SPAWN_EVERY)
        move_every = torch.full_like(counters, MOVE_EVERY)
        return {
            "row": torch.full_like(counters, 5),
            "column": torch.full_like(counters, 5),
            "kinds": slots + EMPTY,
            "columns": slots,
            "headings": slots,
            "spawn_every": spawn_every,
            "spawn_wait": spawn_every,
            "move_every": move_every,
            "move_wait": move_every,
            "ramp_wait": torch.full_like(counters, RAMP_WAIT),
            "ramps": torch.zeros_like(counters),
        }

    def advance(self, state: State, action: Tensor, counters: Tensor) -> Outcome:
        spawns, moves = state["spawn_wait"] == 0, state["move_wait"] == 0
        kinds, columns, headings = _arrivals(state, spawns, counters)

        column = state["column"] - (action == LEFT).long() + (action == RIGHT).long()
        column = column.clamp(0, LAST)
        row = state["row"] - (action == UP).long() + (action == DOWN).long()
        row = row.clamp(FIRST_ROW, LAST_ROW)

        # Collisions are checked before and after objects move, so that an object and the player
        # cannot pass by swapping cells.
        beside = _rows(counters) == row.view(-1, 1)
        met = beside & (columns == column.view(-1, 1))
        taken, hit = met & (kinds == GOLD), met & (kinds == ENEMY)
        kinds = torch.where(taken, EMPTY, kinds)
        # The column of an empty slot is never read.
        columns = torch.where(moves.view(-1, 1), columns + headings, columns)
        kinds = torch.where((columns < 0) | (columns > LAST), EMPTY, kinds)
        met = beside & (columns == column.view(-1, 1))
        taken, hit = taken | (met & (kinds == GOLD)), hit | (met & (kinds == ENEMY))
        kinds = torch.where(taken, EMPTY, kinds)

        # The timers restart with the old interval; ramping takes effect at their next restart.
        spawn_every, move_every = state["spawn_every"], state["move_every"]
        after = {
            "row": row,
            "column": column,
            "kinds": kinds,
            "columns": columns,
            "headings": headings,
            "spawn_wait": torch.where(spawns, spawn_every, state["spawn_wait"]) - 1,
            "move_wait": torch.where(moves, move_every, state["move_wait"]) - 1,
            **self._pace(state),
        }
        # A row holds at most one object, so no step collects more than one piece of gold.
        return Outcome(after, taken.any(1).float(), hit.any(1))

    def draw(self, state: State) -> Tensor:
        kinds, columns = state["kinds"].unsqueeze(2), state["columns"].unsqueeze(2)
        line = torch.arange(SIDE, device=kinds.device)
        at = columns == line
        behind = columns - state["headings"].unsqueeze(2) == line
        things = torch.stack(
            (at & (kinds == ENEMY), behind & (kinds != EMPTY), at & (kinds == GOLD)), dim=3
        )
        # Pad the rows above and below the slots.
        things = pad(things, (0, 0, 0, 0, FIRST_ROW, LAST - LAST_ROW))
        player = cells(state["row"], state["column"])
        return torch.cat((player.unsqueeze(3), things), dim=3)

    def _pace(self, state: State) -> State:
        spawn_every, move_every = state["spawn_every"], state["move_every"]
        wait, ramps = state["ramp_wait"], state["ramps"]
        if self.ramping:
            goes_on = (spawn_every > 1) | (move_every > 1)
            due = goes_on & (wait < 0)
            # The move interval decreases only at every other ramp.
            move_every = (move_every - (due & (ramps % 2 == 1)).long()).clamp(min=1)
            spawn_every = (spawn_every - due.long()).clamp(min=1)
            wait = torch.where(due, RAMP_WAIT, wait - goes_on.long())
            ramps = ramps + due.long()
        return {
            "spawn_every": spawn_every,
            "move_every": move_every,
            "ramp_wait": wait,
            "ramps": ramps,
        }


def _arrivals(state: State, spawns: Tensor, counters: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return kinds, columns and headings, with a new object in an empty row if one is due."""
    empty = state["kinds"] == EMPTY
    place = draw_below(counters, ROW_LANE, empty.sum(1)).view(-1, 1)
    # If no row is empty, no row is chosen.
    chosen = spawns.view(-1, 1) & empty & (empty.cumsum(1) == place + 1)
    from_left = (draw_uniform(counters, SIDE_LANE) < 1 / 2).view(-1, 1)
    gold = (draw_uniform(counters, GOLD_LANE) < 1 / 3).view(-1, 1)
    return (
        torch.where(chosen, torch.where(gold, GOLD, ENEMY), state["kinds"]),
        torch.where(chosen, torch.where(from_left, 0, LAST), state["columns"]),
        torch.where(chosen, torch.where(from_left, 1, -1), state["headings"]),
    )


def _rows(counters: Tensor) -> Tensor:
    return torch.arange(FIRST_ROW, LAST_ROW + 1, device=counters.device)
