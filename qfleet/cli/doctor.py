"""``qfleet doctor``: show hardware and libraries, and measure which settings are fastest."""

from __future__ import annotations

import json as json_module
from dataclasses import dataclass

from qfleet.cli.parsing import parse
from qfleet.cli.run_options import quiet_stdout
from qfleet.envs.short_names import full_id

HELP = "show hardware and libraries; measure the fastest vectoriser, envs, precision"

DESCRIPTION = """Show hardware and libraries, and measure for a few seconds which vectoriser and
which number of environments are fastest on this machine. With --tune, measure on the accelerator
instead: which precision is fastest, with or without torch.compile, and which inference device.

Examples:
  qfleet doctor
  qfleet doctor --env ALE/Pong-v5 --seconds 1
  qfleet doctor --tune --env ALE/Breakout-v5
"""

MEASURED_ENV, TUNED_ENV = "CartPole-v1", "ALE/Pong-v5"


@dataclass(frozen=True)
class DoctorOptions:
    env: str | None = None
    """Environment to measure with; default CartPole-v1, with --tune ALE/Pong-v5."""
    envs: tuple[int, ...] = (1, 4, 16, 64)
    """Numbers of envs to try."""
    seconds: float = 0.3
    """Duration of each measurement, in seconds."""
    tune: bool = False
    """Tune the pipeline engine for the accelerator, and show the time of every choice."""
    json: bool = False
    """Print one JSON object and nothing else."""


def run(argv: list[str]) -> int:
    options = parse(DoctorOptions, argv, "doctor", DESCRIPTION)
    from qfleet.core.errors import ConfigError

    if options.seconds <= 0 or not options.envs or min(options.envs) < 1:
        raise ConfigError("--seconds and --envs must be positive")
    if options.tune:
        return _tune(full_id(options.env or TUNED_ENV), options.json)
    return _measure(full_id(options.env or MEASURED_ENV), options)


def _measure(env: str, options: DoctorOptions) -> int:
    from qfleet.training import doctor

    machine = doctor.machine()
    rates = doctor.measure_vectorisers(env, options.envs, options.seconds)
    memory = doctor.replay_capacity(env)
    if options.json:
        rows = [dict(zip(("vectorize", "envs", "env_steps_per_s"), r, strict=True)) for r in rates]
        print(json_module.dumps({**machine, "env": env, "rates": rows, **memory}))
        return 0
    for name, value in machine.items():
        shown = (
            ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else value
        )
        print(f"{name:<14} {shown}")
    print(f"\nenv steps per second, {env}, random actions:")
    best = max(rates, key=lambda rate: rate[2])
    for vectorize, count, rate in rates:
        mark = "  ◄ fastest" if (vectorize, count, rate) == best else ""
        print(f"  --vectorize {vectorize:<7} --envs {count:<4} {rate:>12,.0f}{mark}")
    print(
        f"\nmemory: {memory['available_bytes'] / 2**30:.1f} GiB free; "
        f"the largest --buffer-size for {env} is {memory['largest_buffer_size']:,}"
    )
    return 0


def _tune(env: str, json: bool) -> int:
    from qfleet.engines.measured_cache import cache_path
    from qfleet.training import doctor

    with quiet_stdout(json):
        report = doctor.tune_pipeline(env)
    if json:
        print(json_module.dumps({"env": env, **report.as_dict()}))
        return 0
    tuning = report.tuning
    if tuning is None:
        print(f"nothing to tune: {report.why_nothing}")
        return 0
    print(f"µs per update, {env}, {report.device}:")
    for name, update_s in tuning.update_s.items():
        mark = "  ◄ chosen" if name == str(tuning.choice) else ""
        print(f"  {name:<16} {update_s * 1e6:>10,.1f}{mark}")
    for name, why in tuning.failed.items():
        print(f"  {name:<16} {'failed':>10}  {why}")
    print("", *report.notes, "", sep="\n")
    if tuning.from_cache:
        print(f"read from {cache_path()}; remove that file to measure again")
    else:
        print(f"saved in {cache_path()}")
    return 0
