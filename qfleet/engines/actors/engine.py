"""The actors engine (Ape-X): many actors and replay shards in processes, one learner here.

It is the serial loop with its parts placed otherwise (``building.py``): blocks come from whichever
actor is done first and go to its shard without passing through this process, samples are drawn by
the shards while the learner learns. The replay ratio is held where blocks enter the memory, by the
ordinary limiter.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from qfleet.engines import serial
from qfleet.engines.actors.building import build
from qfleet.engines.actors.replay import NothingToSample
from qfleet.engines.parts import Parts

__all__ = ["build", "run"]


def run(parts: Parts, keep_going: Callable[[], bool]) -> None:
    """Advance the loop until ``keep_going`` says no, then wait for the device."""
    while True:
        try:
            serial.run(parts, keep_going)
            break
        except NothingToSample:
            # All shards died in the middle of a burst, which was told. Collecting comes first now.
            continue
    if parts.device.type != "cpu":
        torch.accelerator.synchronize(parts.device)
