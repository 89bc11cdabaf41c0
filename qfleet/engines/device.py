"""The device engine: environments, acting, replay and learning on one device.

The serial loop with its parts placed otherwise (``one_process.py``): the actor steps tensor
environments where the learner is, and the memory lies there too. Everything is queued in the order
of ``serial``. On an accelerator the host only launches, and waits for it where something is read:
logs, evaluations, checkpoints, and here at the end.
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
