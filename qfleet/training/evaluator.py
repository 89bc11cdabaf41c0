"""Plays a run's evaluations, on the device or in environments of its own.

In: the parts of a run. Out: the unclipped returns of the policy that it has now.
"""

from __future__ import annotations

from collections.abc import Callable

from qfleet.agent.device_evaluation import as_evaluation
from qfleet.agent.evaluation import Evaluation, evaluate_policy
from qfleet.core.types import VectorEnv
from qfleet.engines.parts import Parts
from qfleet.envs.factory import make_envs

MOST_ENVS = 16
"""Environments on the host that play an evaluation side by side."""


class Evaluator:
    """Environments on the host are made when they are first needed, and kept."""

    def __init__(self) -> None:
        self._envs: VectorEnv | None = None

    def play(self, parts: Parts, give_up: Callable[[], bool]) -> Evaluation | None:
        """An evaluation's episodes, agent-major; None if ``give_up`` said yes before their end."""
        config = parts.config
        if parts.evaluator is not None:
            network = parts.learner.online.eval()
            try:
                return as_evaluation(parts.evaluator.play(give_up))
            finally:
                network.train()
        seed = parts.seeds.eval_envs
        if self._envs is None:
            count = min(config.n_eval_episodes, MOST_ENVS)
            self._envs = make_envs(config, count, seed, training=False, on_fault=parts.faults)
        return evaluate_policy(
            parts.learner.online,
            self._envs,
            config.n_eval_episodes,
            config.eval_eps,
            parts.device,
            seed,
            give_up=give_up,
        )

    def close(self) -> None:
        if self._envs is not None:
            self._envs.close()
