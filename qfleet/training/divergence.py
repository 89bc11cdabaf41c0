"""Divergence: stops a run whose rewards, observations, gradients or Q-values are not usable.

In: the learner's metrics at every log. Out: counted faults, and an error once no agent is healthy.
If one agent of a population diverges, its faults name it and the other agents continue.
"""

from __future__ import annotations

import math
from pathlib import Path

from qfleet.agent.recorded_learner import Health, RecordedLearner
from qfleet.config.config import Config
from qfleet.core.errors import DivergedError
from qfleet.core.types import StateDict
from qfleet.engines.parts import Parts
from qfleet.storage.checkpoint import list_checkpoints
from qfleet.telemetry.faults import MIN_FAULTS_TO_STOP, FaultLog

BOUNDED = ("env_reward", "env_observation", "env_crash", "env_reset", "env_process", "env_timeout")
"""Kinds of faults that ``max_fault_rate`` limits, as a fraction of env steps."""
EXPLODING_LOGS = 3
"""Consecutive log intervals of exploding Q-values after which a run or an agent has diverged."""


class DivergenceGuard:
    def __init__(self, config: Config, faults: FaultLog, folder: Path) -> None:
        self._config, self._faults, self._folder = config, faults, folder
        self._skipped = [0] * config.population
        """Non-finite gradients of each agent that are counted as faults already."""
        self._exploding = [0] * config.population
        """Consecutive logs at which the values of each agent were too large."""

    def check(self, parts: Parts, metrics: dict[str, float]) -> None:
        """Count new faults; raise if all agents have diverged."""
        clock, limit = parts.clock, self._config.max_fault_rate
        for kind in BOUNDED:
            self._faults.check_rate(kind, clock.env_steps, limit)
        health = self._health(parts, metrics)
        if not health:
            return
        for agent, own in health.items():
            self._count(agent, own, clock.updates)
        poor = {
            agent
            for agent in health
            if self._skipped[agent] >= MIN_FAULTS_TO_STOP
            and self._skipped[agent] > limit * clock.updates
        }
        if poor == set(health):
            self._faults.check_rate("gradient", clock.updates, limit)
        exploded = {agent for agent in health if self._exploding[agent] >= EXPLODING_LOGS}
        if poor | exploded == set(health):
            largest = max(health[agent].abs_q_max for agent in exploded)
            saved = list_checkpoints(self._folder / "checkpoints")
            good = f"the last good checkpoint is {saved[-1]}" if saved else "no checkpoint yet"
            raise DivergedError(
                f"Q-values exploded: {largest:.3g} exceeds --max-abs-q "
                f"{self._config.max_abs_q:.3g}; {good}. Scale or clip rewards "
                "(--clip-rewards) or lower --learning-rate"
            )

    def bad(self, parts: Parts) -> set[int]:
        """Return the agents whose values are too large now."""
        health = self._health(parts, parts.model.read_metrics())
        return {agent for agent, own in health.items() if self._is_bad(own)}

    def _is_bad(self, own: Health) -> bool:
        return not (math.isfinite(own.abs_q_max) and own.abs_q_max <= self._config.max_abs_q)

    def _health(self, parts: Parts, metrics: dict[str, float]) -> dict[int, Health]:
        if not metrics:
            return {}
        if self._config.population > 1:
            assert isinstance(parts.model, RecordedLearner), "populations have this learner"
            return dict(zip(parts.members, parts.model.read_agents(), strict=True))
        return {0: Health(metrics["abs_q_max"], metrics["skipped"])}

    def _count(self, agent: int, own: Health, updates: int) -> None:
        prefix = f"agent {agent}: " if self._config.population > 1 else ""
        for _ in range(int(own.skipped) - self._skipped[agent]):
            self._faults("gradient", f"{prefix}update near {updates}: gradient not finite, skipped")
        self._skipped[agent] = int(own.skipped)
        if not self._is_bad(own):
            self._exploding[agent] = 0
            return
        self._exploding[agent] += 1
        self._faults("exploding_q", f"{prefix}|Q| or its target reached {own.abs_q_max:.3g}")

    def state_dict(self) -> StateDict:
        return {"skipped": self._skipped, "exploding": self._exploding}

    def load_state_dict(self, state: StateDict) -> None:
        self._skipped, self._exploding = list(state["skipped"]), list(state["exploding"])
