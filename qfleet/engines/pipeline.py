"""The pipeline engine: collecting goes on in a thread while the learner learns.

The serial loop with its parts placed otherwise (``one_process.py``): the actor works one
block ahead in a thread with a network of its own, environments step in their own threads or
processes, inference runs where it is quickest, and on an accelerator the updates of a block are one
launch that nobody waits for. The order in which blocks enter the memory and updates are made is
that of ``serial``, so the replay ratio is exact.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from qfleet.engines import serial
from qfleet.engines.one_process import build
from qfleet.engines.parts import Parts

__all__ = ["build", "run"]


def run(parts: Parts, keep_going: Callable[[], bool]) -> None:
    """Advance the loop until ``keep_going`` says no, then wait for the device."""
    serial.run(parts, keep_going)
    if parts.device.type != "cpu":
        torch.accelerator.synchronize(parts.device)
