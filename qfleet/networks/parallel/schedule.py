"""Pipeline schedules: in which order a stage computes the passes of its micro-batches.

``gpipe`` (1811.06965) runs all forward passes, then all backward passes, so a stage keeps the
activations of all micro-batches. ``1f1b`` (1806.03377) begins a backward pass as soon as it can, so
that stage s of p keeps those of p − s micro-batches at most. Both are idle equally long.
"""

from __future__ import annotations

from collections.abc import Sequence
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


def idle_share(schedules: Sequence[Sequence[Slot]]) -> float:
    """Return the share of slots in which stages wait, if all passes take one slot each.

    A pass begins once its stage is free and the neighbour has finished the one that it needs. For p
    stages and m micro-batches the share is (p − 1) / (m + p − 1).
    """
    ends, free = dict[tuple[int, Slot], int](), [0] * len(schedules)
    left = [list(schedule) for schedule in schedules]
    while any(left):
        for stage, slots in enumerate(left):
            while slots:
                before = stage - 1 if slots[0].is_forward else stage + 1
                needed = (before, slots[0])
                if 0 <= before < len(left) and needed not in ends:
                    break
                free[stage] = max(free[stage], ends.get(needed, 0)) + 1
                ends[stage, slots.pop(0)] = free[stage]
    return 1 - sum(map(len, schedules)) / (len(schedules) * max(free))
