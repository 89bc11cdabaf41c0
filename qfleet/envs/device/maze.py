"""The maze of ``qfleet lab maze`` as tensors: same grid, moves, rewards and time limit."""

from __future__ import annotations

import torch
from torch import Tensor

from qfleet.core.types import EnvSpec
from qfleet.envs import grid as grids
from qfleet.envs.device.protocol import Outcome, State, TensorEnv

STEPS_PER_CELL = 50
"""Episodes are truncated after this many steps per cell of the grid, as in the lab."""
_BITS = 63
"""Cells per word of walls: the bits of an int64 without its sign."""


class Maze(TensorEnv):
    """A grid world from text (S start, G goal, # wall, . or space open).

    The observation is the cell's number. Walls are stored as bits of Python ints: they reach a GPU
    as kernel arguments, so no table has to be copied there.
    """

    def __init__(self, grid: str = grids.MAZE) -> None:
        maze = grids.Maze.from_text(grid)
        cells = maze.num_states
        self._height, self._width = maze.height, maze.width
        self._start, self._goal = maze.start, maze.goal
        self._walls = [
            sum(
                1 << bit
                for bit, cell in enumerate(range(first, min(first + _BITS, cells)))
                if maze.is_wall(cell)
            )
            for first in range(0, cells, _BITS)
        ]
        self.max_episode_steps = STEPS_PER_CELL * cells
        self.spec = EnvSpec("Maze", (), "int64", len(grids.ACTIONS), num_obs_values=cells)

    def begin(self, counters: Tensor) -> State:
        return {"cell": torch.full_like(counters, self._start)}

    def advance(self, state: State, action: Tensor, counters: Tensor) -> Outcome:
        del counters  # the dynamics are deterministic
        cell = state["cell"]
        row, column = cell // self._width, cell % self._width
        for number, (down, right) in enumerate(grids.MOVES):
            chosen = action == number
            row = torch.where(chosen, row + down, row)
            column = torch.where(chosen, column + right, column)
        inside = (row >= 0) & (row < self._height) & (column >= 0) & (column < self._width)
        reached = torch.where(inside, row * self._width + column, cell)
        reached = torch.where(self._is_wall(reached), cell, reached)
        arrived = reached == self._goal
        reward = torch.where(arrived, grids.GOAL_REWARD, grids.STEP_REWARD)
        return Outcome({"cell": reached}, reward, arrived)

    def observe(self, state: State) -> Tensor:
        return state["cell"]

    def _is_wall(self, cell: Tensor) -> Tensor:
        word = torch.zeros_like(cell)
        for number, bits in enumerate(self._walls):
            word = torch.where(cell // _BITS == number, bits, word)
        return (word >> (cell % _BITS)) & 1 == 1
