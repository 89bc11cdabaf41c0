"""The baseline of a distributed run: what one process reaches with the same settings."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from qfleet.config.config import Config
from qfleet.engines import serial
from qfleet.engines.parts import Setup
from qfleet.telemetry.faults import FaultLog

SHARE = 0.05
"""Share of a run's time for which its baseline is measured."""
SHORTEST_S, LONGEST_S = 1.0, 5.0
"""Limits of that time. The baseline of a run that is too short for the first is not measured."""
MOST_ROWS = 20_000
"""Transitions of the baseline's replay memory, which only has to be sampled from."""
MOST_START = 1000
"""Env steps before the baseline's first update."""


def measured_for_s(run_s: float) -> float:
    """Return how long the baseline of a run is measured; 0: not at all."""
    share_s = SHARE * run_s
    return 0.0 if share_s < SHORTEST_S else min(share_s, LONGEST_S)


def serial_rate(config: Config, measure_s: float, give_up: Callable[[], bool]) -> float | None:
    """Return the env steps per second of the serial engine from its first update on.

    None if ``give_up`` returns True, or if there is no update within twice ``measure_s``.
    """
    least = (config.n_steps + 2) * config.envs + config.batch_size
    alone = config.replace(
        engine="serial",
        buffer_size=min(config.buffer_size, max(MOST_ROWS, least)),
        learning_starts=min(config.learning_starts, MOST_START),
        # As for most of the run; random actions would need no network.
        exploration_initial_eps=config.exploration_final_eps,
        replay_dir="",
        record="",
    )
    parts = serial.build(Setup(alone, FaultLog()))
    clock = parts.clock
    began_s = time.perf_counter()
    first: tuple[float, int] | None = None  # time and env steps at the first update

    def keep_going() -> bool:
        nonlocal first
        now_s = time.perf_counter()
        if first is None and clock.updates:
            first = (now_s, clock.env_steps)
        until_s = began_s + 2 * measure_s if first is None else first[0] + measure_s
        return now_s < until_s and clock.env_steps < alone.steps and not give_up()

    with contextlib.closing(parts):
        serial.run(parts, keep_going)
        ended_s = time.perf_counter()
    if first is None or clock.env_steps == first[1] or give_up():
        return None
    return (clock.env_steps - first[1]) / (ended_s - first[0])
