"""A core of its own for each process that plays Atari games, where they take most of a machine.

The pool of games has a thread, which takes turns with the one that acts. If the machine is full,
the system moves the two between cores, away from their caches: with 16 workers on 16 cores, a step
took a sixth more processor time than with a core for each worker (docs/speedup.md).

Other environments are left alone: they may start programs, which would inherit the limit. So is a
run that leaves half of the cores to others, which may be in containers and do the same unseen.
"""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

from qfleet.config.config import Config
from qfleet.core.cores import usable_cores
from qfleet.envs.registry import ale_game

CLAIM = "\0qfleet-core-"
"""Begins a name that Linux knows once per machine and forgets when its process ends, however that
ends (an abstract socket)."""
TOPOLOGY = Path("/sys/devices/system/cpu")


def take_core(config: Config) -> socket.socket | None:
    """Keep this process's threads on a core that no other took; return the claim, or None.

    The first core is left to servers, learner and driver.
    """
    cores = usable_cores()
    if not cores // 2 < config.workers <= cores or config.threads > 1:
        return None
    if config.data or ale_game(config.env) is None:
        return None
    if not hasattr(os, "sched_setaffinity"):  # macOS
        return None
    for core in sorted(sorted(os.sched_getaffinity(0))[1:], key=_place_in_pair):
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            claim.bind(f"{CLAIM}{core}")
            os.sched_setaffinity(0, {core})
        except OSError:  # taken, or a sandbox refuses it
            claim.close()
            continue
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError):  # it has just ended
                os.sched_setaffinity(int(thread), {core})
        return claim
    return None


def _place_in_pair(core: int) -> int:
    """Return 0 for the first of the logical cores of a physical one, 1 for others or if unknown."""
    try:
        pair = (TOPOLOGY / f"cpu{core}/topology/thread_siblings_list").read_text()
        return int(int(pair.replace("-", ",").split(",")[0]) != core)
    except (OSError, ValueError):
        return 1
