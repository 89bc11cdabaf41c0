"""Cores for environments; time limit, threads and processes of C++ pools of Atari games."""

from __future__ import annotations

import os

from qfleet.config.config import Config
from qfleet.core.cores import usable_cores

MAX_FRAMES = 108_000
"""Time limit in emulator frames: half an hour of play, as in the published results."""
SHARE = 1.5
"""Threads per core over all groups: enough that no core is idle while one group waits for its
actions, few enough that inference does not wait for a core. With 128 envs in 4 groups on 16 cores,
one thread per core for each group (4 threads per core in all) made 24.0k steps/s where 1.5 made
26.5k; the envs alone made 29.0k and 30.4k."""
PROCESSES_PER_CORE = 0.5
"""Worker processes per core over all groups, if pools of Atari games live in processes. More would
create the games sooner, but every process is one more message per step."""


def cores_for(config: Config) -> int:
    """Return the cores for the environments of this process; ranks of a machine share them."""
    cores = usable_cores()
    if config.engine != "all-reduce":
        return cores
    names = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
    ranks = next((os.environ[name] for name in names if name in os.environ), config.workers)
    return max(1, cores // int(ranks))


def pool_threads(config: Config, num_envs: int, *, training: bool) -> int:
    """Return the number of threads for one group of envs; evaluation has a single group.

    A thread that acts itself waits for its envs, so that its ``threads`` are theirs too.
    """
    cores = cores_for(config) if training else usable_cores()
    if training and config.threads and config.engine in ("serial", "actors"):
        cores = config.threads
    groups = config.env_groups if training else 1
    threads = cores if groups <= 1 else -(-int(SHARE * cores) // groups)
    return max(1, min(num_envs, threads))


def pool_processes(config: Config, num_envs: int) -> int:
    """Return the number of processes for the pools of one group of envs."""
    processes = int(PROCESSES_PER_CORE * cores_for(config)) // max(1, config.env_groups)
    return max(1, min(num_envs, processes))
