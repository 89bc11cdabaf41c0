"""How many cores there are for this process."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """Return the cores that this process may use: taskset, Slurm and cpusets leave it some only."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        return os.cpu_count() or 1
