"""``qfleet doctor``: show hardware and libraries, and measure which settings are fastest."""

from __future__ import annotations

import json as json_module
import math
from dataclasses import asdict, dataclass
from typing import Any

from qfleet.cli.parsing import parse
from qfleet.cli.run_options import quiet_stdout
from qfleet.envs.short_names import full_id

HELP = "show hardware and libraries; measure the fastest vectoriser, envs, precision"

DESCRIPTION = """Show hardware and libraries, and measure for a few seconds which vectoriser and
which number of environments are fastest on this machine. With --tune, measure on the accelerator
instead: which precision is fastest, with or without torch.compile, and which inference device.
With --parallel, measure updates of one process and of --workers ranks that share the batch, the
layers or the stages of a network, and say which of them pays.

Examples:
  qfleet doctor
  qfleet doctor --env ALE/Pong-v5 --seconds 1
  qfleet doctor --tune --env ALE/Breakout-v5
  qfleet doctor --parallel --env ALE/Pong-v5 --network impala --width 4
"""

NETWORK_OPTIONS = ("network", "net_arch", "width", "depth", "batch_size", "device")
UNUSED = {"tune": ("envs", "seconds"), "parallel": ("envs",)}
"""Mode → options that have no effect in it."""
COUNTS = (1, 4, 16, 64)
MEASURED_ENV, TUNED_ENV = "CartPole-v1", "ALE/Pong-v5"


@dataclass(frozen=True)
class DoctorOptions:
    env: str | None = None
    """Environment to measure with; default CartPole-v1, with --tune or --parallel ALE/Pong-v5."""
    envs: tuple[int, ...] | None = None
    """Numbers of envs to try; default 1 4 16 64."""
    seconds: float | None = None
    """Duration of each measurement, in seconds; default 0.3, with --parallel 2."""
    tune: bool = False
    """Tune the pipeline engine for the accelerator, and show the time of every choice."""
    parallel: bool = False
    """Measure which of data, tensor and pipeline parallelism pays for a network."""
    workers: int | None = None
    """With --parallel: number of ranks; default 2."""
    network: str | None = None
    """With --parallel, also the next five: as in `qfleet train`; default: those of the preset."""
    net_arch: tuple[int, ...] | None = None
    """Hidden layers of an MLP."""
    width: int | None = None
    """Factor on the channels of network impala."""
    depth: int | None = None
    """Residual blocks in each section of network impala."""
    batch_size: int | None = None
    """Samples per update of all ranks together."""
    device: str | None = None
    """Device of the learner."""
    json: bool = False
    """Print one JSON object and nothing else."""


def run(argv: list[str]) -> int:
    options = parse(DoctorOptions, argv, "doctor", DESCRIPTION)
    from qfleet.core.errors import ConfigError

    default_s = 2.0 if options.parallel else 0.3
    seconds = default_s if options.seconds is None else options.seconds
    counts = COUNTS if options.envs is None else options.envs
    if not 0 < seconds < math.inf or not counts or min(counts) < 1:
        raise ConfigError("--seconds and --envs must be positive and finite")
    given = {name: getattr(options, name) for name in (*NETWORK_OPTIONS, "workers")}
    fields = {name: value for name, value in given.items() if value is not None}
    if fields and not options.parallel:
        raise ConfigError(f"--{next(iter(fields)).replace('_', '-')} is for --parallel; add that")
    if options.tune and options.parallel:
        raise ConfigError("--tune and --parallel exclude each other; give one of them")
    for mode, names in UNUSED.items():
        for name in names:
            if getattr(options, mode) and getattr(options, name) is not None:
                raise ConfigError(f"--{name} has no effect with --{mode}; remove it")
    if options.parallel:
        env, workers = full_id(options.env or TUNED_ENV), fields.pop("workers", 2)
        return _advise(env, fields, workers, seconds, options.json)
    if options.tune:
        return _tune(full_id(options.env or TUNED_ENV), options.json)
    return _measure(full_id(options.env or MEASURED_ENV), counts, seconds, options.json)


def _measure(env: str, counts: tuple[int, ...], seconds: float, json: bool) -> int:
    from qfleet.training import doctor

    machine = doctor.machine()
    with quiet_stdout(json):
        rates = doctor.measure_vectorisers(env, counts, seconds)
        memory = doctor.replay_capacity(env)
    if json:
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


def _advise(env: str, fields: dict[str, Any], workers: int, seconds: float, json: bool) -> int:
    from qfleet.core.errors import ConfigError
    from qfleet.training.parallel_advice import choose, measure_layouts, measured_settings

    if workers < 2:
        raise ConfigError(f"--parallel compares ranks: --workers must be ≥ 2, got {workers}")
    with quiet_stdout(json):
        config, device, weights = measured_settings(env, fields)
        rows = measure_layouts(config, workers, seconds)
    best = choose(rows)
    words = ["qfleet train", env]
    for name, value in fields.items():
        numbers = value if isinstance(value, tuple) else (value,)
        words += ["--" + name.replace("_", "-"), *map(str, numbers)]
    command = " ".join([*words, best.sizes.options]).strip()
    if json:
        report = {
            "env": env,
            "device": device,
            "weights": weights,
            "batch_size": config.batch_size,
            "rows": [{**asdict(row), "sizes": row.sizes._asdict()} for row in rows],
            "advice": str(best.sizes),
            "command": command,
        }
        print(json_module.dumps(report))
        return 0
    batches = f"batches of {config.batch_size}"
    print(f"updates per second, {env}, {weights:,} weights, {batches}, {device}:")
    print(f"  {'layout':<24} {'predicted':>10} {'measured':>10} {'MB per rank':>12}")
    for row in rows:
        if row.measured is None or row.predicted is None or row.bytes_per_rank is None:
            print(f"  {row.sizes!s:<24} {row.refused}")
            continue
        rates = f"{row.predicted:>10,.2f} {row.measured:>10,.2f}"
        mark = "  ◄ advice" if row is best else ""
        print(f"  {row.sizes!s:<24} {rates} {row.bytes_per_rank / 1e6:>12,.1f}{mark}")
    pays = str(best.sizes) if best.sizes.ranks > 1 else "none: train without workers"
    print(f"\n{pays}: {command}")
    return 0
