"""A core of its own for each process that plays Atari games.

The pool of games has a thread, which takes turns with the one that acts. The system moves the two
between cores, away from their caches: with 16 workers on 16 cores, a step took a sixth more
processor time than with a core for each worker (docs/speedup.md).

Other environments are left alone: they may start programs, which would inherit the limit.
"""

from __future__ import annotations

import contextlib
import os
import socket

from qfleet.config.config import Config
from qfleet.core.cores import usable_cores
from qfleet.envs.registry import ale_game

CLAIM = "\0qfleet-core-"
"""Begins a name that Linux knows once per machine and forgets when its process ends, however that
ends (an abstract socket)."""


def take_core(config: Config) -> socket.socket | None:
    """Keep this process's threads on a core that no other took; return the claim, or None.

    The first core is left to servers, learner and driver, and so is everything if there are more
    workers than cores.
    """
    if ale_game(config.env) is None or config.threads > 1 or config.workers > usable_cores():
        return None
    if not hasattr(os, "sched_setaffinity"):  # macOS
        return None
    for core in sorted(os.sched_getaffinity(0))[1:]:
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            claim.bind(f"{CLAIM}{core}")
        except OSError:
            claim.close()
            continue
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.sched_setaffinity(int(thread), {core})
        return claim
    return None
