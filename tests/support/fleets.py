"""Accounts of made-up fleets, with numbers that can be checked by hand."""

from __future__ import annotations

from typing import Any

from qfleet.telemetry.fleet import FleetAccount, ServerAccount, WorkerAccount

SLOW = {"env": 6.0, "act": 0.5, "copy": 0.5, "learn": 1.0, "communicate": 1.0, "idle": 0.0}
"""8 of 10 s computing, 1 communicating, 1 that no span covers."""
QUICK = {"env": 2.0, "act": 1.0, "copy": 0.5, "learn": 0.5, "communicate": 1.0, "idle": 5.0}
"""4 of 10 s computing, 1 communicating, 5 waiting."""


def worker(number: int, env_steps: int, seconds: dict[str, float], **changes: Any) -> WorkerAccount:
    fields: dict[str, Any] = {
        "number": number,
        "host": "here",
        "env_steps": env_steps,
        "updates": env_steps // 4,
        "wall_s": 10.0,
        "processor_s": 3.0,
        "seconds": seconds,
        "bytes_sent": 1000,
        "bytes_received": 3000,
        "messages": 20,
    }
    return WorkerAccount(**fields | changes)


def server(number: int, staleness: dict[int, int], **changes: Any) -> ServerAccount:
    fields: dict[str, Any] = {
        "number": number,
        "version": 50,
        "processor_s": 2.0,
        "received": 60,
        "applied": 50,
        "repeated": 2,
        "dropped": {"too-old": 3},
        "bytes_in": 1500,
        "bytes_out": 4500,
        "staleness": staleness,
    }
    return ServerAccount(**fields | changes)


def fleet(**changes: Any) -> FleetAccount:
    """Worker 0 makes 10 env steps/s, 1 and 2 make 40 and wait half of the time."""
    fields: dict[str, Any] = {
        "update": "async",
        "wall_s": 12.0,
        "driver_processor_s": 1.5,
        "workers": (worker(0, 100, SLOW), worker(1, 400, QUICK), worker(2, 400, QUICK)),
        "servers": (server(0, {0: 10, 1: 5, 2: 3}), server(1, {0: 1, 9: 1})),
    }
    return FleetAccount(**fields | changes)
