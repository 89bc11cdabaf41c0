"""The cores that a process may use."""

from __future__ import annotations

import os

import pytest

from qfleet.core.cores import usable_cores


def test_cores_that_are_forbidden_do_not_count() -> None:
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert usable_cores() == 1
    finally:
        os.sched_setaffinity(0, allowed)
    assert usable_cores() == len(allowed)


def test_all_cores_count_where_none_can_be_forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    assert usable_cores() == os.cpu_count()
