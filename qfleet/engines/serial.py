"""The serial engine: collect and learn take turns on one thread.

It is the plainest placement of the parts, and the one every other engine is checked against.
"""

from __future__ import annotations

from collections.abc import Callable

from qfleet.engines.loop import collect, learn
from qfleet.engines.one_process import build
from qfleet.engines.parts import Parts

__all__ = ["build", "run"]


def run(parts: Parts, keep_going: Callable[[], bool]) -> None:
    """Advance the loop until ``keep_going`` says no; it is asked when no update is owed."""
    collecting = collect(
        parts.collector, parts.memory, parts.channel, parts.config, parts.clock, parts.timers[0]
    )
    learning = learn(parts.learner, parts.limiter, parts.channel, parts.clock)
    while True:
        if not parts.limiter.may_collect():
            next(learning)
        elif keep_going():
            next(collecting)
        else:
            return
