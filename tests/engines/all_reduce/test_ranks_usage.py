"""What all ranks use together: reports of ranks that are no children, and their GPUs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from qfleet.engines.all_reduce import engine
from qfleet.engines.all_reduce.engine import RanksHook
from qfleet.telemetry.usage import Usage

HERE = Usage(processor_s=10.0, device_s=8.0, joules=5.0)


def make_hook(*ranks: tuple[str, str]) -> RanksHook:
    """Ranks by host and GPU; each has used 3 s."""
    reports: list[Any] = [
        {"host": host, "device": device, "processor_s": 3.0, "seconds": {"learn": 3.0, "idle": 1.0}}
        for host, device in ranks
    ]
    parts: Any = SimpleNamespace(group=SimpleNamespace(), report=lambda: reports[0])
    hook = RanksHook(parts)
    hook._reports = dict(enumerate(reports[1:], 1))
    return hook


@pytest.mark.parametrize(("launched", "used_s"), [(None, 10.0), (object(), 16.0)])
def test_ranks_that_a_launcher_has_started_are_added(
    launched: object, used_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "launched_world", lambda: launched)
    used = make_hook(("a", ""), ("a", ""), ("a", "")).usage(Usage(processor_s=10.0, joules=5.0))
    assert used == Usage(used_s, None, 5.0)


@pytest.mark.parametrize(
    ("ranks", "device_s", "joules"),
    [
        ([("a", "GPU-1"), ("a", "GPU-1")], 8.0, 5.0),  # they share one
        ([("a", "GPU-1"), ("a", "GPU-2")], 16.0, None),
        ([("a", "GPU-1"), ("b", "GPU-1")], 16.0, None),
    ],
)
def test_every_gpu_is_held_once(
    ranks: list[tuple[str, str]], device_s: float, joules: float | None
) -> None:
    used = make_hook(*ranks).usage(HERE)
    assert (used.device_s, used.joules) == (device_s, joules)


def test_shares_of_every_rank_are_logged() -> None:
    scalars = make_hook(("a", ""), ("b", "")).scalars(wall_s=100.0)
    assert scalars["rank_1/time/share_computing"] == 0.75
    assert scalars["rank_0/time/share_waiting"] == 0.25
    assert len(scalars) == 2 * 3
