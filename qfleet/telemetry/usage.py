"""What a run uses: seconds of processors and accelerators, joules, and what they cost.

In: counters of this machine; out: ``Usage``. Energy is that of whole processor packages (Linux
powercap, RAPL) and of one NVIDIA GPU (NVML), so other programs on them are included.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qfleet.core.cores import usable_cores

if TYPE_CHECKING:
    import torch

HOUR_S = 3600.0
KEEP_UP_S = 60.0
"""Seconds between two readings of the counters of energy."""
POWERCAP = Path("/sys/class/powercap")
PROC = Path("/proc")


@dataclass(frozen=True)
class Usage:
    """Sums of a run; None where a figure does not apply or is not reported by the hardware."""

    processor_s: float = 0.0
    """User and system time of this process and its children, and of the members of a cluster."""
    device_s: float | None = None
    """Wall seconds times the number of accelerators that were held."""
    joules: float | None = None

    def plus(self, other: Usage) -> Usage:
        if self == Usage():
            return other
        known = self.joules is not None and other.joules is not None
        return Usage(
            self.processor_s + other.processor_s,
            _sum((self.device_s, other.device_s)),
            _sum((self.joules, other.joules)) if known else None,
        )


def cost(
    usage: Usage, price_per_cpu_hour: float | None, price_per_gpu_hour: float | None
) -> dict[str, float | None] | None:
    """Return both prices and the total of those that are given; None without prices."""
    spent = [
        seconds / HOUR_S * price
        for seconds, price in (
            (usage.processor_s, price_per_cpu_hour),
            (usage.device_s or 0.0, price_per_gpu_hour),
        )
        if price is not None
    ]
    prices = {"per_cpu_hour": price_per_cpu_hour, "per_gpu_hour": price_per_gpu_hour}
    return {"total": sum(spent), **prices} if spent else None


def cost_line(result: Mapping[str, Any]) -> str:
    """Return the hours and their price, by the keys of ``result.json``; empty without prices."""
    if not result.get("cost"):
        return ""
    hours, prices = [f"{(result['processor_s'] or 0.0) / HOUR_S:.3g} processor-hours"], ["cpu"]
    if result["device_s"] is not None:
        hours.append(f"{result['device_s'] / HOUR_S:.3g} device-hours")
        prices.append("gpu")
    each = [result["cost"][f"per_{kind}_hour"] for kind in prices]
    given = " and ".join("no price" if price is None else f"{price:g}" for price in each)
    return f"{', '.join(hours)}: {result['cost']['total']:.3g} (at {given} per hour)"


def processor_s() -> float:
    """Return user and system seconds of this process, of ended children and of running ones.

    Running children, and their own, are found on Linux only.
    """
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    own_s = time.process_time() + ended.ru_utime + ended.ru_stime
    return own_s + sum(_with_ended_s(pid) for pid in _descendants(os.getpid()))


def _descendants(pid: int) -> Iterable[int]:
    """Yield the running children of a process, which each of its threads lists, and theirs."""
    for listed in (PROC / str(pid) / "task").glob("*/children"):
        try:
            children = [int(word) for word in listed.read_text().split()]
        except OSError:
            continue  # the thread has ended
        for child in children:
            yield child
            yield from _descendants(child)


def _with_ended_s(pid: int) -> float:
    """Return user and system seconds of a process and of its children that have ended."""
    try:
        text = (PROC / str(pid) / "stat").read_text()
    except OSError:
        return 0.0
    # The name, in brackets, may contain spaces. Fields 14 to 17 of proc(5), counted from field 3.
    ticks = text.rpartition(")")[2].split()[11:15]
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


class UsageMeter:
    """Adds up what is used from its creation on; call ``keep_up`` at least every few minutes."""

    def __init__(self, device: torch.device) -> None:
        self._devices = 0 if device.type == "cpu" else 1
        self._gpu = _gpu_energy_handle(device)
        self._began_s, self._processor_s = time.monotonic(), processor_s()
        self._before, self._read_s = self._counters(), self._began_s
        self._joules = 0.0

    def keep_up(self) -> None:
        """Read the counters of energy now and then: RAPL's begin again at 0 after some 2¹⁸ J."""
        if time.monotonic() - self._read_s > KEEP_UP_S:
            self._count_joules()

    def _count_joules(self) -> None:
        now = self._counters()
        for name, (joules, turn) in now.items():
            since = joules - self._before.get(name, (joules, turn))[0]
            self._joules += since + turn if since < 0 else since
        self._before, self._read_s = now, time.monotonic()

    def read(self) -> Usage:
        self._count_joules()
        held_s = time.monotonic() - self._began_s
        return Usage(
            processor_s() - self._processor_s,
            held_s * self._devices if self._devices else None,
            self._joules if self._before else None,
        )

    def _counters(self) -> dict[str, tuple[float, float]]:
        """Return joules so far of each counter, and after how many it begins again."""
        counters = {}
        for domain in POWERCAP.glob("intel-rapl:*"):
            try:
                # Of parts of a package, only memory is not counted by the package itself.
                # (psys is the whole machine, packages included.)
                kind = (domain / "name").read_text().strip()
                if kind.startswith("package") or kind == "dram":
                    files = ("energy_uj", "max_energy_range_uj")
                    joules, turn = (int((domain / file).read_text()) / 1e6 for file in files)
                    counters[domain.name] = (joules, turn)
            except (OSError, ValueError):
                continue  # often, only root may read them
        if self._gpu is not None:
            library, handle = self._gpu
            millijoules = ctypes.c_ulonglong()
            if library.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(millijoules)) == 0:
                counters["gpu"] = (millijoules.value / 1e3, 0.0)
        return counters


def hardware(device: torch.device) -> dict[str, Any]:
    """Return the system and cores of this machine, and the accelerator if ``device`` is one.

    No other accelerator is asked for its name: that would take memory on it.
    """
    accelerator = "none (CPU only)" if device.type == "cpu" else device.type
    if device.type == "cuda":
        import torch  # the verbs that only read results do not wait for it

        properties = torch.cuda.get_device_properties(device)
        accelerator = f"cuda: {properties.name}, {properties.total_memory / 2**30:.0f} GiB"
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cores": usable_cores(),
        "accelerator": accelerator,
    }


def device_id(device: torch.device) -> str:
    """Return a name of the accelerator that no other on this machine has; empty for a CPU."""
    if device.type != "cuda":
        return "" if device.type == "cpu" else str(device)
    import torch  # the verbs that only read results do not wait for it

    # Not the device's number, which depends on CUDA_VISIBLE_DEVICES.
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def _gpu_energy_handle(device: torch.device) -> tuple[Any, ctypes.c_void_p] | None:
    """Return NVML and its handle of this GPU; None if it is no NVIDIA GPU, or NVML is missing."""
    if device.type != "cuda":
        return None
    try:
        library, handle = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_void_p()
        uuid = device_id(device).encode()
        failed = library.nvmlInit_v2() or library.nvmlDeviceGetHandleByUUID(
            uuid, ctypes.byref(handle)
        )
    except (OSError, AttributeError):
        return None
    return None if failed else (library, handle)


def _sum(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None
