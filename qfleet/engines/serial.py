"""The serial engine: collect and learn take turns on one thread.

It is the plainest placement of the parts, and the one that every other engine is checked against.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from qfleet.agent.actor import Actor
from qfleet.agent.collectors import Inline
from qfleet.agent.evaluation import HostEvaluator
from qfleet.agent.inference import HostInference
from qfleet.agent.schedules import rows_per_block
from qfleet.agent.weights import SameWeights
from qfleet.config.config import Config
from qfleet.core.seeding import Seeds
from qfleet.core.types import Clock, Updater
from qfleet.engines.factories import make_groups, make_learner, make_memory, training_env_seed
from qfleet.engines.loop import RateLimiter, collect, learn
from qfleet.engines.parts import LoopParts
from qfleet.engines.placement import Placement
from qfleet.engines.torch_settings import set_threads
from qfleet.engines.tuning import apply_asked
from qfleet.telemetry.faults import FaultLog
from qfleet.telemetry.timers import Timers
from qfleet.telemetry.trace import Trace


def build(
    config: Config,
    faults: FaultLog,
    restarted_at: int = 0,
    trace: Trace | None = None,
    members: Sequence[int] | None = None,
    *,
    make_updater: Callable[..., Updater] | None = None,
    ladder: NDArray[np.float32] | None = None,
) -> LoopParts:
    """Create the parts; populations are refused by validation, so ``members`` is agent 0.

    For the workers of a parameter server: ``make_updater(weights, timers=…)`` makes the updater
    that asks the servers, and ``ladder`` is the ε of each env.
    """
    del members
    seeds = Seeds.of(config.seed)
    with contextlib.ExitStack() as made:
        envs = make_groups(config, training_env_seed(seeds, restarted_at), faults)
        for group in envs:
            made.callback(group.close)
        spec = envs[0].spec
        place = Placement.of(config, spec, any(group.in_background for group in envs))
        set_threads(config.threads, spec)
        clock = Clock(frame_skip=spec.frame_skip)
        timers = Timers(trace.lane("learner") if trace else None)
        # The memory asks the learner for values, and the learner the memory for samples.
        memory = make_memory(config, spec, place, lambda obs: learner.state_values(obs))
        made.callback(memory.close)
        updater = functools.partial(make_updater, timers=timers) if make_updater else None
        learner = make_learner(config, spec, place, memory, clock, timers, updater=updater)
        apply_asked(config, learner.networks)
        channel = SameWeights()
        actor = Actor(
            envs,
            HostInference(learner.online, place.device, spec.obs_dtype, seeds.actor),
            config,
            timers,
            rows_per_block(config),
            seeds.actor,
            ladder=ladder,
        )
        evaluator = HostEvaluator(config, learner.online, place.device, seeds.eval_envs, faults)
        made.callback(evaluator.close)
        return LoopParts(
            config=config,
            spec=spec,
            device=place.device,
            seeds=seeds,
            env_seeds=[seed for group in envs for seed in group.seeds],
            clock=clock,
            timers=[timers],
            faults=faults,
            collector=Inline(actor, channel, clock),
            evaluator=evaluator,
            memory=memory,
            learner=learner,
            channel=channel,
            limiter=RateLimiter(config, clock, memory),
            notes=list(place.notes),
            closing=made.pop_all(),
        )


def run(parts: LoopParts, keep_going: Callable[[], bool]) -> None:
    """Advance the loop until ``keep_going`` returns False; it is called when no update is owed."""
    collecting = collect(
        parts.collector, parts.memory, parts.channel, parts.limiter, parts.clock, parts.timers[0]
    )
    learning = learn(parts.learner, parts.limiter, parts.channel, parts.clock)
    while True:
        if not parts.limiter.may_collect():
            next(learning)
        elif keep_going():
            next(collecting)
        else:
            return
