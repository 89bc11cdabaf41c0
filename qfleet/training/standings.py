"""How every agent of a run stands: newest episodes, evaluations, best return, when it stopped.

In: finished episodes and evaluations, agent-major. Out: scalars for the log, scores to rank agents
by, and what ``result.json`` tells of each. A run that is no population is one agent, number 0.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from qfleet.agent.evaluation import Evaluation
from qfleet.core.types import Episode, StateDict

EPISODE_WINDOW = 100


@dataclasses.dataclass
class Standing:
    """One agent's."""

    recent: deque[tuple[float, int]] = dataclasses.field(
        default_factory=lambda: deque(maxlen=EPISODE_WINDOW)
    )
    """Return and length of its newest episodes."""
    evaluated: float | None = None
    """Mean return of its newest evaluation."""
    judged: float | None = None
    """The same, if it came after the newest exploitation."""
    best: float | None = None
    """Best mean return of an evaluation."""
    stopped_at: int | None = None
    """Env steps after which it trained no more, though the run went on."""
    values: dict[str, float] = dataclasses.field(default_factory=dict)
    """What it had of its own when it stopped."""

    @property
    def recent_return(self) -> float | None:
        return float(np.mean([reward for reward, _ in self.recent])) if self.recent else None

    @property
    def recent_length(self) -> float | None:
        return float(np.mean([length for _, length in self.recent])) if self.recent else None


class Standings:
    def __init__(self, agents: int) -> None:
        self.agents = [Standing() for _ in range(agents)]

    def add_episodes(
        self, episodes: Iterable[Episode], members: Sequence[int], envs_each: int
    ) -> None:
        """Episodes of a batch in which ``members`` own ``envs_each`` environments each, in turn."""
        for episode in episodes:
            agent = members[episode.env // envs_each]
            self.agents[agent].recent.append((episode.reward, episode.length))

    def add_evaluation(
        self, evaluation: Evaluation, members: Sequence[int], counts: bool
    ) -> list[int]:
        """An evaluation's episodes, as many of each member in turn; who was never better?

        One that does not count is only told: it makes nobody the best.
        """
        played = len(evaluation.returns) // len(members)
        better: list[int] = []
        for row, agent in enumerate(members):
            own = self.agents[agent]
            own.evaluated = mean = float(
                np.mean(evaluation.returns[row * played : (row + 1) * played])
            )
            if not counts:
                continue
            own.judged = mean
            if own.best is None or mean > own.best:
                own.best = mean
                better.append(agent)
        return better

    @property
    def leader(self) -> int:
        """Whose policy is the run's best."""

        def best_of(agent: int) -> float:
            own = self.agents[agent]
            known = own.evaluated if own.best is None else own.best
            return -np.inf if known is None else known

        return max(range(len(self.agents)), key=best_of)

    # --- what agents are ranked by --------------------------------------------------------------

    def score(self, agent: int) -> float | None:
        """Its evaluation since the newest exploitation, else the mean of its newest episodes."""
        own = self.agents[agent]
        return own.recent_return if own.judged is None else own.judged

    def begin_round(self, replaced: Iterable[int]) -> None:
        """Agents that were replaced begin anew: what they did before says nothing of them now."""
        for own in self.agents:
            own.judged = None
        for agent in replaced:
            self.agents[agent].recent.clear()

    def stop(self, agent: int, env_steps: int, values: Mapping[str, float]) -> None:
        self.agents[agent].stopped_at = env_steps
        self.agents[agent].values = dict(values)

    def steps_of_all(self, env_steps: int) -> int:
        """Env steps of all agents together, once the clock shows ``env_steps``."""
        stops = (own.stopped_at for own in self.agents)
        return sum(env_steps if stop is None else min(env_steps, stop) for stop in stops)

    # --- what is told ---------------------------------------------------------------------------

    def rollout_scalars(self, members: Sequence[int]) -> dict[str, float | None]:
        """Means over agents, and each agent's own return where there are several."""
        stand = [self.agents[agent] for agent in members]
        scalars = {
            "rollout/ep_rew_mean": _mean(own.recent_return for own in stand),
            "rollout/ep_len_mean": _mean(own.recent_length for own in stand),
        }
        if len(self.agents) > 1:
            names = (f"agent_{agent}/rollout/ep_rew_mean" for agent in members)
            returns = (own.recent_return for own in stand)
            scalars |= dict(zip(names, returns, strict=True))
        return scalars

    def evaluation_scalars(self, members: Sequence[int]) -> dict[str, float | None]:
        """Each agent's newest evaluation, where there are several agents."""
        if len(self.agents) == 1:
            return {}
        return {
            f"agent_{agent}/eval/mean_reward": self.agents[agent].evaluated for agent in members
        }

    def table(
        self, first_seed: int, env_steps: int, values: Mapping[int, Mapping[str, float]]
    ) -> list[dict[str, Any]]:
        """A row per agent, as in ``result.json``; ``values`` are those of agents still training."""
        return [
            {
                "agent": agent,
                "seed": first_seed + agent,
                "values": dict(values.get(agent, own.values)),
                "eval_return_mean": own.evaluated,
                "best_eval_return": own.best,
                "rollout_return_mean": own.recent_return,
                "env_steps": env_steps if own.stopped_at is None else own.stopped_at,
            }
            for agent, own in enumerate(self.agents)
        ]

    def state_dict(self) -> StateDict:
        return {
            str(agent): {**vars(own), "recent": [list(episode) for episode in own.recent]}
            for agent, own in enumerate(self.agents)
        }

    def load_state_dict(self, state: StateDict) -> None:
        for own, saved in zip(self.agents, state.values(), strict=True):
            own.recent.extend((reward, length) for reward, length in saved["recent"])
            for name in ("evaluated", "judged", "best", "stopped_at", "values"):
                setattr(own, name, saved[name])


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None
