"""The result of a run, and the scalars of its log.

In: the parts and the state of a run. Out: a ``Result``, and scalars for the log.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from qfleet.agent import schedules
from qfleet.agent.evaluation import Evaluation
from qfleet.engines.device import PopulationHook
from qfleet.engines.parts import Parts
from qfleet.telemetry.fleet import TRAFFIC
from qfleet.telemetry.timers import Timers
from qfleet.telemetry.usage import Usage, cost, hardware
from qfleet.training.standings import Standings


@dataclass(frozen=True)
class Result:
    """The summary of a run; ``result.json`` has exactly these keys."""

    env_id: str
    algo: str
    engine: str
    seed: int
    env_steps: int
    frames: int
    updates: int
    wall_s: float
    env_steps_per_s: float | None
    updates_per_s: float | None
    replay_ratio: float | None
    eval_return_mean: float | None
    eval_return_std: float | None
    best_eval_return: float | None
    stopped_by: str
    time_share: dict[str, float | None]
    """Share of the wall time per stage, summed over threads: two busy threads give 2."""
    rates: dict[str, float | str | None] | None
    """Env steps per second of each stage alone and of all together; null if not measured."""
    communication: dict[str, int | None]
    faults: dict[str, int]
    peak_rss_bytes: int | None
    peak_device_bytes: int | None
    agents: list[dict[str, Any]] | None
    """Number, seed, varied values and returns of each agent of a population; else null."""
    fleet: dict[str, Any] | None
    """Account of a run's processes (docs/parameter-server.md); null if there is only one."""
    resources: dict[str, dict[str, float]] = field(default_factory=dict)
    """Time of each thread and of the accelerator by stage, in shares that add up to 1 (``workers``:
    the mean of all); empty in results of older versions."""
    processor_s: float | None = None
    """User and system seconds of all processes; null in results of older versions, as the next."""
    device_s: float | None = None
    """Wall seconds times accelerators held; null without any."""
    joules: float | None = None
    """Energy of processors and accelerator, with other programs on them; null if not reported."""
    cost: dict[str, float | None] | None = None
    """``total`` of the processor- and device-hours and both prices; null without prices."""
    eval_returns: list[float] = field(default_factory=list)
    """Return of each episode of the last evaluation, agent-major; empty in older versions."""
    hardware: dict[str, Any] | None = None
    """System, cores and the accelerator that was used; null in results of older versions."""


def peak_rss_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def peak_device_bytes(device: torch.device) -> int | None:
    return int(torch.cuda.max_memory_allocated(device)) if device.type == "cuda" else None


def make_result(
    parts: Parts,
    *,
    wall_s: float,
    run_s: float,
    evaluation: Evaluation | None,
    best_return: float | None,
    standings: Standings,
    stopped_by: str,
    usage: Usage,
) -> Result:
    """Return the result so far; ``rates`` are filled in after they are measured.

    ``run_s``: seconds of this invocation, ``wall_s`` those before a resume included.
    """
    config, clock = parts.config, parts.clock
    samples = clock.updates * config.batch_size
    agents = None
    if (population := parts.find(PopulationHook)) is not None:
        values = dict(zip(parts.members, population.agents.in_force(), strict=True))
        agents = standings.table(config.seed, clock.env_steps, values)
    # Fields that an engine's hook may set.
    own: dict[str, Any] = {"communication": dict.fromkeys(TRAFFIC), "fleet": None}
    for hook in parts.hooks:
        own |= hook.result()
    return Result(
        env_id=config.env,
        algo=config.algo,
        engine=config.engine,
        seed=config.seed,
        env_steps=clock.env_steps,
        frames=clock.frames,
        updates=clock.updates,
        wall_s=wall_s,
        env_steps_per_s=standings.steps_of_all(clock.env_steps) / wall_s,
        updates_per_s=clock.updates / wall_s,
        replay_ratio=samples / clock.env_steps if clock.env_steps else None,
        eval_return_mean=evaluation.mean if evaluation else None,
        eval_return_std=evaluation.std if evaluation else None,
        best_eval_return=best_return,
        stopped_by=stopped_by,
        time_share=Timers.merged(parts.timers).shares(wall_s),
        resources=parts.resources(wall_s, run_s),
        rates=None,
        faults=parts.faults.counts,
        peak_rss_bytes=peak_rss_bytes(),
        peak_device_bytes=peak_device_bytes(parts.device),
        agents=agents,
        **asdict(usage),
        eval_returns=list(evaluation.returns) if evaluation else [],
        hardware=hardware(parts.device),
        cost=cost(usage, config.price_per_cpu_hour, config.price_per_gpu_hour),
        **own,
    )


def learning_scalars(parts: Parts, metrics: Mapping[str, float]) -> dict[str, float | None]:
    """Return the scalars of learning; ``metrics``: the learner's, empty before the first update."""
    rate = schedules.learning_rate(parts.config, parts.clock.env_steps) * parts.model.lr_scale
    shown = ["loss", "grad_norm", "q_mean", "abs_q_max"]
    shown += ["entropy"] if parts.config.head == "actor-critic" else []
    return {
        "train/n_updates": parts.clock.updates,
        "train/learning_rate": rate,
        **{f"train/{name}": metrics.get(name) for name in shown},
    }
