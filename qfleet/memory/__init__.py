"""Blocks in, batches out. ``ring`` stores, ``samplers`` choose, ``sizing`` refuses; ``rollout`` is
for learning without replay."""

from __future__ import annotations

from qfleet.memory.ring import Ring
from qfleet.memory.rollout import Rollout
from qfleet.memory.samplers import PrioritizedSampler, Sampler, UniformSampler
from qfleet.memory.sizing import available_bytes, check_fits, largest_capacity, replay_bytes

__all__ = [
    "PrioritizedSampler",
    "Ring",
    "Rollout",
    "Sampler",
    "UniformSampler",
    "available_bytes",
    "check_fits",
    "largest_capacity",
    "replay_bytes",
]
