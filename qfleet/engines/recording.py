"""Prepare a learner for its device: tune it, and record its bursts of updates."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from qfleet.accelerator.graphs import can_record, seconds_per_call, why_not_recorded
from qfleet.agent.recorded_learner import RecordedLearner
from qfleet.agent.schedules import rows_per_block
from qfleet.config.config import Config
from qfleet.core.types import Batch, Block, EnvSpec, Memory
from qfleet.engines.cluster.state_arrays import copy_state
from qfleet.engines.parts import Setup
from qfleet.engines.tuning import (
    SAVED_PER_UPDATE_S,
    TIMED_CALLS,
    Choice,
    Tuning,
    apply_choice,
    candidates,
    may_compile,
    tune,
    tuning_key,
)

RECORDED_UPDATES = 32
"""Largest number of updates per launch: it hides the launch, and is recorded in a second."""


class Prepared(NamedTuple):
    """A learner tuned for its device."""

    tuning: Tuning
    update_s: float
    """Seconds per update of all agents together."""
    note: str

    def learner_rate(self, config: Config, agents: int) -> float:
        """Return the env steps per second that learning alone allows."""
        return agents / self.update_s / config.updates_per_env_step


def prepare_learner(
    setup: Setup,
    spec: EnvSpec,
    learner: RecordedLearner,
    memory: Memory,
    device: torch.device,
    agree: Callable[[Choice], Choice] | None = None,
) -> Prepared:
    """Tune the learner for its device and record its bursts; its state does not change.

    ``agree`` returns what is recorded instead of the choice made here (ranks of an all-reduce).
    """
    config, thorough = setup.config, setup.thorough
    saved = copy_state({"learner": learner.state_dict(), "memory": memory.state_dict()})
    at_once = updates_at_once(config, learner.burst_updates)
    samples = None
    if memory.device.type != device.type:
        samples = blank_batch(spec, at_once * config.batch_size, device)
        # A memory on the host cannot be sampled while it is empty.
        memory.extend(blank_block(spec, config.envs, config.n_steps + 1))
    learner.burst_updates = at_once
    record_them = config.graphs and can_record(device)

    in_force: Choice | None = None

    def time_update(choice: Choice) -> float:
        nonlocal in_force
        if choice != in_force:
            in_force = None
            setup.report(f"preparing updates on {device}: {choice}")
            if choice.compiled:
                # torch.compile keeps a limited number of variants: drop those of other choices.
                torch.compiler.reset()
            apply_choice(choice, learner.networks, learner.compilables())
            if record_them:
                learner.record(at_once, samples)
            in_force = choice
        learner.burst(at_once)
        return seconds_per_call(lambda: learner.burst(at_once), device, TIMED_CALLS) / at_once

    started_s = time.monotonic()
    key = tuning_key(config, device, learner.weights.describe(), at_once)
    key |= {"population": learner.weights.agents or 1, "fused": learner.is_fused}
    saved_s = config.steps * config.updates_per_env_step * SAVED_PER_UPDATE_S
    options, compiles = candidates(config, device), may_compile(config, device, saved_s, thorough)
    if learner.is_fused:
        # Our own kernels have a fixed precision and leave little to compile: 2 of 34 µs per update,
        # for several seconds at the start.
        options = [Choice("fp32" if config.precision == "fp32" else "tf32", compiled=False)]
        compiles = config.compile == "on"
    tuning = tune(options, compiles, time_update, key, thorough)
    if agree is not None:
        tuning, in_force = dataclasses.replace(tuning, choice=agree(tuning.choice)), None
    update_s = time_update(tuning.choice)
    learner.device_time.reset()
    learner.load_state_dict(saved["learner"])
    memory.load_state_dict(saved["memory"])
    failures = {f.name: f.failure for f in learner.compilables() if f.failure is not None}
    tuning = dataclasses.replace(tuning, failed={**tuning.failed, **failures})
    recorded = f"{at_once} updates a launch"
    if refused := why_not_recorded(config.graphs, device, "learner"):
        recorded = f"not recorded ({refused})"
    plain = "".join(f"; {name} is not compiled ({why})" for name, why in failures.items())
    how = "known" if tuning.from_cache else "measured" if thorough else "new here"
    note = (
        f"updates on {device}: {tuning.choice}, {recorded}, {update_s * 1e6:.0f} µs each "
        f"({how}, {time.monotonic() - started_s:.0f} s){plain}"
    )
    return Prepared(tuning, update_s, note)


def updates_at_once(config: Config, most: int) -> int:
    """Return the updates per recorded burst: an even share of those owed per block.

    Without replay it is all updates of a rollout: its returns and order are computed at its start.
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
    """Return the batch that recorded updates read: a burst's samples are copied into it."""
    obs = torch.zeros((size, *spec.obs_shape), dtype=spec.torch_dtype, device=device)
    number = torch.zeros(size, dtype=torch.int64, device=device)
    real = torch.zeros(size, device=device)
    return Batch(obs, number, real, real.clone(), obs.clone(), real.clone(), number.clone())
