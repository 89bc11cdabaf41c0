"""The engines by name. Each is a module with ``build`` and ``run``, imported when it is used."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Protocol, cast

from qfleet.agent.evaluation import check_evaluation_env
from qfleet.config.config import Config
from qfleet.engines.parts import Parts, Setup
from qfleet.envs.adapters import describe_conversions
from qfleet.telemetry.faults import FaultLog
from qfleet.telemetry.trace import Trace

ENGINES = {
    "serial": "qfleet.engines.serial",
    "pipeline": "qfleet.engines.pipeline",
    "device": "qfleet.engines.device",
    "parameter-server": "qfleet.engines.parameter_server.engine",
    "actors": "qfleet.engines.actors.engine",
    "all-reduce": "qfleet.engines.all_reduce.engine",
    "offline": "qfleet.engines.offline",
}
"""Name → module."""


class Engine(Protocol):
    """The functions that the module of an engine has."""

    def build(self, setup: Setup) -> Parts:
        """Create the parts of a run, each where this engine wants it."""
        ...

    def run(self, parts: Parts, keep_going: Callable[[], bool]) -> None:
        """Advance the loop until ``keep_going`` returns False."""
        ...


def engine(name: str) -> Engine:
    """Return the engine's module; ``auto`` that nothing has resolved is ``serial``."""
    return cast(Engine, importlib.import_module(ENGINES["serial" if name == "auto" else name]))


def build(
    config: Config,
    faults: FaultLog,
    restarted_at: int = 0,
    trace: Trace | None = None,
    members: Sequence[int] | None = None,
    *,
    thorough: bool = False,
    report: Callable[[str], None] = lambda _: None,
) -> Parts:
    """Create all parts of a run with the engine of its configuration; see ``Setup``."""
    setup = Setup(config, faults, restarted_at, trace, members, thorough, report)
    parts = engine(config.engine).build(setup)
    try:
        check_evaluation_env(config, parts.spec)
    except BaseException:
        parts.close()
        raise
    parts.notes[:0] = describe_conversions(parts.spec)
    return parts


def run(parts: Parts, keep_going: Callable[[], bool]) -> None:
    """Advance a run with its engine until ``keep_going`` returns False."""
    engine(parts.config.engine).run(parts, keep_going)
