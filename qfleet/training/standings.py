"""Standings of a run's agents: newest episodes, evaluations, best return, when each stopped.

In: finished episodes and evaluations, agent-major. Out: scalars for the log, scores that rank
agents, and the rows of ``result.json``. A run without a population has one agent, number 0.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from qfleet.agent.evaluation import Evaluation
from qfleet.core.types import Episode, StateDict
from qfleet.storage.state_checks import check_like

EPISODE_WINDOW = 100


@dataclasses.dataclass
class Standing:
    """The standing of one agent."""

    recent: deque[tuple[float, int]] = dataclasses.field(
        default_factory=lambda: deque(maxlen=EPISODE_WINDOW)
    )
    """Return and length of its newest episodes."""
    evaluated: float | None = None
    """Mean return of its newest evaluation."""
    judged: float | None = None
    """Mean return of its newest evaluation since the newest exploitation."""
    best: float | None = None
    """Best mean return of an evaluation."""
    stopped_at: int | None = None
    """Env steps at which it stopped, if it stopped before the run."""
    values: dict[str, float] = dataclasses.field(default_factory=dict)
    """Its varied hyper-parameters when it stopped."""

    @property
    def recent_return(self) -> float | None:
        return _mean(reward for reward, _ in self.recent)

    @property
    def recent_length(self) -> float | None:
        return _mean(length for _, length in self.recent)


class Standings:
    def __init__(self, agents: int) -> None:
        self.agents = [Standing() for _ in range(agents)]

    def add_episodes(
        self, episodes: Iterable[Episode], members: Sequence[int], envs_each: int
    ) -> None:
        """Add episodes of environments of which every member has ``envs_each``, in order."""
        for episode in episodes:
            agent = members[episode.env // envs_each]
            self.agents[agent].recent.append((episode.reward, episode.length))

    def add_evaluation(
        self, evaluation: Evaluation, members: Sequence[int], counts: bool
    ) -> list[int]:
        """Add an evaluation with the same number of episodes of each member, in order.

        Return the agents that were never better: of equal policies the later one is kept, which has
        learnt from more. ``counts`` False: it changes no best return.
        """
        played = len(evaluation.returns) // len(members)
        better: list[int] = []
        for row, agent in enumerate(members):
            own = self.agents[agent]
            mean = float(np.mean(evaluation.returns[row * played : (row + 1) * played]))
            own.evaluated = mean
            if counts:
                own.judged = mean
                if own.best is None or mean >= own.best:
                    own.best = mean
                    better.append(agent)
        return better

    @property
    def leader(self) -> int:
        """The agent with the best policy of the run."""
        known = [own.evaluated if own.best is None else own.best for own in self.agents]
        scores = [-np.inf if mean is None else mean for mean in known]
        return max(range(len(scores)), key=scores.__getitem__)

    # --- ranking --------------------------------------------------------------------------------

    def score(self, agent: int) -> float | None:
        """Return its evaluation since the newest exploitation, or else its recent return."""
        own = self.agents[agent]
        return own.recent_return if own.judged is None else own.judged

    def begin_round(self, replaced: Iterable[int]) -> None:
        """Forget evaluations, and the episodes of agents whose weights were replaced."""
        for own in self.agents:
            own.judged = None
        for agent in replaced:
            self.agents[agent].recent.clear()

    def stop(self, agent: int, env_steps: int, values: Mapping[str, float]) -> None:
        self.agents[agent].stopped_at = env_steps
        self.agents[agent].values = dict(values)

    def steps_of_all(self, env_steps: int) -> int:
        """Return the env steps of all agents together when the clock shows ``env_steps``."""
        stops = (own.stopped_at for own in self.agents)
        return sum(env_steps if stop is None else min(env_steps, stop) for stop in stops)

    # --- reports --------------------------------------------------------------------------------

    def rollout_scalars(self, members: Sequence[int]) -> dict[str, float | None]:
        """Return means over agents, and the return of each agent of a population."""
        returns = {agent: self.agents[agent].recent_return for agent in members}
        scalars = {
            "rollout/ep_rew_mean": _mean(returns.values()),
            "rollout/ep_len_mean": _mean(self.agents[agent].recent_length for agent in members),
        }
        if len(self.agents) > 1:
            scalars |= {f"agent_{k}/rollout/ep_rew_mean": own for k, own in returns.items()}
        return scalars

    def evaluation_scalars(self, members: Sequence[int]) -> dict[str, float | None]:
        """Return the newest evaluation of each agent of a population."""
        if len(self.agents) == 1:
            return {}
        return {f"agent_{k}/eval/mean_reward": self.agents[k].evaluated for k in members}

    def table(
        self, first_seed: int, env_steps: int, values: Mapping[int, Mapping[str, float]]
    ) -> list[dict[str, Any]]:
        """Return the rows of ``result.json``; ``values``: of the agents that still train."""
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
            values = dict.fromkeys(saved["values"], 0.0)
            check_like(saved, vars(own) | {"recent": ([0.0, 0],), "values": values}, "standings")
            own.recent.extend((reward, length) for reward, length in saved["recent"])
            for name in ("evaluated", "judged", "best", "stopped_at", "values"):
                setattr(own, name, saved[name])


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None
