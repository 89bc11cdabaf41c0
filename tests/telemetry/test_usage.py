"""What a run uses: seconds of processes that begin and end, counters of energy, and prices."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from qfleet.telemetry import usage
from qfleet.telemetry.report import final_report
from qfleet.telemetry.usage import Usage, UsageMeter, cost, cost_line, processor_s
from support.processes import needs_proc
from support.waiting import wait_until

BUSY = "import time\nwhile time.process_time() < 1.0: pass\nprint(flush=True)\ninput()"
"""A program that computes for 1 s, says so, and waits."""
CPU = torch.device("cpu")


@pytest.fixture
def powercap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of 10 J so far, whose counter ends at 100 J, with its cores and its memory."""
    monkeypatch.setattr(usage, "POWERCAP", tmp_path)
    for domain, name, microjoules in (
        ("intel-rapl:0", "package-0", 10_000_000),
        ("intel-rapl:0:0", "core", 7_000_000),
        ("intel-rapl:0:1", "dram", 1_000_000),
        ("intel-rapl:1", "psys", 30_000_000),
    ):
        folder = tmp_path / domain
        folder.mkdir()
        (folder / "name").write_text(f"{name}\n")
        (folder / "energy_uj").write_text(f"{microjoules}\n")
        (folder / "max_energy_range_uj").write_text("100000000\n")
    return tmp_path


@needs_proc
def test_a_child_counts_while_it_runs_and_after_its_end() -> None:
    before_s = processor_s()
    with subprocess.Popen(
        [sys.executable, "-c", BUSY], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        running_s = processor_s() - before_s
        assert running_s >= 0.95
        child.communicate(b"\n")
    # Once, not twice: the child has ended and was waited for. To end takes it some time as well.
    assert running_s <= processor_s() - before_s < running_s + 0.9


@needs_proc
def test_grandchildren_count_too() -> None:
    middle = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {BUSY!r}])"
    before_s = processor_s()
    with subprocess.Popen(
        [sys.executable, "-c", middle], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert processor_s() - before_s >= 0.95
        child.communicate(b"\n")


def test_energy_is_that_of_packages_and_memory(powercap: Path) -> None:
    meter = UsageMeter(CPU)
    (powercap / "intel-rapl:0" / "energy_uj").write_text("15000000\n")
    (powercap / "intel-rapl:0:0" / "energy_uj").write_text("90000000\n")  # part of the package
    (powercap / "intel-rapl:0:1" / "energy_uj").write_text("3000000\n")
    (powercap / "intel-rapl:1" / "energy_uj").write_text("60000000\n")  # contains the package
    assert meter.read().joules == pytest.approx(7.0)
    assert meter.read().joules == pytest.approx(7.0)


def test_a_counter_of_energy_that_begins_again_is_followed(powercap: Path) -> None:
    meter = UsageMeter(CPU)
    for joules in (90, 20, 95):
        (powercap / "intel-rapl:0" / "energy_uj").write_text(f"{joules * 10**6}\n")
        used = meter.read()
    assert used.joules == pytest.approx(80 + 30 + 75)


def test_keeping_up_follows_a_counter_that_begins_again_twice(
    powercap: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage, "KEEP_UP_S", 0.0)
    meter = UsageMeter(CPU)
    for joules in (90, 20, 95, 5):
        (powercap / "intel-rapl:0" / "energy_uj").write_text(f"{joules * 10**6}\n")
        meter.keep_up()
    monkeypatch.setattr(usage, "KEEP_UP_S", 60.0)
    (powercap / "intel-rapl:0" / "energy_uj").write_text(f"{6 * 10**6}\n")
    meter.keep_up()  # too soon: read only with the next two lines
    assert meter.read().joules == pytest.approx(80 + 30 + 75 + 10 + 1)


def test_without_counters_energy_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage, "POWERCAP", tmp_path / "none")
    assert UsageMeter(CPU).read().joules is None


class FakeNvml:
    """A GPU that has used 7000 mJ more at every look; ``failure`` is NVML's code of its handle."""

    def __init__(self, failure: int = 0) -> None:
        self._failure, self._looks = failure, 0
        self.asked: list[bytes] = []

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, _handle: object) -> int:
        self.asked.append(uuid)
        return self._failure

    def nvmlDeviceGetTotalEnergyConsumption(self, _handle: object, millijoules: Any) -> int:
        self._looks += 1
        millijoules._obj.value = 7000 * self._looks
        return 0


@pytest.mark.parametrize(("failure", "joules"), [(0, 14.0), (6, None)])
def test_the_energy_of_a_gpu_is_found_by_its_uuid(
    failure: int, joules: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = FakeNvml(failure)
    monkeypatch.setattr(usage, "POWERCAP", tmp_path)
    monkeypatch.setattr(usage, "device_id", lambda _: "GPU-12ab")
    monkeypatch.setattr(usage.ctypes, "CDLL", lambda _: library)
    meter = UsageMeter(torch.device("cuda"))
    meter.read()
    assert meter.read().joules == joules
    assert library.asked == [b"GPU-12ab"]


def test_an_accelerator_is_held_all_the_time() -> None:
    before_s = time.monotonic()
    meter = UsageMeter(torch.device("meta"))  # neither a CPU nor a GPU
    wait_until(lambda: (meter.read().device_s or 0) > 0.05, "some time")
    used = meter.read().device_s
    assert used is not None
    assert used <= time.monotonic() - before_s
    assert UsageMeter(CPU).read().device_s is None


def test_usage_adds_up_and_unknown_stays_unknown() -> None:
    both = Usage(1.0, None, 5.0).plus(Usage(2.0, 3.0, None))
    assert both == Usage(3.0, 3.0, None)  # no device in the first part; its joules do not suffice
    assert Usage(1.0).plus(Usage(2.0)) == Usage(3.0, None, None)
    assert Usage().plus(Usage(2.0, 3.0, 4.0)) == Usage(2.0, 3.0, 4.0)


def test_the_cost_is_that_of_hours_with_a_price() -> None:
    used = Usage(7200.0, 1800.0)
    assert cost(used, None, None) is None
    assert cost(used, 0.05, 1.2) == {"total": 0.7, "per_cpu_hour": 0.05, "per_gpu_hour": 1.2}
    assert cost(used, None, 1.2) == {"total": 0.6, "per_cpu_hour": None, "per_gpu_hour": 1.2}
    alone = cost(Usage(7200.0), 0.05, 1.2)
    assert alone is not None
    assert alone["total"] == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("device_s", "prices", "line"),
    [
        (14.4, (0.05, 1.2), "0.031 processor-hours, 0.004 device-hours: 0.00635 (at 0.05 and 1.2"),
        (None, (0.05, 1.2), "0.031 processor-hours: 0.00155 (at 0.05 per hour)"),
        (14.4, (0.05, None), "0.004 device-hours: 0.00155 (at 0.05 and no price per hour)"),
    ],
)
def test_the_cost_is_one_line(
    device_s: float | None, prices: tuple[float | None, float | None], line: str
) -> None:
    used = Usage(111.6, device_s)
    result = {"processor_s": 111.6, "device_s": device_s, "cost": cost(used, *prices)}
    assert line in cost_line(result)
    assert f"\n  cost       {cost_line(result)}\n" in final_report(result, Path("x"), None).plain


def test_without_prices_there_is_no_line() -> None:
    assert cost_line({"processor_s": 3600.0, "device_s": None, "cost": None}) == ""
    assert cost_line({}) == ""  # a result of an older version
