"""Pipeline schedules: in which order a stage computes the passes of its micro-batches.

``gpipe`` (1811.06965) runs all forward passes, then all backward passes, so a stage keeps the
activations of all micro-batches. ``1f1b`` (1806.03377) begins a backward pass as soon as it can, so
that stage s of p keeps those of p − s micro-batches at most. With m micro-batches, both leave the
share (p − 1) / (m + p − 1) of the slots idle.
"""

from __future__ import annotations

from typing import NamedTuple

from qfleet.config.config import PipelineSchedule

MICRO_BATCHES_PER_STAGE = 4
"""By default: stages are then idle for less than a fifth of the slots (1811.06965, 2.3)."""


class Slot(NamedTuple):
    """One pass of one micro-batch."""

    is_forward: bool
    micro_batch: int


def make_schedule(
    kind: PipelineSchedule, stage: int, stages: int, micro_batches: int
) -> list[Slot]:
    """Return what a stage computes for one batch, in order."""
    ahead = micro_batches if kind == "gpipe" else min(stages - stage, micro_batches)
    slots = [Slot(True, i) for i in range(ahead)]
    for i in range(micro_batches):
        slots.append(Slot(False, i))
        if ahead + i < micro_batches:
            slots.append(Slot(True, ahead + i))
    return slots
