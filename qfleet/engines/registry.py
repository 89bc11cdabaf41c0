"""Config → the parts of a run, by its engine."""

from __future__ import annotations

from collections.abc import Sequence

from qfleet.config.config import Config
from qfleet.engines.actors.building import build_actors
from qfleet.engines.one_process import build_one_process
from qfleet.engines.parameter_server.building import build_supervisor
from qfleet.engines.parts import Parts
from qfleet.telemetry.faults import FaultLog
from qfleet.telemetry.trace import Trace


def build(
    config: Config,
    faults: FaultLog,
    restarted_at: int = 0,
    trace: Trace | None = None,
    members: Sequence[int] | None = None,
) -> Parts:
    """All parts of a run; ``restarted_at`` (env steps) gives restarted envs new episodes.

    ``members``: which agents of a population; None: all.
    """
    if config.engine == "actors":
        return build_actors(config, faults, restarted_at, trace)
    if config.engine == "parameter-server":
        return build_supervisor(config, faults, restarted_at, trace)
    return build_one_process(config, faults, restarted_at, trace, members)
