"""Reports of a run about the processes that it used, for both Ray engines."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from qfleet.config.config import Config
from qfleet.core.errors import one_line
from qfleet.engines.cluster.baseline import measured_for_s, serial_rate, stored_rate
from qfleet.engines.parts import EngineHook
from qfleet.telemetry.fleet import FleetAccount, Processes, share_scalars
from qfleet.telemetry.fleet_plots import draw_fleet
from qfleet.telemetry.fleet_table import fleet_lines
from qfleet.telemetry.formatting import format_rate
from qfleet.telemetry.trace import Trace, merge_lanes
from qfleet.telemetry.usage import Usage

CLEARLY = 1.2
"""Ratio of rates from which a run is advised not to use workers: a short measurement varies."""


@dataclass
class SteadyRate:
    """Env steps per second from when every process had reported once to the newest report."""

    newest: tuple[float, int] = (0.0, 0)
    """Time of the newest report, and the env steps of all processes by then."""
    _since: tuple[float, int] | None = None

    def record(self, now_s: float, env_steps: int, have_all_reported: bool) -> None:
        self.newest = (now_s, env_steps)
        if self._since is None and have_all_reported:
            self._since = self.newest

    def env_steps_per_s(self) -> float | None:
        if self._since is None or self.newest[0] <= self._since[0]:
            return None
        return (self.newest[1] - self._since[1]) / (self.newest[0] - self._since[0])


class CountedProcesses(Processes, Protocol):
    """Processes that also report their traffic."""

    def counts(self) -> dict[str, Any]:
        """Return further fields of ``fleet`` in the result."""
        ...

    def communication(self) -> dict[str, int | None]:
        """Return bytes and messages, as in the result."""
        ...


@dataclass
class ProcessesHook(EngineHook):
    """Adds the account of all processes to the result, the terminal, the plots and the trace."""

    processes: CountedProcesses
    config: Config
    baseline: float | None = None
    """Env steps per second of one process with the same settings; None: not known."""
    _baseline_processor_s: float = 0.0
    """CPU time of measuring it, which is not part of the run."""

    def on_finish(self, run_s: float, give_up: Callable[[], bool]) -> Sequence[str]:
        """Find the baseline; say so if it is clearly faster than all workers together."""
        rate, measure_s = self.processes.env_steps_per_s(), measured_for_s(run_s)
        named = self.config.baseline
        if rate is None or not (named or measure_s) or self.config.data:
            return ()
        try:
            if named:
                self.baseline = stored_rate(Path(named), self.config)
            else:
                began_s = time.process_time()
                try:
                    self.baseline = serial_rate(self.config, measure_s, give_up)
                finally:
                    self._baseline_processor_s = time.process_time() - began_s
        except Exception as error:  # of any part; the run itself has its results
            return (f"there is no rate of one process for comparison: {one_line(error)}",)
        if self.baseline is None or self.baseline <= CLEARLY * rate:
            return ()
        alone, together = (format_rate(number) for number in (self.baseline, rate))
        return (
            f"this run would be faster without workers: one process makes {alone} env "
            f"steps/s, all workers made {together}; use --engine serial",
        )

    def scalars(self, wall_s: float) -> Mapping[str, float | None]:  # noqa: ARG002
        return share_scalars(self.processes.rows())

    def result(self) -> Mapping[str, Any]:
        account = self._account()
        fleet = None
        if account is not None:
            rate = self.processes.env_steps_per_s()
            speed_up = rate / self.baseline if rate and self.baseline else None
            own = {
                "env_steps_per_s": rate,
                "baseline_env_steps_per_s": self.baseline,
                "speed_up": speed_up,
                "efficiency": speed_up and speed_up / account.mean_workers,
            }
            fleet = account.as_dict() | own | self.processes.counts()
        return {"fleet": fleet, "communication": self.processes.communication()}

    def _account(self) -> FleetAccount | None:
        account = self.processes.account()
        if account is None:
            return None
        own_s = account.driver_processor_s - self._baseline_processor_s
        return replace(account, driver_processor_s=own_s)

    def usage(self, here: Usage) -> Usage:
        """Return the reports of all processes, without Ray's own, in place of the children."""
        account = self._account()
        used_s = here.processor_s if account is None else account.processor_s
        # Of a joined cluster, the energy of this machine is a part that says little.
        joules = None if self.config.address else here.joules
        return replace(here, processor_s=used_s, joules=joules)

    def on_end(self, folder: Path, trace: Trace | None) -> Sequence[str]:
        if trace is not None:
            merge_lanes(trace, dict(self.processes.lanes()))
        account = self._account()
        if account is None:
            return ()
        draw_fleet(account, folder / "plots")
        return fleet_lines(account)
