"""Marks of the tests that start Ray clusters.

They run one after another, in one process of pytest-xdist: two clusters at once have each a dozen
processes, and are slower together than in turn.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from qfleet.storage.checkpoint import list_checkpoints, load_checkpoint
from support.messages import holds

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


def check_end(folder: Path, exit_code: int, output: str, victim: str) -> None:
    """Check that a run without its cluster left one line, a result and a checkpoint."""
    assert exit_code == 1, output
    line = output.strip().splitlines()[-1]
    result = json.loads((folder / "result.json").read_text())
    steps = result["env_steps"]
    assert holds(line, victim, f"checkpoint {steps}", f"qfleet resume {folder}")
    assert "Traceback" not in output
    assert steps > 0
    assert result["stopped_by"].startswith("error: ")
    assert victim in result["stopped_by"]
    assert list_checkpoints(folder / "checkpoints") == [steps]
    assert load_checkpoint(folder / "checkpoints").parts["run"]["updates"] > 0


def starts_clusters(path: Path) -> bool:
    """Return whether a test file has tests with these marks."""
    return path.is_file() and "support.clusters" in path.read_text(encoding="utf-8")
