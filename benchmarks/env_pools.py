"""How fast Atari games step, and nothing else: ale-py's pool beside EnvPool's, random actions.

    python benchmarks/env_pools.py --game Pong --envs 64 128 --seconds 3
    python benchmarks/env_pools.py --game Breakout --envs 64 --threads 8 16

In: a game, numbers of envs and threads. Out: env steps per second (of four frames each), and ratios
to ale-py's single pool with as many envs and threads, because absolute rates vary with the machine
and the hour. EnvPool's rows appear where it is installed.

``one pool`` steps all envs at once. ``two groups`` halves them into two pools that take turns by
``send`` and ``recv``: while the caller looks at one half, the other steps. Each pool has all the
threads, as it does in a run. Nobody acts here, so two groups gain only what hides the caller's own
work and the wait for a pool's slowest game.

Each rate is the median of several rounds in which the rows take turns, so that a slow minute of
the machine hits all of them.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import ale_py
import numpy as np
from ale_py.vector_env import AtariVectorEnv
from numpy.typing import NDArray

from qfleet.core.errors import QfleetError
from qfleet.core.seeding import env_seeds
from qfleet.envs.envpool import task_id
from qfleet.envs.registry import ale_game

ROUNDS = 5
ACTION_ROWS = 64
"""Rows of random actions drawn ahead and used again and again: drawing them is not measured."""
WARM_UP_STEPS = 20


class Pool(Protocol):
    """What both libraries' pools can do."""

    def send(self, actions: NDArray[np.int64]) -> None: ...

    def recv(self) -> Any: ...


class Group(NamedTuple):
    """A pool that has been reset, and what its envs are made to do."""

    pool: Pool
    actions: NDArray[np.int64]

    @property
    def num_envs(self) -> int:
        return int(self.actions.shape[1])


def make_ale(game: str, num_envs: int, num_threads: int, seed: int) -> Group:
    pool: Any = AtariVectorEnv(game, num_envs, num_threads=num_threads, reward_clipping=False)
    pool.reset(seed=np.array(env_seeds(seed, num_envs)))
    return Group(pool, random_actions(int(pool.single_action_space.n), num_envs))


def make_envpool(game: str, num_envs: int, num_threads: int, seed: int) -> Group:
    pool = importlib.import_module("envpool").make_gymnasium(
        task_id(game), num_envs=num_envs, num_threads=num_threads, seed=env_seeds(seed, num_envs)
    )
    pool.reset()
    return Group(pool, random_actions(int(pool.single_action_space.n), num_envs))


def random_actions(num_actions: int, num_envs: int) -> NDArray[np.int64]:
    return np.random.default_rng(0).integers(num_actions, size=(ACTION_ROWS, num_envs))


def env_steps_per_s(groups: list[Group], seconds: float) -> float:
    """Keep every group's step in flight, and receive them in turn."""
    for group in groups:
        group.pool.send(group.actions[0])
    turns = 0
    start_s = time.perf_counter()
    while (wall_s := time.perf_counter() - start_s) < seconds:
        turns += 1
        for group in groups:
            group.pool.recv()
            group.pool.send(group.actions[turns % ACTION_ROWS])
    for group in groups:
        group.pool.recv()
    return turns * sum(group.num_envs for group in groups) / wall_s


def layouts(num_envs: int) -> dict[str, list[int]]:
    """How the envs are spread over pools, by name."""
    spread = {"one pool": [num_envs]}
    if num_envs > 1:
        spread["two groups"] = [num_envs // 2, num_envs - num_envs // 2]
    return spread


def compare(game: str, num_envs: int, num_threads: int, seconds: float) -> None:
    makers: dict[str, Callable[[str, int, int, int], Group]] = {"ale-py": make_ale}
    if importlib.util.find_spec("envpool") is not None:
        makers["EnvPool"] = make_envpool
    rows = {
        (library, layout): [
            make(game, size, min(size, num_threads), seed) for seed, size in enumerate(sizes)
        ]
        for layout, sizes in layouts(num_envs).items()
        for library, make in makers.items()
    }
    for groups in rows.values():
        for group in groups:
            for actions in group.actions[:WARM_UP_STEPS]:
                group.pool.send(actions)
                group.pool.recv()
    rates: dict[tuple[str, str], list[float]] = {row: [] for row in rows}
    for _ in range(ROUNDS):
        for row, groups in rows.items():
            rates[row].append(env_steps_per_s(groups, seconds / ROUNDS))
    base = statistics.median(rates["ale-py", "one pool"])
    for (library, layout), values in rates.items():
        rate = statistics.median(values)
        print(
            f"{num_envs:>5} {num_threads:>8} {library:>8} {layout:>11} {rate:>12,.0f} "
            f"{rate / base:>7.2f} {min(values) / base:>7.2f} – {max(values) / base:.2f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--game", default="Pong", help="as in ALE/<game>-v5")
    parser.add_argument("--envs", type=int, nargs="+", default=[64, 128])
    parser.add_argument(
        "--threads", type=int, nargs="+", default=[os.cpu_count() or 1], help="of each pool"
    )
    parser.add_argument("--seconds", type=float, default=3.0, help="of each row, all rounds")
    arguments = parser.parse_args()
    if min(*arguments.envs, *arguments.threads, 1) < 1 or arguments.seconds <= 0:
        parser.error("--envs, --threads and --seconds must be positive")
    try:
        game = ale_game(f"ALE/{arguments.game}-v5")
    except QfleetError as error:
        parser.error(str(error))
    assert game is not None, "an ALE id is a game or an error"
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    if importlib.util.find_spec("envpool") is None:
        print("EnvPool is not installed (pip install envpool): its rows are left out")
    print(f"{game}, {os.cpu_count()} cores")
    print(" envs  threads  library      layout  env steps/s   ratio  (worst – best round)")
    for num_envs in arguments.envs:
        for num_threads in arguments.threads:
            compare(game, num_envs, num_threads, arguments.seconds)


if __name__ == "__main__":
    main()
