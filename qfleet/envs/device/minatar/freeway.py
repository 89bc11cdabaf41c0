"""MinAtar Freeway: a chicken crosses eight lanes of cars, again and again, until time is up.

Every row except the first and the last has one car, which moves one column each time its timer
expires. A chicken that is hit, or has arrived, starts from the lowest row; an arrival also gives
all cars new speeds and directions at their current positions.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from qfleet.core.counter_rng import draw_below
from qfleet.envs.device.minatar.game import DOWN, NOTHING, SIDE, UP, cells
from qfleet.envs.device.protocol import Outcome, State

SPEEDS_LANE, DIRECTIONS_LANE = 1, 2
LAST = SIDE - 1
CARS = SIDE - 2
SLOWEST = 5
"""The largest initial value of a car's timer; the smallest is 1."""
CROSSING = 4
"""The column in which the chicken walks."""
MOVE_TIMER = 3
TIME_LIMIT = 2500


class Freeway:
    name = "Freeway"
    channels = 2 + SLOWEST
    useful: tuple[int, ...] = (NOTHING, UP, DOWN)

    def begin(self, counters: Tensor) -> State:
        speeds = _speeds(counters)
        return {
            "row": torch.full_like(counters, LAST),
            "move_timer": torch.full_like(counters, MOVE_TIMER),
            "time_left": torch.full_like(counters, TIME_LIMIT),
            "columns": torch.zeros_like(speeds),
            "timers": speeds.abs(),
            "speeds": speeds,
        }

    def advance(self, state: State, action: Tensor, counters: Tensor) -> Outcome:
        ready = state["move_timer"] == 0
        up, down = ready & (action == UP), ready & (action == DOWN)
        row = (state["row"] - up.long() + down.long()).clamp(0, LAST)
        # A move against the edge also restarts the move timer.
        move_timer = torch.where(up | down, MOVE_TIMER, state["move_timer"])

        arrived = row == 0
        row = torch.where(arrived, LAST, row)
        renewed, drawn = arrived.unsqueeze(1), _speeds(counters)
        speeds = torch.where(renewed, drawn, state["speeds"])
        timers = torch.where(renewed, drawn.abs(), state["timers"])

        moves, before = timers == 0, state["columns"]
        columns = torch.where(moves, (before + speeds.sign()) % SIDE, before)
        timers = torch.where(moves, speeds.abs(), timers - 1)
        # The chicken is hit at the car's old or new position. The row that it is sent back to has
        # no car, so the order of the cars does not matter.
        on_crossing = (before == CROSSING) | (columns == CROSSING)
        lanes = torch.arange(1, CARS + 1, device=row.device)
        hit = (on_crossing & (lanes == row.unsqueeze(1))).any(1)

        time_left = state["time_left"] - 1
        after = {
            "row": torch.where(hit, LAST, row),
            "move_timer": (move_timer - 1).clamp(min=0),
            "time_left": time_left,
            "columns": columns,
            "timers": timers,
            "speeds": speeds,
        }
        return Outcome(after, arrived.float(), time_left < 0)

    def draw(self, state: State) -> Tensor:
        chicken = cells(state["row"], torch.full_like(state["row"], CROSSING))
        columns, speeds = state["columns"].unsqueeze(2), state["speeds"].unsqueeze(2)
        line = torch.arange(SIDE, device=columns.device)
        cars = columns == line
        behind = (columns - speeds.sign()) % SIDE == line
        trails = behind.unsqueeze(3) & (speeds.abs() == line[1 : SLOWEST + 1]).unsqueeze(2)
        lanes = torch.cat((cars.unsqueeze(3), trails), dim=3)
        return torch.cat((chicken.unsqueeze(3), pad(lanes, (0, 0, 0, 0, 1, 1))), dim=3)


def _speeds(counters: Tensor) -> Tensor:
    """Return int64 ``[N, 8]``: steps between two moves; positive values move right.

    All cars share two draws, and each car uses one digit of them: a draw costs much more than
    extracting a digit.
    """
    car = torch.arange(CARS, device=counters.device)
    speeds = draw_below(counters, SPEEDS_LANE, SLOWEST**CARS).unsqueeze(1)
    directions = draw_below(counters, DIRECTIONS_LANE, 2**CARS).unsqueeze(1)
    return (speeds // SLOWEST**car % SLOWEST + 1) * (2 * ((directions >> car) & 1) - 1)
