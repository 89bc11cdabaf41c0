"""Marks of the tests that start Ray clusters.

They run one after another, in one process of pytest-xdist: two clusters at once have each a dozen
processes, and are slower together than in turn.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from qfleet.engines.cluster.ray_cluster import TIMEOUT_S, Cluster, open_cluster
from qfleet.engines.parameter_server import fleet
from qfleet.engines.parameter_server.wire import INLINE_VECTOR_BYTES
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


@pytest.fixture(scope="module")
def shared_cluster() -> Iterator[None]:
    """One cluster for all parameter servers of a module: to start it takes seconds.

    Processes of the cluster have the environment of the module's first test.
    """

    def open_shared(
        *_: object, timeout_s: float = TIMEOUT_S, **__: object
    ) -> contextlib.AbstractContextManager[Cluster]:
        return contextlib.nullcontext(dataclasses.replace(cluster, timeout_s=timeout_s))

    with (
        open_cluster(3, inline_bytes=INLINE_VECTOR_BYTES) as cluster,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(fleet, "open_cluster", open_shared)
        yield


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
