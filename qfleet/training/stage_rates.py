"""What each stage of a run could do alone, and what they reach together.

In: the parts of a run that has just ended. Out: ``Stages``: env steps per second of the
environments, of choosing actions, of learning and of the whole, and which is the bottleneck.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import time
from typing import NamedTuple

import numpy as np

from qfleet.engines.parts import Parts
from qfleet.telemetry.bottleneck import Diagnosis, StageRates, diagnose, rates_table

MEASURE_S = 1.0
SLICES = 8
"""Parts of that time: the median of their rates does not mind a neighbour's moment of work."""


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


def measure_stages(parts: Parts, end_to_end: float) -> Stages:
    """``end_to_end`` is what the run reached, in env steps per second."""
    rates = _rates(parts, end_to_end)
    diagnosis = diagnose(
        rates,
        cores=os.cpu_count() or 1,
        envs=parts.config.envs,
        device_type=parts.device.type,
        updates_per_env_step=parts.config.updates_per_env_step,
        batch_size=parts.config.batch_size,
        share_a_device=parts.measure_collecting is not None,
    )
    return Stages(rates, diagnosis)


def _rates(parts: Parts, end_to_end: float) -> StageRates:
    learner_only = parts.learner_only
    learning_s = parts.timers[0].seconds["learn"] + parts.timers[0].seconds["copy"]
    if learner_only is None and learning_s > 0 and parts.clock.updates:
        # On the host a span of learning is the time it took.
        updates_per_s = parts.clock.updates / learning_s
        # The first updates are slow; a stage is never slower than the whole.
        steps_per_s = updates_per_s * len(parts.members) / parts.config.updates_per_env_step
        learner_only = max(steps_per_s, end_to_end)
    return StageRates(
        env_only=parts.measure_collecting() if parts.measure_collecting else _env_only(parts),
        inference_only=parts.measure_inference() if parts.measure_inference else None,
        learner_only=learner_only,
        end_to_end=end_to_end,
    )


def _env_only(parts: Parts) -> float:
    """The run's own environments with random actions, in the same turns and nothing else.

    They are of no more use to the run afterwards.
    """
    parts.collector.land()
    random = np.random.default_rng(parts.seeds.actor)
    sizes = [group.num_envs for group in parts.envs]
    actions = [random.integers(parts.spec.num_actions, size=(16, size)) for size in sizes]
    for group, chosen in zip(parts.envs, actions, strict=True):
        group.send(chosen[0])
    turns, rates = 0, []
    for _ in range(SLICES):
        begun, start_s = turns, time.perf_counter()
        while (elapsed_s := time.perf_counter() - start_s) < MEASURE_S / SLICES:
            turns += 1
            for group, chosen in zip(parts.envs, actions, strict=True):
                group.recv()
                group.send(chosen[turns % 16])
        rates.append((turns - begun) * sum(sizes) / elapsed_s)
    return statistics.median(rates)
