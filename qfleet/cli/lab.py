"""``qfleet lab``: small experiments."""

from __future__ import annotations

import importlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from qfleet.cli.parsing import parse
from qfleet.core.errors import ConfigError, UnknownNameError

HELP = "run a small experiment: maze, mapreduce, speedup, compare"

EXPERIMENTS = {
    "maze": "Q-learning with a table in a maze: values, greedy path, learning curve",
    "mapreduce": "gradient descent on several workers: what broadcast, map and reduce cost",
    "speedup": "training with 1, 2, 4 … workers: speed-up and efficiency",
    "compare": "two configurations on the same batches: where their weights first differ",
}

_MAZE_DESCRIPTION = """Train a table of Q-values in a maze and draw the values and the greedy path.

Every step costs 1, and the step that reaches the goal earns 10. A maze is a text file with lines of
equal length: S start, G goal, # wall, . open.

Examples:
  qfleet lab maze
  qfleet lab maze --episodes 2000 --epsilon 0.3 --seed 1
  qfleet lab maze --maze my-maze.txt --out my-maze.svg
"""


@dataclass(frozen=True)
class MazeOptions:
    """Options of the training, and the file of the plot."""

    maze: Path | None = None
    """Text file with a maze; default: the built-in maze."""
    episodes: int = 500
    """Number of training episodes."""
    alpha: float = 0.1
    """Step size of the update."""
    gamma: float = 0.9
    """Discount per step."""
    epsilon: float = 0.1
    """Probability of a random action."""
    seed: int = 0
    """Random seed."""
    out: Path = Path("runs/lab/maze.png")
    """Plot file to write (.png, .svg or .pdf)."""
    json_: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print machine-readable output only."""


def run(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print("usage: qfleet lab EXPERIMENT …   (qfleet lab EXPERIMENT --help lists options)\n")
        print("\n".join(f"  {name:<10} {what}" for name, what in EXPERIMENTS.items()))
        print("\nExamples:\n  qfleet lab maze --episodes 2000\n  qfleet lab mapreduce --compare")
        return 0
    if argv[0] not in EXPERIMENTS:
        raise UnknownNameError("experiment", argv[0], EXPERIMENTS)
    if argv[0] == "maze":
        _maze(parse(MazeOptions, argv[1:], "lab maze", _MAZE_DESCRIPTION))
    else:
        importlib.import_module(f"qfleet.cli.lab_{argv[0]}").run(argv[1:])
    return 0


def _maze(options: MazeOptions) -> None:
    from qfleet.envs.grid import MAZE, Maze
    from qfleet.lab.maze import draw_maze, learn_maze, path_art

    maze = Maze.from_text(MAZE if options.maze is None else _read(options.maze))
    result = learn_maze(
        maze, options.episodes, options.alpha, options.gamma, options.epsilon, options.seed
    )
    picture = draw_maze(result, options.out)
    if options.json_:
        report = {
            "path": [list(divmod(state, maze.width)) for state in result.path],
            "reached_goal": result.reached_goal,
            "steps": result.num_steps,
            "value": result.path_value,
            "start_q": float(result.q[maze.start].max()),
            "returns": result.returns,
            "picture": str(picture),
        }
        print(json.dumps(report, allow_nan=False))
        return
    print(path_art(result))
    print()
    if result.reached_goal:
        print(f"greedy path   {result.num_steps} steps")
    else:
        print(f"greedy path   misses the goal after {result.num_steps} steps; try more --episodes")
    print(f"its value     {result.path_value:.3f} (discounted by {options.gamma:g} per step)")
    print(f"learnt value  {result.q[maze.start].max():.3f}")
    print(f"picture       {picture}")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read maze '{path}': {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"maze '{path}' is not text; write it with S, G, # and .") from None
