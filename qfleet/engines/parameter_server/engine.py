"""The parameter-server engine: workers collect and learn, servers hold the weights.

Every worker runs the loop of the serial engine in a process of its own; this process starts them,
calls them slice by slice, and asks the run's clockwork in between.
"""

from __future__ import annotations

from collections.abc import Callable

from qfleet.engines.parameter_server.building import build
from qfleet.engines.parts import Parts

__all__ = ["build", "run"]


def run(parts: Parts, keep_going: Callable[[], bool]) -> None:
    assert parts.fleet is not None, "build() gives this engine a fleet"
    parts.fleet.run(keep_going, lambda: parts.learner.lr_scale)
