"""What a run reports about the processes that it used; for both Ray engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from qfleet.engines.parts import EngineHook
from qfleet.telemetry.fleet import Processes
from qfleet.telemetry.fleet_plots import draw_fleet
from qfleet.telemetry.fleet_table import fleet_lines
from qfleet.telemetry.trace import Trace, merge_lanes


class CountedProcesses(Processes, Protocol):
    """Processes that also report their traffic."""

    def counts(self) -> dict[str, Any]:
        """Return further fields of ``fleet`` in the result."""
        ...

    def communication(self) -> dict[str, int | None]:
        """Return bytes and messages, as in the result."""
        ...


class ProcessesHook(EngineHook):
    """Adds the account of all processes to the result, the terminal, the plots and the trace."""

    def __init__(self, processes: CountedProcesses) -> None:
        self.processes = processes

    def result(self) -> Mapping[str, Any]:
        account = self.processes.account()
        fleet = None
        if account is not None:
            rate = {"env_steps_per_s": self.processes.env_steps_per_s()}
            fleet = account.as_dict() | rate | self.processes.counts()
        return {"fleet": fleet, "communication": self.processes.communication()}

    def on_end(self, folder: Path, trace: Trace | None) -> Sequence[str]:
        if trace is not None:
            merge_lanes(trace, dict(self.processes.lanes()))
        account = self.processes.account()
        if account is None:
            return ()
        draw_fleet(account, folder / "plots")
        return fleet_lines(account)
