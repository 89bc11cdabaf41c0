"""The evaluator of a run on the host: it plays in turn with training, or beside it."""

from __future__ import annotations

import contextlib

from qfleet.agent.background_evaluation import BackgroundEvaluator
from qfleet.agent.evaluation import HostEvaluator
from qfleet.agent.learner import Learner
from qfleet.core.types import EnvSpec
from qfleet.engines.factories import copy_network, evaluates_in_background
from qfleet.engines.parts import Setup
from qfleet.engines.placement import Placement
from qfleet.engines.tuning import Choice
from qfleet.telemetry.timers import Timers


def make_host_evaluator(
    setup: Setup,
    spec: EnvSpec,
    place: Placement,
    learner: Learner,
    choice: Choice,
    timers: list[Timers],
    closing: contextlib.ExitStack,
) -> BackgroundEvaluator | HostEvaluator:
    """Return an evaluator; one that plays beside training appends its own to ``timers``."""
    config = setup.config
    if not evaluates_in_background(config, place.device):
        return setup.make_evaluator(learner.online, place.device, closing)
    network, copy = copy_network(config, spec, learner.weights, choice)
    player = setup.make_evaluator(network, place.device, None, apart=True)
    timers.append(setup.make_timers("evaluator"))
    evaluator = BackgroundEvaluator(player.play, learner.weights, copy, timers[-1], player.close)
    closing.callback(evaluator.close)
    return evaluator
