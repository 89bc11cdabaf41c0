"""Tabular Q-learning in a maze, with ε-greedy exploration.

A maze is given as text (S start, G goal, # wall, . or space open). The result holds the learnt
Q-table, the return of every episode and the greedy path, and can be drawn. Every step costs 1, and
the step that reaches the goal earns 10.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qfleet.algorithms.tabular import QTable
from qfleet.core.errors import require
from qfleet.envs.grid import ACTIONS, GOAL_REWARD, MOVES, STEP_REWARD, Maze
from qfleet.telemetry.figures import saved_figure

_MAX_STEPS_PER_CELL = 50
"""Truncates an episode that does not reach the goal; a random walk covers a maze in far fewer
steps."""


@dataclass(frozen=True)
class MazeResult:
    """The Q-table, returns and greedy path of a training run."""

    maze: Maze
    q: NDArray[np.float64]
    """``[states, actions]``; 0 for an action that was never tried."""
    returns: list[float]
    """Undiscounted sum of rewards of every episode."""
    path: list[int]
    """States of the greedy path from the start, up to the goal or to the first repeated state."""
    gamma: float

    @property
    def reached_goal(self) -> bool:
        return self.path[-1] == self.maze.goal

    @property
    def num_steps(self) -> int:
        return len(self.path) - 1

    @property
    def path_value(self) -> float:
        """Discounted sum of rewards along the greedy path."""
        rewards = [STEP_REWARD] * self.num_steps
        if self.reached_goal:
            rewards[-1] = GOAL_REWARD
        return float(sum(self.gamma**k * reward for k, reward in enumerate(rewards)))


def learn_maze(
    maze: Maze, episodes: int, alpha: float, gamma: float, epsilon: float, seed: int
) -> MazeResult:
    """Train a Q-table with ε-greedy actions, updating it after every step."""
    require(episodes >= 1, "episodes", episodes, "at least 1")
    require(0 < alpha <= 1, "alpha", alpha, "in (0, 1]")
    require(0 <= gamma <= 1, "gamma", gamma, "in [0, 1]")
    require(0 <= epsilon <= 1, "epsilon", epsilon, "in [0, 1]")
    require(seed >= 0, "seed", seed, "at least 0")
    rng = np.random.default_rng(seed)
    table = QTable(maze.num_states, len(ACTIONS), alpha, gamma)
    returns = [_walk(maze, table, epsilon, rng) for _ in range(episodes)]
    return MazeResult(maze, table.values, returns, _greedy_path(maze, table), gamma)


def _walk(maze: Maze, table: QTable, epsilon: float, rng: np.random.Generator) -> float:
    state, total = maze.reset(), 0.0
    for _ in range(_MAX_STEPS_PER_CELL * maze.num_states):
        explore = rng.random() < epsilon
        action = int(rng.integers(len(ACTIONS))) if explore else table.greedy(state)
        reached, reward, terminated = maze.step(action)
        table.update(state, action, reward, reached, terminated)
        state, total = reached, total + reward
        if terminated:
            break
    return total


def _greedy_path(maze: Maze, table: QTable) -> list[int]:
    path = [maze.start]
    while path[-1] != maze.goal:
        reached = maze.neighbour(path[-1], table.greedy(path[-1]))
        if reached in path:
            break
        path.append(reached)
    return path


def path_art(result: MazeResult) -> str:
    """Return the maze as text, with the greedy path drawn over it in ^, v, < and >."""
    maze = result.maze
    cells = [list(row.replace(" ", ".")) for row in maze.rows]
    for state, reached in zip(result.path, result.path[1:], strict=False):
        action = next(a for a in range(len(ACTIONS)) if maze.neighbour(state, a) == reached)
        if state != maze.start:
            cells[state // maze.width][state % maze.width] = "^v<>"[action]
    return "\n".join(" ".join(row) for row in cells)


def draw_maze(result: MazeResult, path: Path) -> Path:
    """Draw Q(s, a), the greedy actions and the greedy path beside the learning curve."""
    maze = result.maze
    maze_width = min(10.0, max(4.0, 5.4 * maze.width / maze.height))
    with saved_figure(path, maze_width + 5.4, 5.4) as figure:
        left, right = figure.subplots(1, 2, width_ratios=[maze_width, 4.6])
        _draw_values(left, result)
        _draw_returns(right, result)
    return path


_WALL = "#2b303b"
_UNTRIED = "#dcdfe4"
_PATH = "#e8590c"
# Corners of a cell around its centre, y downwards, in the order of ACTIONS.
_EDGES = (
    ((-0.5, -0.5), (0.5, -0.5)),
    ((-0.5, 0.5), (0.5, 0.5)),
    ((-0.5, -0.5), (-0.5, 0.5)),
    ((0.5, -0.5), (0.5, 0.5)),
)


def _draw_values(axes: Any, result: MazeResult) -> None:
    import matplotlib.patheffects as effects
    from matplotlib import colormaps
    from matplotlib.collections import PolyCollection
    from matplotlib.patches import Rectangle

    maze, q = result.maze, result.q
    points_per_cell = 72 * 5.4 / max(maze.height, maze.width / 1.8)
    triangles, values = [], []
    for state in range(maze.num_states):
        row, column = divmod(state, maze.width)
        if maze.is_wall(state) or state == maze.goal:
            continue
        for action, ((x0, y0), (x1, y1)) in enumerate(_EDGES):
            triangles.append([(column, row), (column + x0, row + y0), (column + x1, row + y1)])
            # Rewards are never 0, so a value of 0 was never learnt.
            values.append(q[state, action] if q[state, action] != 0 else np.nan)
    shading = PolyCollection(
        triangles,
        array=np.ma.masked_invalid(values),
        cmap=colormaps["viridis"].with_extremes(bad=_UNTRIED),
        edgecolors="white",
        linewidths=points_per_cell * 0.012,
    )
    axes.add_collection(shading)
    axes.set_facecolor(_WALL)

    tried = [
        s for s in range(maze.num_states) if s != maze.goal and not maze.is_wall(s) and q[s].any()
    ]
    rows, columns = np.divmod(np.array(tried), maze.width)
    moves = np.array([MOVES[int(q[s].argmax())] for s in tried])
    path_rows, path_columns = np.divmod(np.array(result.path), maze.width)
    casing = effects.withStroke(linewidth=points_per_cell * 0.14, foreground="white")
    axes.plot(
        path_columns,
        path_rows,
        color=_PATH,
        linewidth=points_per_cell * 0.09,
        solid_capstyle="round",
        solid_joinstyle="round",
        path_effects=[casing, effects.Normal()],
        zorder=3,
    )
    axes.quiver(
        columns,
        rows,
        moves[:, 1],
        moves[:, 0],
        angles="xy",
        scale_units="xy",
        scale=2.6,
        pivot="middle",
        units="xy",
        width=0.075,
        headwidth=3.6,
        headlength=3.2,
        headaxislength=3.0,
        color="white",
        edgecolor=_WALL,
        linewidth=points_per_cell * 0.014,
        zorder=4,
    )
    for state, letter in ((maze.start, "S"), (maze.goal, "G")):
        row, column = divmod(state, maze.width)
        is_goal = letter == "G"
        axes.text(
            column if is_goal else column - 0.34,
            row if is_goal else row - 0.32,
            letter,
            color="white",
            weight="bold",
            size=points_per_cell * (0.4 if is_goal else 0.22),
            ha="center",
            va="center_baseline",
            zorder=5,
            path_effects=[] if is_goal else [effects.withStroke(linewidth=2, foreground=_WALL)],
        )
        if is_goal:
            corner = (column - 0.5, row - 0.5)
            square = Rectangle(corner, 1, 1, facecolor=_PATH, edgecolor="white", zorder=3.5)
            axes.add_patch(square)
    axes.set(xlim=(-0.5, maze.width - 0.5), ylim=(maze.height - 0.5, -0.5), aspect="equal")
    axes.set(xticks=[], yticks=[])
    axes.grid(False)
    for spine in axes.spines.values():
        spine.set(color=_WALL, linewidth=3, visible=True)
    what = f"{result.num_steps} steps, value {result.path_value:.2f}".replace("-", "−")
    end = "greedy path" if result.reached_goal else "greedy walk, which misses the goal"
    axes.set_title(f"Q(s, a) and the {end}: {what}", size=11.5, weight="normal")
    bar = axes.figure.colorbar(shading, ax=axes, shrink=0.82, pad=0.02, aspect=28)
    bar.outline.set_visible(False)
    bar.set_label("Q(s, a)")


def _draw_returns(axes: Any, result: MazeResult) -> None:
    returns = result.returns
    episodes = np.arange(1, len(returns) + 1)
    window = max(1, len(returns) // 25)
    axes.plot(episodes, returns, color="#9ecae1", linewidth=0.9, label="episode")
    if window > 1:
        smooth = np.convolve(returns, np.full(window, 1 / window), mode="valid")
        label = f"mean of {window}"
        axes.plot(episodes[window - 1 :], smooth, color="#0b5394", linewidth=2, label=label)
    best = GOAL_REWARD + STEP_REWARD * (len(result.maze.shortest_path() or []) - 2)
    label = f"shortest path: {best:g}".replace("-", "−")
    axes.axhline(best, color=_PATH, linewidth=1.2, linestyle="--", label=label)
    axes.legend(loc="lower right")
    # The first walks cost hundreds of steps and would flatten everything after them.
    axes.set_yscale("symlog", linthresh=10)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}".replace("-", "−"))
    axes.set_title("Learning curve", size=11.5, weight="normal")
    axes.set(xlabel="episode", ylabel="return per episode", xlim=(1, max(2, len(returns))))
