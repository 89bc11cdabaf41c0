"""``qfleet doctor``: what this machine has, and what is quickest on it, by measurement."""

from __future__ import annotations

import json as json_module
from dataclasses import dataclass

from qfleet.cli.parsing import parse

HELP = "show hardware and libraries; measure which vectoriser and how many envs are quickest"

DESCRIPTION = """Show what this machine has, and measure for a few seconds which way of vectorising
and how many environments are quickest on it.

Examples:
  qfleet doctor
  qfleet doctor --env ALE/Pong-v5 --seconds 1
"""


@dataclass(frozen=True)
class DoctorOptions:
    env: str = "CartPole-v1"
    """Environment to measure with."""
    envs: tuple[int, ...] = (1, 4, 16, 64)
    """Numbers of envs to try."""
    seconds: float = 0.3
    """How long each measurement lasts."""
    json: bool = False
    """Print one JSON object and nothing else."""


def run(argv: list[str]) -> int:
    options = parse(DoctorOptions, argv, "doctor", description=DESCRIPTION)
    from qfleet import doctor
    from qfleet.errors import ConfigError

    if options.seconds <= 0 or not options.envs or min(options.envs) < 1:
        raise ConfigError("--seconds and --envs must be positive")
    machine = doctor.machine()
    rates = doctor.measure_vectorisers(options.env, options.envs, options.seconds)
    memory = doctor.replay_capacity(options.env)
    if options.json:
        rows = [dict(zip(("vectorize", "envs", "env_steps_per_s"), r, strict=True)) for r in rates]
        print(json_module.dumps({**machine, "env": options.env, "rates": rows, **memory}))
        return 0
    for name, value in machine.items():
        shown = (
            ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else value
        )
        print(f"{name:<14} {shown}")
    print(f"\nenv steps per second, {options.env}, random actions:")
    best = max(rates, key=lambda rate: rate[2])
    for vectorize, count, rate in rates:
        mark = "  ◄ quickest" if (vectorize, count, rate) == best else ""
        print(f"  --vectorize {vectorize:<7} --envs {count:<4} {rate:>12,.0f}{mark}")
    print(
        f"\nmemory: {memory['available_bytes'] / 2**30:.1f} GiB free; "
        f"the largest --buffer-size for {options.env} is {memory['largest_buffer_size']:,}"
    )
    return 0
