"""A learner in; the same learner, tuned for its device and with its bursts recorded, out."""

from __future__ import annotations

import dataclasses
import time

import torch

from qfleet.accelerator.graphs import seconds_per_call, why_no_graphs
from qfleet.agent.schedules import rows_per_block
from qfleet.config.config import Config
from qfleet.core.types import Batch, Block, EnvSpec, Memory
from qfleet.engines.parts import Parts
from qfleet.engines.tuning import (
    TIMED_CALLS,
    Choice,
    apply_choice,
    candidates,
    copy_state,
    may_compile,
    tune,
    tuning_key,
)

RECORDED_UPDATES = 32
"""Most updates in one launch: enough to hide the launch, few enough to record in a second."""


def prepare_learner(parts: Parts, memory: Memory) -> Choice:
    """Tune the learner for its device and record its bursts; its state is as before."""
    config, learner, device = parts.config, parts.learner, parts.device
    saved = copy_state({"learner": learner.state_dict(), "memory": memory.state_dict()})
    at_once = updates_at_once(config, learner.most_at_once)
    samples = None
    if memory.device.type != device.type:
        samples = blank_batch(parts.spec, at_once * config.batch_size, device)
        # A memory on the host refuses to be sampled while it is empty.
        memory.extend(blank_block(parts.spec, config.envs, config.n_steps + 1))
    learner.limit_bursts(at_once)
    record_them = config.graphs and why_no_graphs(device) is None

    in_force: Choice | None = None

    def time_update(choice: Choice) -> float:
        nonlocal in_force
        if choice != in_force:
            in_force = None
            # Code for another choice is of no use, and torch.compile keeps only so many versions.
            torch.compiler.reset()
            apply_choice(choice, learner.networks, learner.compilables())
            if record_them:
                learner.record(at_once, samples)
            in_force = choice
        learner.burst(at_once)
        return seconds_per_call(lambda: learner.burst(at_once), device, TIMED_CALLS) / at_once

    started_s = time.monotonic()
    key = tuning_key(config, device, learner.weights.describe(), at_once)
    key |= {"population": len(parts.members), "fused": learner.is_fused}
    options, compiles = candidates(config, device), may_compile(config, device)
    if learner.is_fused:
        # Kernels of our own have their precision already, and leave little to compile: 2 of 34 µs
        # an update, which costs several seconds at the start to get.
        options = [Choice("fp32" if config.precision == "fp32" else "tf32", compiled=False)]
        compiles = config.compile == "on"
    tuning = tune(options, compiles, time_update, key)
    update_s = time_update(tuning.choice)
    learner.load_state_dict(saved["learner"])
    memory.load_state_dict(saved["memory"])
    parts.timers[0].load_state_dict({})  # what was tried out is no part of the run
    failures = {f.name: f.failure for f in learner.compilables() if f.failure is not None}
    parts.tuning = dataclasses.replace(tuning, failed={**tuning.failed, **failures})
    parts.learner_only = len(parts.members) / update_s / config.updates_per_env_step
    how = "known" if tuning.from_cache else "tuned"
    recorded = f"{at_once} updates a launch" if record_them else "not recorded"
    parts.notes.append(
        f"updates on {device}: {tuning.choice}, {recorded}, {update_s * 1e6:.0f} µs each "
        f"({how}, {time.monotonic() - started_s:.0f} s)"
    )
    return tuning.choice


def updates_at_once(config: Config, most: int) -> int:
    """Updates in a recorded burst: an even share of those that a block brings.

    Without replay it is all of a rollout's: its returns and its order are found at its start.
    """
    if not config.replay:
        return config.gradient_steps
    owed = max(1, rows_per_block(config) * config.envs * config.gradient_steps // config.train_freq)
    launches = -(-owed // min(most, RECORDED_UPDATES))
    return owed // launches


def blank_block(spec: EnvSpec, envs: int, rows: int) -> Block:
    number = torch.zeros((rows, envs), dtype=torch.int64)
    obs = torch.zeros((rows, envs, *spec.frame_shape), dtype=spec.torch_dtype)
    return Block(obs, number, number.float(), number.to(torch.uint8))


def blank_batch(spec: EnvSpec, size: int, device: torch.device) -> Batch:
    """Where a burst's samples are copied to, for recorded updates."""
    obs = torch.zeros((size, *spec.obs_shape), dtype=spec.torch_dtype, device=device)
    number = torch.zeros(size, dtype=torch.int64, device=device)
    real = torch.zeros(size, device=device)
    return Batch(obs, number, real, real.clone(), obs.clone(), real.clone(), number.clone())
