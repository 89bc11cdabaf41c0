"""MinAtar Seaquest: a boat under water that shoots fish and submarines and brings divers up.

Enemies, divers and the boat's bullets are stored in slots, the newest in the first one: a new
object shifts the others by one slot, and empty slots between objects stay empty. An object with a
column outside the board does not exist, so the column is the mask. A submarine's shell is stored in
the slot of its submarine.

The original game processes all objects one after another, in the order of its lists. Few of these
orders affect the result, so all slots can be processed at once:

- The boat is as fast as its bullets and shoots every fifth step: bullets to the right stay right of
  it, bullets to the left stay left, and no two share a cell. So no two hit the same enemy.
- Enemies of one row move in the same direction. They started at different steps and keep their
  distance in time, so no two enter a cell in the same step: a bullet that has hit no enemy yet hits
  one at most.
- Waiting enemies can share a cell. Then a bullet hits fish before submarines, the oldest first.
- Divers are picked up newest first, which matters only when the boat has room for one more.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qfleet.core.counter_rng import draw_below, draw_uniform
from qfleet.envs.device.minatar.game import DOWN, FIRE, LEFT, NOTHING, RIGHT, SIDE, UP
from qfleet.envs.device.protocol import Outcome, State

ENEMY_SIDE_LANE, ENEMY_KIND_LANE, ENEMY_ROW_LANE, DIVER_SIDE_LANE, DIVER_ROW_LANE = range(1, 6)

LAST = SIDE - 1
SEABED = SIDE - 2
"""The lowest row that objects can be in; below it are the gauges."""
OUTSIDE = -1
CHANNELS = 10
FRONT, BACK, BULLET, TRAIL, SHELL, FISH, SUBMARINE, OXYGEN, RESCUED, DIVER = range(CHANNELS)

FULL_OXYGEN, FULL_BOAT = 200, 6
RELOAD, ENEMY_RELOAD = 5, 10
SLOWEST_SPAWN, FASTEST_SPAWN, DIVER_SPAWN = 20, 1, 30
SLOWEST_MOVE, FASTEST_MOVE, DIVER_MOVE = 5, 2, 5
LAST_LEVEL = SLOWEST_SPAWN - FASTEST_SPAWN

ENEMIES = SIDE * (FASTEST_MOVE + 1)
"""Slots for enemies. At the last levels one may appear every step and stays three steps in each of
ten columns. At earlier levels enemies stay longer but appear at most every 15 steps, which needs
fewer slots. A shell is faster than its submarine, so it leaves the board earlier than the submarine
would."""
DIVERS = 2
"""Slots for divers: one appears every 30 steps and stays six steps in each of ten columns."""
BULLETS = 2
"""Slots for bullets: one every fifth step, which leaves the board after at most nine steps."""


class Seaquest:
    name = "Seaquest"
    channels = CHANNELS
    useful: tuple[int, ...] = (NOTHING, LEFT, UP, RIGHT, DOWN, FIRE)

    def __init__(self, ramping: bool = True) -> None:
        self.ramping = ramping

    def begin(self, counters: Tensor) -> State:
        zero, num_envs = torch.zeros_like(counters), len(counters)
        return {
            "row": zero,
            "column": torch.full_like(counters, 5),
            "right": torch.full_like(counters, -1),
            "reload": zero,
            "oxygen": torch.full_like(counters, FULL_OXYGEN),
            "held": zero,
            "level": zero,
            "enemy_due": torch.full_like(counters, SLOWEST_SPAWN),
            "diver_due": torch.full_like(counters, DIVER_SPAWN),
            # row, column, direction, steps to the next move, whether a submarine, steps to the
            # next shot, column of the shell
            "enemies": counters.new_full((num_envs, 7, ENEMIES), OUTSIDE),
            # row, column, direction, steps to the next move
            "divers": counters.new_full((num_envs, 4, DIVERS), OUTSIDE),
            # row, column, direction
            "bullets": counters.new_full((num_envs, 3, BULLETS), OUTSIDE),
        }

    def advance(self, state: State, action: Tensor, counters: Tensor) -> Outcome:
        level, held, oxygen = state["level"], state["held"], state["oxygen"]
        move_every = (SLOWEST_MOVE - level // 2).clamp(min=FASTEST_MOVE)
        enemies, enemy_due = _with_enemy(state, move_every, counters)
        divers, diver_due = _with_diver(state, counters)

        fires = (action == FIRE) & (state["reload"] == 0)
        shot = torch.stack((state["row"], state["column"], state["right"]), dim=1)
        bullets = _pushed(state["bullets"], shot, fires)
        reload = torch.where(fires, RELOAD, state["reload"])
        left, right = action == LEFT, action == RIGHT
        column = (state["column"] + right.long() - left.long()).clamp(0, LAST)
        row = (state["row"] + (action == DOWN).long() - (action == UP).long()).clamp(0, SEABED)
        facing = torch.where(left, -1, torch.where(right, 1, state["right"]))
        boat_row, boat_column = row.unsqueeze(1), column.unsqueeze(1)

        bullets = _flown(bullets)
        at_row, at_column, to_right, wait, armed, shot_wait, shell = enemies.unbind(1)
        meets = _meets(bullets, at_row, at_column)
        age = torch.arange(ENEMIES, device=action.device) + ENEMIES * (1 - armed)
        rank = torch.where(meets, age.unsqueeze(1), -1)
        struck = (meets & (rank == rank.amax(2, keepdim=True))).any(1)
        at_column = torch.where(struck, OUTSIDE, at_column)
        bullets = _without(bullets, meets.any(2))

        divers, rescued = _after_divers(divers, boat_row, boat_column, held)
        held = held + rescued

        there = _inside(at_column)
        in_row = at_row == boat_row
        rammed = there & in_row & (at_column == boat_column)
        moves = there & (wait == 0)
        at_column = at_column + to_right * moves.long()
        rammed = rammed | (moves & in_row & (at_column == boat_column))
        wait = torch.where(wait == 0, move_every.unsqueeze(1), wait - 1)

        # A submarine that leaves the board or is hit in this move still fires.
        shoots = there & (armed == 1) & (shot_wait == 0)
        shot_wait = torch.where(shot_wait == 0, ENEMY_RELOAD, shot_wait - 1)
        shell = torch.where(shoots, at_column, shell)
        rammed = rammed | (in_row & (shell == boat_column))
        shell = shell + to_right * _inside(shell).long()
        rammed = rammed | (in_row & (shell == boat_column))

        met = _meets(bullets, at_row, at_column)
        at_column = torch.where(met.any(1), OUTSIDE, at_column)
        bullets = _without(bullets, met.any(2))
        enemies = torch.stack((at_row, at_column, to_right, wait, armed, shot_wait, shell), dim=1)

        under = row > 0
        arrives = ~under & (state["row"] > 0)
        # Only exactly 0 divers is too few: after surfacing full, the boat dives with −1 divers.
        surfaces, full = arrives & (held != 0), arrives & (held == FULL_BOAT)
        over = rammed.any(1) | (oxygen <= 0) | (arrives & ~surfaces)
        reward = struck.sum(1) + met.sum((1, 2)) + torch.where(full, _bar(oxygen), 0)
        oxygen = torch.where(surfaces, FULL_OXYGEN, oxygen - under.long())
        if self.ramping:
            level = (level + surfaces.long()).clamp(max=LAST_LEVEL)
        after = {
            "row": row,
            "column": column,
            "right": facing,
            "reload": (reload - 1).clamp(min=0),
            "oxygen": oxygen,
            "held": torch.where(full, 0, held) - surfaces.long(),
            "level": level,
            "enemy_due": (enemy_due - 1).clamp(min=0),
            "diver_due": (diver_due - 1).clamp(min=0),
            "enemies": enemies,
            "divers": divers,
            "bullets": bullets,
        }
        return Outcome(after, reward.float(), over)

    def draw(self, state: State) -> Tensor:
        row, column = state["row"].unsqueeze(1), state["column"].unsqueeze(1)
        right, held = state["right"].unsqueeze(1), state["held"].unsqueeze(1)
        front = (row * SIDE + column) * CHANNELS + FRONT

        def marks(row: Tensor | int, column: Tensor, channel: Tensor | int, seen: Tensor) -> Tensor:
            # Objects that are not visible mark the boat's cell, which is marked anyway.
            return torch.where(seen, (row * SIDE + column) * CHANNELS + channel, front)

        rows, columns, to_right, _, armed, _, shells = state["enemies"].unbind(1)
        diver_rows, diver_columns, diver_right, _ = state["divers"].unbind(1)
        bullet_rows, bullet_columns, _ = state["bullets"].unbind(1)
        there, divers_there = _inside(columns), _inside(diver_columns)
        wakes, diver_wakes = columns - to_right, diver_columns - diver_right
        line = torch.arange(SIDE, device=row.device)
        marked = (
            front,
            (row * SIDE + column - right) * CHANNELS + BACK,
            marks(bullet_rows, bullet_columns, BULLET, _inside(bullet_columns)),
            marks(rows, wakes, TRAIL, there & _inside(wakes)),
            marks(diver_rows, diver_wakes, TRAIL, divers_there & _inside(diver_wakes)),
            marks(rows, shells, SHELL, _inside(shells)),
            marks(rows, columns, FISH + (SUBMARINE - FISH) * armed, there),
            marks(LAST, line, OXYGEN, line < _bar(state["oxygen"]).unsqueeze(1)),
            marks(LAST, line, RESCUED, (line >= LAST - held) & (line < LAST)),
            marks(diver_rows, diver_columns, DIVER, divers_there),
        )
        blank = torch.zeros((len(row), SIDE * SIDE * CHANNELS), dtype=torch.bool, device=row.device)
        board = blank.scatter(1, torch.cat(marked, dim=1), True)
        return board.view(-1, SIDE, SIDE, CHANNELS)


def _with_enemy(state: State, move_every: Tensor, counters: Tensor) -> tuple[Tensor, Tensor]:
    """Return the enemies, with a new one if due, and the steps until the next."""
    enemies, due = state["enemies"], state["enemy_due"] == 0
    row = 1 + draw_below(counters, ENEMY_ROW_LANE, SEABED)
    from_left = draw_uniform(counters, ENEMY_SIDE_LANE) < 1 / 2
    right = torch.where(from_left, 1, -1)
    armed = (draw_uniform(counters, ENEMY_KIND_LANE) < 1 / 3).long()
    at_row, at_column, to_right = enemies[:, 0], enemies[:, 1], enemies[:, 2]
    opposed = (at_row == row.unsqueeze(1)) & (to_right != right.unsqueeze(1)) & _inside(at_column)
    column = torch.where(from_left, 0, LAST)
    reload, no_shell = torch.full_like(row, ENEMY_RELOAD), torch.full_like(row, OUTSIDE)
    fresh = torch.stack((row, column, right, move_every, armed, reload, no_shell), dim=1)
    spawn_every = SLOWEST_SPAWN - state["level"]
    return (
        _pushed(enemies, fresh, due & ~opposed.any(1)),
        torch.where(due, spawn_every, state["enemy_due"]),
    )


def _with_diver(state: State, counters: Tensor) -> tuple[Tensor, Tensor]:
    """Return the divers, with a new one if due, and the steps until the next."""
    due = state["diver_due"] == 0
    row = 1 + draw_below(counters, DIVER_ROW_LANE, SEABED)
    from_left = draw_uniform(counters, DIVER_SIDE_LANE) < 1 / 2
    column, right = torch.where(from_left, 0, LAST), torch.where(from_left, 1, -1)
    fresh = torch.stack((row, column, right, torch.full_like(row, DIVER_MOVE)), dim=1)
    return (_pushed(state["divers"], fresh, due), torch.where(due, DIVER_SPAWN, state["diver_due"]))


def _after_divers(
    divers: Tensor, boat_row: Tensor, boat_column: Tensor, held: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the divers after their move, and the number picked up before or after the move."""
    row, column, right, wait = divers.unbind(1)
    moved = column + right * ((wait == 0) & _inside(column)).long()
    reached = (row == boat_row) & ((column == boat_column) | (moved == boat_column))
    # The newest divers are picked up first, while there is room.
    aboard = reached & (held.unsqueeze(1) + reached.cumsum(1) <= FULL_BOAT)
    moved = torch.where(aboard, OUTSIDE, moved)
    wait = torch.where(wait == 0, DIVER_MOVE, wait - 1)
    return torch.stack((row, moved, right, wait), dim=1), aboard.sum(1)


