"""The serial engine: collect and learn take turns on one thread.

It is the plainest placement of the parts, and the one that every other engine is checked against.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from qfleet.agent.actor import Actor, Inline
from qfleet.agent.inference import HostInference
from qfleet.agent.learner import Learner
from qfleet.agent.schedules import rows_per_block
from qfleet.core.types import Clock, Updater
from qfleet.engines.factories import make_learner, make_memory
from qfleet.engines.loop import SameWeights, collect, learn
from qfleet.engines.parts import LoopParts, Setup
from qfleet.engines.placement import Placement
from qfleet.engines.torch_settings import set_threads
from qfleet.engines.tuning import apply_precision


def build(
    setup: Setup,
    *,
    updater_factory: Callable[..., Updater] | None = None,
    ladder: NDArray[np.float32] | None = None,
) -> LoopParts:
    """Create the parts.

    The other arguments are for the workers of a parameter server, which reuse this function.
    ``updater_factory(weights, timers=…)`` returns the updater that exchanges gradients, and
    ``ladder`` is one constant ε per env.
    """
    config, seed = setup.config, setup.seeds.actor
    with contextlib.ExitStack() as made:
        envs = setup.make_envs(made)
        spec = envs[0].spec
        in_background = any(group.in_background for group in envs)
        place = Placement.of(config, spec, in_background=in_background)
        set_threads(config.threads, spec)
        clock = Clock(frame_skip=spec.frame_skip)
        timers = setup.make_timers("learner")
        # A lambda, because the learner does not exist yet: a rollout calls it for its returns.
        memory = make_memory(config, spec, place, lambda obs: learner.state_values(obs))
        made.callback(memory.close)
        factory = updater_factory and functools.partial(updater_factory, timers=timers)
        learner: Learner = make_learner(
            config, spec, place, memory, clock, timers, updater_factory=factory
        )
        apply_precision(config, learner.networks)
        channel = SameWeights()
        inference = HostInference(learner.online, place.device, spec.obs_dtype, seed)
        rows = rows_per_block(config)
        actor = Actor(envs, inference, config, timers, rows, seed, ladder=ladder)
        return LoopParts(
            setup=setup,
            spec=spec,
            device=place.device,
            env_seeds=[env_seed for group in envs for env_seed in group.seeds],
            clock=clock,
            timers=[timers],
            collector=Inline(actor, channel, clock),
            evaluator=setup.make_evaluator(learner.online, place.device, made),
            memory=memory,
            learner=learner,
            channel=channel,
            notes=list(place.notes),
            closing=made.pop_all(),
        )


def run(parts: LoopParts, keep_going: Callable[[], bool]) -> None:
    """Advance the loop until ``keep_going`` returns False, then wait for the device.

    ``keep_going`` is called before every block: it does the periodic work of the run.
    """
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
            break
    if parts.device.type != "cpu":
        torch.accelerator.synchronize(parts.device)
