"""The rate of each stage of a run alone, in env steps per second, and the bottleneck.

The stages are the environments, choosing actions, and learning.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from qfleet.agent.actor import draw_actions, legal_actions
from qfleet.config.config import Config
from qfleet.core.cores import usable_cores
from qfleet.core.types import Clock, VectorEnv
from qfleet.telemetry.bottleneck import Diagnosis, StageRates, diagnose, rates_table
from qfleet.telemetry.timers import Timers

MEASURE_S = 1.0
SLICES = 8
"""Slices of that time; the median of their rates ignores short disturbances."""


class Stages(NamedTuple):
    rates: StageRates
    diagnosis: Diagnosis

    def table(self) -> str:
        return rates_table(self.rates, self.diagnosis)

    def as_dict(self) -> dict[str, float | str | None]:
        return {
            **dataclasses.asdict(self.rates),
            "share_of_slowest": self.diagnosis.share_of_slowest,
            "bottleneck": self.diagnosis.bottleneck,
        }


def learner_rate(config: Config, clock: Clock, timers: Timers) -> float | None:
    """Return the env steps per second that learning alone allows, by the host's timers."""
    learning_s = timers.seconds["learn"] + timers.seconds["copy"]
    if not (learning_s > 0 and clock.updates):
        return None
    return clock.updates / learning_s / config.updates_per_env_step


def env_rate(groups: Sequence[VectorEnv], seed: int) -> float:
    """Return the env steps per second with random actions, stepped group by group.

    No step may be in flight. The environments cannot be used for training afterwards.
    """
    random = np.random.default_rng(seed)
    sizes = [group.num_envs for group in groups]
    spec = groups[0].spec
    actions = [draw_actions(spec, random, (16, size)) for size in sizes]
    for group, chosen in zip(groups, actions, strict=True):
        # Masks are those of the first observation; without masks no observation is needed.
        group.send(legal_actions(spec, group.reset() if spec.is_masked else chosen, chosen[0]))
    turns, rates = 0, []
    for _ in range(SLICES):
        begun, start_s = turns, time.perf_counter()
        while (elapsed_s := time.perf_counter() - start_s) < MEASURE_S / SLICES:
            turns += 1
            for group, chosen in zip(groups, actions, strict=True):
                group.send(legal_actions(spec, group.recv().obs, chosen[turns % 16]))
        rates.append((turns - begun) * sum(sizes) / elapsed_s)
    return statistics.median(rates)


def make_stages(
    rates: StageRates, config: Config, device: torch.device, share_a_device: bool = False
) -> Stages:
    diagnosis = diagnose(
        rates,
        cores=usable_cores(),
        envs=config.envs,
        device_type=device.type,
        updates_per_env_step=config.updates_per_env_step,
        batch_size=config.batch_size,
        share_a_device=share_a_device,
    )
    return Stages(rates, diagnosis)
