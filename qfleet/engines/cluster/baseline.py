"""The baseline of a distributed run: what one process reaches with the same settings."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from qfleet.config.config import OPTIONS, Config
from qfleet.config.files import read_fields
from qfleet.core.errors import ConfigError
from qfleet.core.files import read_text
from qfleet.engines import serial
from qfleet.engines.parts import Setup
from qfleet.telemetry.faults import FaultLog
from qfleet.telemetry.formatting import finite

SHARE = 0.05
"""Share of a run's time for which its baseline is measured."""
SHORTEST_S, LONGEST_S = 1.0, 5.0
"""Limits of that time. The baseline of a run that is too short for the first is not measured."""
MOST_ROWS = 20_000
"""Transitions of the baseline's replay memory, which only has to be sampled from."""
MOST_START = 1000
"""Env steps before the baseline's first update."""

COMPARED = {
    name
    for name, option in OPTIONS.items()
    if option.group in ("environment", "algorithm", "replay")
} - {
    "buffer_size", "replay_dir", "replay_device", "init_from", "max_env_restarts", "env_timeout_s",
} | {
    "batch_size", "train_freq", "gradient_steps", "optimizer", "precision", "step_latency_s",
}  # fmt: skip
"""Fields in which a run and its baseline must agree: those that determine the work of an env step,
but not its number or its result."""


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


def _training_rate(result: Mapping[str, Any]) -> float:
    """Return the rate without the time of evaluations and checkpoints, as that of a fleet."""
    shares: Mapping[str, float] = next(iter((result.get("resources") or {}).values()), {})
    other = shares.get("evaluate", 0.0) + shares.get("save", 0.0)
    return float(result["env_steps_per_s"] / max(1.0 - float(other), 0.01))


def stored_rate(folder: Path, config: Config) -> float:
    """Return the env steps per second of the run in ``folder``, which is a baseline for ``config``.

    Raise ConfigError if it has no result, several processes, or other settings.
    """
    stored = Config(**read_fields(folder / "config.json"))
    try:
        result = json.loads(read_text(folder / "result.json"))
        fleet = result["fleet"] or {}
        rate = finite(fleet.get("env_steps_per_s") or _training_rate(result))
        processes = len(fleet.get("workers") or fleet.get("ranks") or [None])
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        rate, processes = None, 1
    if not rate or rate < 0:
        raise ConfigError(f"baseline '{folder}' has no rate in its result.json; finish that run")
    if processes > 1:
        raise ConfigError(
            f"baseline '{folder}' has {processes} workers; name a run of one process or worker"
        )
    names = COMPARED if config.envs else COMPARED - {"envs"}  # 0: chosen at the start
    differing = [
        f"{name} is {getattr(stored, name)!r} there and {getattr(config, name)!r} here"
        for name in sorted(names)
        if getattr(stored, name) != getattr(config, name)
    ]
    if differing:
        raise ConfigError(
            f"baseline '{folder}' has other settings: {'; '.join(differing)}; make them equal, "
            "or leave --baseline out to have one process measured"
        )
    return rate
