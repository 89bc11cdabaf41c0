"""Marks of the tests that start Ray clusters.

They run one after another, in one process of pytest-xdist: two clusters at once have each a dozen
processes, and are slower together than in turn.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

Test = TypeVar("Test", bound=Callable[..., Any])

# Not importorskip: a Ray that is imported before qfleet has set it up is of no use.
RAY_MARKS = [
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason="needs Ray: pip install 'qfleet[ray]'"
    ),
    pytest.mark.xdist_group("ray"),
]
"""For ``pytestmark``."""


def needs_ray(test: Test) -> Test:
    """Mark one test."""
    for mark in RAY_MARKS:
        test = mark(test)
    return test


def starts_clusters(path: Path) -> bool:
    """Return whether a test file has tests with these marks."""
    return path.is_file() and "support.clusters" in path.read_text(encoding="utf-8")
