"""``--engine auto``: which engine and how many envs, for this machine and this task.

In: a configuration with ``auto`` or 0 in some fields. Out: the same with every choice made, and one
sentence that says what was chosen and why. Where only a measurement can decide, the engines run for
a few seconds each, and the result is cached.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

import torch

from qfleet.accelerator.streams import has_streams
from qfleet.config.config import FIELDS, Config
from qfleet.config.validation import validate
from qfleet.core.cores import usable_cores
from qfleet.core.errors import ConfigError
from qfleet.core.types import EnvSpec
from qfleet.engines import registry
from qfleet.engines.all_reduce.world import with_launched_workers
from qfleet.engines.measured_cache import recall, remember
from qfleet.engines.placement import learner_device
from qfleet.engines.torch_settings import TorchSettings
from qfleet.envs.device.names import is_tensor_env
from qfleet.envs.factory import make_envs, steps_in_background
from qfleet.envs.registry import ale_game
from qfleet.envs.threads import cores_for
from qfleet.telemetry.faults import FaultLog

ENVS_PER_CORE = 8
"""With fewer, threads of ale-py's pool wait for the slowest env of a step; more gain little
(H200 machine, 16 cores: 22.8k, 26.9k and 28.2k steps/s with 64, 128 and 256 envs)."""
BLOCK_UPDATES = 64
"""Updates per block on an accelerator: enough to hide the fixed cost of a block."""
CPU_BLOCK = 64
"""Env steps per block of a collecting thread on a CPU: enough to hide the cost of passing a block
on. With longer blocks learning and collecting disturb each other for longer: Pong at one update per
256 steps ran at 1.13 of serial on two cores with blocks of 64, and at 0.83 with blocks of 256."""
MOST_ROWS = 4
"""Largest number of rows per block; the acting weights are up to two blocks old."""
DEVICE_ENVS, HOST_TENSOR_ENVS = 128, 64
"""Tensor envs on the device engine, on an accelerator and on a CPU: a guess, not measured. A step
is some dozens of small kernels, whose launches must be spread over many envs."""
LEAST_TURNS = 64
"""Smallest number of steps per env that a run, and its memory, should have room for."""
DEVICE_ROWS = 32
"""Largest number of rows per block on the device engine; the weights are one block old at most."""
ACTORS_ENVS, ACTORS_BLOCK = 8, 64
"""Envs per actor process, and env steps per block that it sends."""
TRIAL_S = 2.0
"""Seconds that an engine is measured."""
# fmt: off
_NO_MATTER = {
    "engine", "seed", "steps", "learning_starts", "buffer_size", "replay_dir", "eval_freq",
    "n_eval_episodes", "eval_eps", "eval_max_steps", "target_return", "patience", "log_interval",
    "checkpoint_freq", "keep_checkpoints", "tensorboard", "track", "record", "max_fault_rate",
    "max_env_restarts", "env_timeout_s", "max_abs_q", "learning_rate", "lr_schedule",
    "lr_plateau_patience", "lr_plateau_factor", "gamma", "td_lambda",
    "eval_env", "eval_env_kwargs", "reward_scale",
    "exploration_fraction", "exploration_initial_eps", "value_weight", "entropy_weight",
}
# fmt: on
"""Fields that do not change which engine is faster."""
WORTHWHILE = 1.05
"""Speed-up over serial above which another engine is chosen."""


def settle(
    config: Config, report: Callable[[str], None] = lambda _: None, faults: FaultLog | None = None
) -> tuple[Config, str | None]:
    """Return the configuration with every choice made, and a sentence about a chosen engine.

    ``report``: called with what is being measured. ``faults``: of the environments, meanwhile.
    """
    if config.data:  # a dataset replaces the environments, whose shape is chosen here
        return with_launched_workers(config), None
    engine, why = str(config.engine), ""
    if engine == "auto":
        engine, why = _choose_engine(config, report, faults or FaultLog())
    config = with_launched_workers(config.replace(engine=engine))
    config = _with_shape(config.replace(env_groups=0) if engine == "serial" else config)
    if not why:
        return config, None
    shape = f"{config.envs} env{'s' if config.envs > 1 else ''}"
    if config.env_groups > 1:
        shape += f" in {config.env_groups} groups"
    return config, f"engine {engine}, {shape}: {why}"


def _choose_engine(
    config: Config, report: Callable[[str], None], faults: FaultLog
) -> tuple[str, str]:
    if config.population > 1:
        return "device", "a population is one batch"
    if config.batch_plateau_factor > 1:
        return "serial", "its batches can grow on a plateau"
    if is_tensor_env(config.env) and _leaves_all_to_the_device(config):
        device = _learner_device(config.replace(engine="device"))
        if has_streams(device):
            name = torch.get_device_module(device).get_device_name(device)
            return "device", f"the {name} can step these environments itself"
    accelerator = _learner_device(config)
    if accelerator.type != "cpu" and not has_streams(accelerator):
        return "serial", f"the pipeline was never tried on {accelerator.type}"
    if accelerator.type != "cpu":
        name = torch.get_device_module(accelerator).get_device_name(accelerator)
        return "pipeline", f"the {name} learns while the cores step"
    cores = usable_cores()
    if not steps_in_background(config):
        return "serial", "these environments share the interpreter with the learner"
    if cores == 1:
        return "serial", "there is one core"
    return _try_engines(config, report, faults)


def _leaves_all_to_the_device(config: Config) -> bool:
    """Return whether the device engine has every option that was set."""
    on_host = config.replay_dir or config.replay_compression != "none" or config.lockstep
    on_host = on_host or config.step_latency_s > 0 or config.normalize_observations
    on_host = on_host or bool(config.eval_env or config.json_object("eval_env_kwargs"))
    elsewhere = config.inference_device != "auto" or config.replay_device != "auto"
    other = config.device != "auto" and not has_streams(_learner_device(config))
    return not (on_host or elsewhere or other or config.env_groups > 1)


def _learner_device(config: Config) -> torch.device:
    spec = EnvSpec(config.env, (1,), "float32", 1)
    if config.device == "auto" and config.engine != "device":
        if torch.accelerator.current_accelerator(check_available=True) is None:
            return torch.device("cpu")
        if ale_game(config.env):  # known to be images without making one
            spec = EnvSpec(config.env, (4, 84, 84), "uint8", 1)
        else:
            envs = make_envs(config, 1, seed=0, training=True, on_fault=FaultLog())
            envs.close()
            spec = envs.spec
    return learner_device(config, spec)


def _with_shape(config: Config) -> Config:
    """Set the envs, groups and rows that are 0."""
    if config.engine == "device":
        return _with_device_shape(config)
    if config.engine == "actors":
        envs = config.envs or ACTORS_ENVS
        rows = config.block_rows or -(-ACTORS_BLOCK // envs)
        return validate(config.replace(envs=envs, env_groups=1, block_rows=rows))
    ranks = config.workers if config.engine == "all-reduce" else 1
    background = steps_in_background(config)
    has_fast_path = config.engine in ("pipeline", "all-reduce")
    accelerated = has_fast_path and _learner_device(config).type != "cpu"
    on_pipeline = config.engine == "pipeline" or accelerated
    cores = cores_for(config)
    envs = config.envs
    if envs == 0:
        envs = min(256, max(16, ENVS_PER_CORE * cores)) if accelerated and background else 8
        envs = _that_share_evenly(config, envs)
    groups = config.env_groups
    if not on_pipeline:
        if groups > 1 and config.engine == "all-reduce":
            raise ConfigError("env_groups is for ranks on a GPU; leave it out on CPUs")
        groups = 1
    if groups == 0:
        # On a CPU inference wants the cores that the other group would step on, and whole batches:
        # with two groups Pong ran at 0.69 of serial on two cores, with one at 1.25.
        apart = accelerated and background and not config.lockstep
        groups = min(envs, 4) if apart else 1
    rows = config.block_rows
    # Without replay a block is a rollout, on every engine.
    if rows == 0 and config.replay and not config.lockstep:
        if accelerated:
            all_envs = ranks * envs
            updates_per_row = all_envs * config.updates_per_env_step
            rows = min(MOST_ROWS, round(BLOCK_UPDATES / updates_per_row))
            rows = max(config.train_freq // all_envs, rows)
        elif on_pipeline and background:
            rows = -(-CPU_BLOCK // envs)
    return validate(config.replace(envs=envs, env_groups=groups, block_rows=max(rows, 0)))


def _that_share_evenly(config: Config, most: int) -> int:
    """Return at most ``most`` envs: a rollout has an equal number of steps of each, at least 2."""
    if config.replay:
        return most
    steps = config.train_freq // (config.workers if config.engine == "all-reduce" else 1)
    return max(n for n in range(1, most + 1) if n == 1 or (steps % n == 0 and steps >= 2 * n))


def _with_device_shape(config: Config) -> Config:
    accelerated = _learner_device(config).type != "cpu"
    envs, rows = config.envs, config.block_rows
    if envs == 0:
        room = min(config.steps, config.buffer_size) // LEAST_TURNS
        envs = max(1, min(DEVICE_ENVS if accelerated else HOST_TENSOR_ENVS, room))
        envs = _that_share_evenly(config, envs)
    # Without replay a block is a rollout.
    if rows == 0 and accelerated and config.replay:
        updates_per_row = envs * config.updates_per_env_step
        most = min(DEVICE_ROWS, round(BLOCK_UPDATES / updates_per_row))
        rows = max(1, config.train_freq // envs, most)
    return validate(config.replace(envs=envs, env_groups=1, block_rows=rows))


def _try_engines(
    config: Config, report: Callable[[str], None], faults: FaultLog
) -> tuple[str, str]:
    """Return the faster of serial and pipeline, by running both for ``TRIAL_S``."""
    key = {name: getattr(config, name) for name in FIELDS if name not in _NO_MATTER}
    rates = recall("engine", key)
    if not isinstance(rates, dict) or set(rates) != {"serial", "pipeline"}:
        rates = {}
        for name in ("serial", "pipeline"):
            report(f"trying engine {name} for some seconds")
            rates[name] = _trial_rate(config.replace(engine=name), faults)
        remember("engine", key, rates)
    gain = rates["pipeline"] / rates["serial"]
    engine = "pipeline" if gain > WORTHWHILE else "serial"
    return engine, f"tried both: pipeline makes {gain:.2f}× the steps of serial here"


def with_short_rollouts(config: Config) -> Config:
    """Return the shortest rollouts with the same updates per step: whole ones may take minutes."""
    rows, updates = config.train_freq // config.envs, config.gradient_steps
    parts = max(n for n in range(1, rows // 2 + 1) if rows % n == 0 and updates % n == 0)
    return config.replace(
        train_freq=config.train_freq // parts, gradient_steps=updates // parts, block_rows=0
    )


def _trial_rate(config: Config, faults: FaultLog) -> float:
    """Return the env steps per second of an engine while it learns."""
    config = _with_shape(config)
    if not config.replay:
        config = with_short_rollouts(config)
    least = (config.n_steps + 8) * config.envs + config.batch_size
    config = config.replace(
        steps=10**9,
        learning_starts=0,
        buffer_size=min(config.buffer_size, max(least, 4096)),
        exploration_initial_eps=config.exploration_final_eps,  # as most of the run will be
        replay_dir="",
        record="",
    )
    with contextlib.ExitStack() as closing:
        closing.callback(TorchSettings().restore)
        parts = registry.build(config, faults)
        closing.callback(parts.close)
        # The first updates fill caches and start threads; they are not counted.
        start_s, start_steps, limit_s = time.monotonic(), 0, 30.0

        def keep_going() -> bool:
            nonlocal start_s, start_steps, limit_s
            if limit_s != TRIAL_S and parts.clock.updates >= 2:
                start_s, start_steps, limit_s = time.monotonic(), parts.clock.env_steps, TRIAL_S
            return time.monotonic() - start_s < limit_s

        registry.run(parts, keep_going)
        return (parts.clock.env_steps - start_steps) / (time.monotonic() - start_s)
