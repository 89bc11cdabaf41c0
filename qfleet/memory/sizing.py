"""The check that a replay memory fits, made before anything is allocated.

In: an environment's spec and the requested capacity. Out: nothing, or a MemoryRefusedError that
names the largest capacity that would fit.
"""

from __future__ import annotations

import bisect
import os
import shutil
import sys
from pathlib import Path, PurePosixPath

from qfleet.core.errors import MemoryRefusedError
from qfleet.core.types import EnvSpec
from qfleet.memory.columns import column_bytes, column_layout, column_path
from qfleet.memory.compression import Compression
from qfleet.memory.samplers import prioritized_bytes

USABLE_PERCENT = 90
"""Percentage of the available memory that replay may use; the rest of the program uses the rest."""


def replay_bytes(
    spec: EnvSpec,
    num_envs: int,
    capacity: int,
    prioritized: bool,
    compression: Compression = "none",
) -> int:
    """Return the bytes of a full Ring of this capacity and of its sampler.

    The size of compressed frames is an estimate: see ``compression.ASSUMED_RATIO``.
    """
    slots = capacity // num_envs * num_envs
    leaves = prioritized_bytes(slots) if prioritized else 0
    return column_bytes(spec, slots, compression) + leaves


def check_fits(
    spec: EnvSpec,
    num_envs: int,
    capacity: int,
    prioritized: bool,
    budget_bytes: int | None = None,
    on_disk: Path | None = None,
    compression: Compression = "none",
    memories: int = 1,
) -> None:
    """Raise MemoryRefusedError if a Ring of this capacity, or several, would not fit.

    ``budget_bytes`` replaces the measured available memory (for example, for a GPU); ``on_disk`` is
    the folder of a memory-mapped ring, whose free disk space is then checked instead of RAM.
    """
    if budget_bytes is not None:
        available = budget_bytes
    elif on_disk is not None:
        available = _free_disk_bytes(on_disk)
    else:
        available = available_bytes()
    usable = available * USABLE_PERCENT // 100
    needed = memories * replay_bytes(spec, num_envs, capacity, prioritized, compression)
    if needed <= usable:
        return
    share = available // memories
    largest = largest_capacity(spec, num_envs, prioritized, share, compression)
    where = "of memory is available" if on_disk is None else f"is free for '{on_disk}'"
    fix = f"use --buffer-size {largest} or less" if largest else "no --buffer-size fits"
    if on_disk is None and compression == "none" and memories == 1:
        fix += ", or keep it in files with --replay-dir"
    times = f"{memories} × " if memories > 1 else ""
    raise MemoryRefusedError(
        f"replay of {times}{capacity} transitions needs {_human(needed)} but "
        f"{_human(available)} {where} ({USABLE_PERCENT} % usable); {fix}"
    )


def largest_capacity(
    spec: EnvSpec,
    num_envs: int,
    prioritized: bool,
    available: int,
    compression: Compression = "none",
) -> int:
    """Return the largest capacity that ``check_fits`` accepts with ``available`` bytes."""
    fitting_rows = bisect.bisect_right(
        range(1, sys.maxsize),
        available * USABLE_PERCENT // 100,
        key=lambda rows: replay_bytes(spec, num_envs, rows * num_envs, prioritized, compression),
    )
    return fitting_rows * num_envs


def _human(size_bytes: int) -> str:
    size, unit = float(size_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.4g} {unit}"


def _free_disk_bytes(directory: Path) -> int:
    """Return the free space for the folder, including the files of an earlier ring there."""
    existing = directory.absolute()
    while not existing.exists():
        existing = existing.parent
    names = column_layout(EnvSpec("", (), "uint8", 1), 0)
    paths = [column_path(directory, name) for name in names]
    reused = sum(path.stat().st_size for path in paths if path.exists())
    return shutil.disk_usage(existing).free + reused


def available_bytes(root: Path = Path("/")) -> int:
    """Return the memory that this process may still allocate: the machine's, or a cgroup's limit.

    ``root`` is the folder that contains proc and sys.
    """
    return min([_machine_bytes(root), *_cgroup_headrooms(root)])


def _machine_bytes(root: Path) -> int:
    try:
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    for pages in ("SC_AVPHYS_PAGES", "SC_PHYS_PAGES"):
        try:
            return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")
        except (AttributeError, ValueError, OSError):
            continue
    # If the amount is unknown, no capacity is refused.
    return sys.maxsize


def _cgroup_headrooms(root: Path) -> list[int]:
    """Return limit minus usage of each limited memory cgroup, from this process's to the root."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    headrooms = []
    for line in lines:
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0":
            mount, limit, usage = root / "sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            mount = root / "sys/fs/cgroup/memory"
            limit, usage = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        # Inside a container the path is often the host's path, which does not exist there; its
        # limit is then at the mount's root, the last entry of this loop.
        own = PurePosixPath(path.lstrip("/"))
        for group in (own, *own.parents):
            headroom = _headroom_bytes(mount / group, limit, usage)
            if headroom is not None:
                headrooms.append(headroom)
    return headrooms


def _headroom_bytes(group: Path, limit_name: str, usage_name: str) -> int | None:
    try:
        limit = (group / limit_name).read_text().strip()
        usage = int((group / usage_name).read_text())
        stat = (group / "memory.stat").read_text().splitlines()
    except OSError:
        return None
    if limit == "max":
        return None
    # Usage includes cached file pages, which the kernel releases when memory is requested.
    counts = dict(line.split(None, 1) for line in stat)
    cached = int(counts.get("total_inactive_file", counts.get("inactive_file", "0")))
    return max(int(limit) - max(usage - cached, 0), 0)
