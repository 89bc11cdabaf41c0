"""A grid world as text: S start, G goal, # wall, . or space open.

The reward is −1 for every step, except +10 for the step that reaches the goal.
"""

from __future__ import annotations

from collections import deque

from qfleet.core.errors import ConfigError

MAZE = """\
S..#....
.#.#.##.
.#......
...#.#.#
.#.#.#..
.#...##G
"""

ACTIONS = ("up", "down", "left", "right")
MOVES = ((-1, 0), (1, 0), (0, -1), (0, 1))
STEP_REWARD = -1.0
GOAL_REWARD = 10.0


class Maze:
    """A grid world. States are cell numbers, row by row, walls included."""

    def __init__(self, rows: list[str]) -> None:
        self.rows = rows
        self.height, self.width = len(rows), len(rows[0])
        self.num_states = self.height * self.width
        text = "".join(rows)
        self.start, self.goal = text.index("S"), text.index("G")
        self.state = self.start

    @classmethod
    def from_text(cls, text: str) -> Maze:
        """Parse a maze; raise ConfigError if it is malformed or cannot be solved."""
        rows = [line.rstrip("\r") for line in text.strip("\r\n").split("\n")]
        for i, row in enumerate(rows, 1):
            if len(row) != len(rows[0]):
                raise ConfigError(
                    f"maze line {i} has {len(row)} cells but line 1 has {len(rows[0])}; "
                    "write '.' for open cells at a line's end"
                )
            for j, cell in enumerate(row, 1):
                if cell not in "SG#. ":
                    raise ConfigError(
                        f"maze line {i}, column {j}: {cell!r} must be S, G, #, '.' or space"
                    )
        for cell, what in (("S", "start"), ("G", "goal")):
            if (count := "".join(rows).count(cell)) != 1:
                raise ConfigError(f"maze has {count} cells '{cell}'; mark exactly one {what}")
        maze = cls(rows)
        if maze.shortest_path() is None:
            raise ConfigError("maze has no way from S to G; remove a wall")
        return maze

    def is_wall(self, state: int) -> bool:
        return self.rows[state // self.width][state % self.width] == "#"

    def neighbour(self, state: int, action: int) -> int:
        """Return the state that an action leads to: the same one at walls and borders."""
        row, column = divmod(state, self.width)
        row, column = row + MOVES[action][0], column + MOVES[action][1]
        if not (0 <= row < self.height and 0 <= column < self.width):
            return state
        reached = row * self.width + column
        return state if self.is_wall(reached) else reached

    def reset(self) -> int:
        self.state = self.start
        return self.state

    def step(self, action: int) -> tuple[int, float, bool]:
        """Return the next state, the reward and whether the episode terminated."""
        self.state = self.neighbour(self.state, action)
        terminated = self.state == self.goal
        return self.state, GOAL_REWARD if terminated else STEP_REWARD, terminated

    def shortest_path(self) -> list[int] | None:
        """Return the states of a shortest path from start to goal, by breadth-first search."""
        came_from = {self.start: self.start}
        queue = deque([self.start])
        while queue:
            state = queue.popleft()
            if state == self.goal:
                path = [state]
                while path[-1] != self.start:
                    path.append(came_from[path[-1]])
                return path[::-1]
            for action in range(len(ACTIONS)):
                reached = self.neighbour(state, action)
                if reached not in came_from:
                    came_from[reached] = state
                    queue.append(reached)
        return None