def _pushed(slots: Tensor, fresh: Tensor, comes: Tensor) -> Tensor:
    """Insert ``fresh`` before the slots ``[N, fields, slots]`` where ``comes`` is True."""
    pushed = torch.cat((fresh.unsqueeze(2), slots[:, :, :-1]), dim=2)
    return torch.where(comes.view(-1, 1, 1), pushed, slots)


def _flown(bullets: Tensor) -> Tensor:
    row, column, right = bullets.unbind(1)
    return torch.stack((row, column + right * _inside(column).long(), right), dim=1)


def _without(bullets: Tensor, gone: Tensor) -> Tensor:
    row, column, right = bullets.unbind(1)
    return torch.stack((row, torch.where(gone, OUTSIDE, column), right), dim=1)


def _meets(bullets: Tensor, row: Tensor, column: Tensor) -> Tensor:
    """Return bool ``[N, bullets, enemies]``: whether both are in the same cell of the board."""
    at_row, at_column = bullets[:, 0].unsqueeze(2), bullets[:, 1].unsqueeze(2)
    same = (at_row == row.unsqueeze(1)) & (at_column == column.unsqueeze(1))
    return same & _inside(at_column)


def _inside(column: Tensor) -> Tensor:
    return (column >= 0) & (column <= LAST)


def _bar(oxygen: Tensor) -> Tensor:
    """Return the number of lit cells of the oxygen gauge."""
    return oxygen.clamp(min=0) * SIDE // FULL_OXYGEN
