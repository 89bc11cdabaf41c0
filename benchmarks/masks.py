"""Action masks: no illegal action in many steps on every engine, and what masks gain on a maze.

    python benchmarks/masks.py --count                     a million steps on each local engine
    python benchmarks/masks.py --count --engines actors parameter-server --steps 20000
    python benchmarks/masks.py --learn --seeds 5           a maze with and without masks

An illegal action gives the reward NaN, which ends a run with an error. ``--learn`` prints the env
steps until the greedy policy takes a shortest path: without masks, moves into a wall do nothing.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import qfleet
from qfleet.envs import grid
from qfleet.envs.device.maze import Maze
from qfleet.envs.device.protocol import Outcome, State
from qfleet.telemetry.aggregate import iqm

GRID = """\
S..#......#.
.#.#.####.#.
.#...#....#.
.#####.##.#.
.......#..#.
.#####.#.##.
.#...#.#....
.#.#.#.####.
.#.#.#......
...#...####G
"""
PATH = grid.Maze.from_text(GRID).shortest_path() or []
BEST = grid.GOAL_REWARD + (len(PATH) - 2) * grid.STEP_REWARD


class OpenMaze(Maze):
    """The maze without masks: a move into a wall does nothing."""

    def __init__(self) -> None:
        super().__init__(GRID)
        self.max_episode_steps = 300


class MaskedMaze(OpenMaze):
    """The maze with walls and borders masked; an illegal move is answered with NaN."""

    def action_masks(self, state: State) -> Tensor:
        cell, counters = state["cell"], torch.zeros_like(state["cell"])
        moves = [
            super(OpenMaze, self).advance(state, torch.full_like(cell, action), counters)
            for action in range(len(grid.ACTIONS))
        ]
        return torch.stack([move.state["cell"] != cell for move in moves], dim=1)

    def advance(self, state: State, action: Tensor, counters: Tensor) -> Outcome:
        outcome = super().advance(state, action, counters)
        legal = self.action_masks(state).gather(1, action.unsqueeze(1)).squeeze(1)
        return outcome._replace(reward=torch.where(legal, outcome.reward, torch.nan))


COMMON: dict[str, Any] = {
    "preset": "none", "algo": "double-dqn", "net_arch": (), "learning_rate": 0.03, "envs": 8,
    "gamma": 0.98, "learning_starts": 200, "target_update_interval": 200, "batch_size": 64,
    "n_eval_episodes": 1, "train_freq": 8, "buffer_size": 50_000, "exploration_fraction": 0.5,
}  # fmt: skip


def count(engine: str, steps: int, folder: Path) -> None:
    start_s = time.monotonic()
    more = {"workers": 2, "envs": 4} if engine in ("actors", "parameter-server") else {}
    trained = qfleet.train(
        "masks:MaskedMaze", engine=engine, steps=steps, eval_freq=0, run_dir=folder / engine,
        **{**COMMON, "train_freq": 64, **more},
    )  # fmt: skip
    faults = sum(trained.result.faults.values())
    print(
        f"{engine:<17} {trained.result.env_steps} steps with learning, {faults} faults, return "
        f"{trained.result.eval_return_mean} (best {BEST}), {time.monotonic() - start_s:.0f} s",
        flush=True,
    )


def steps_until_solved(env: str, seed: int, folder: Path) -> int:
    torch.set_num_threads(1)
    trained = qfleet.train(
        f"masks:{env}", engine="serial", seed=seed, steps=60_000, eval_freq=500,
        target_return=BEST, run_dir=folder / f"{env}-{seed}", **COMMON,
    )  # fmt: skip
    return trained.result.env_steps


def learn(seeds: int, jobs: int, folder: Path) -> None:
    found = {}
    with ProcessPoolExecutor(jobs) as pool:
        for env in ("OpenMaze", "MaskedMaze"):
            runs = [pool.submit(steps_until_solved, env, seed, folder) for seed in range(seeds)]
            found[env] = sorted(run.result() for run in runs)
            print(f"{env:<11} env steps until solved: IQM {iqm(found[env]):.0f}  {found[env]}")
    print(f"without masks / with masks: {iqm(found['OpenMaze']) / iqm(found['MaskedMaze']):.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", action="store_true")
    parser.add_argument("--learn", action="store_true")
    engines = ["serial", "pipeline", "device"]
    parser.add_argument("--engines", nargs="+", default=engines)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for engine in options.engines if options.count else ():
            count(engine, options.steps, Path(folder))
        if options.learn:
            learn(options.seeds, options.jobs, Path(folder))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
