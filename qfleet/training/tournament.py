"""Competition in a population: population-based training and successive halving.

In: a population's parts and standings. Out: weights and hyper-parameters of the best agents copied
over the worst ones, or a smaller population; and a line of ``population.jsonl`` for each.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from qfleet.agent.device_actor import TensorActor
from qfleet.agent.population import Agents
from qfleet.agent.recorded_learner import RecordedLearner
from qfleet.config.config import Config
from qfleet.core.errors import one_line
from qfleet.core.files import append_bytes
from qfleet.engines.device import PopulationHook
from qfleet.engines.parts import Parts
from qfleet.engines.registry import build
from qfleet.memory.agent_rings import AgentRings
from qfleet.memory.rollout import Rollout
from qfleet.telemetry.faults import FaultLog
from qfleet.telemetry.trace import Trace
from qfleet.training.standings import Standings

POPULATION_FILE = "population.jsonl"
FROM_ONE = ("gamma", "td_lambda")
"""Fields of which the distance from 1 is perturbed, because their effect depends on it."""


class Move(NamedTuple):
    """A copy of weights and hyper-parameters from one agent, by its number, to another."""

    loser: int
    winner: int


def agents_of(parts: Parts) -> Agents:
    population = parts.find(PopulationHook)
    assert population is not None, "only populations have agents"
    return population.agents


def rank(standings: Standings, members: Iterable[int], bad: set[int]) -> dict[int, float]:
    """Return scores, best first, diverged agents last; agents without a score are left out."""
    scores: dict[int, float] = {}
    for agent in members:
        score = -math.inf if agent in bad else standings.score(agent)
        if score is not None:
            scores[agent] = score
    return dict(sorted(scores.items(), key=lambda item: -item[1]))


# --- population-based training ------------------------------------------------------------------


def choose_moves(
    scores: Mapping[int, float], share: float, random: np.random.Generator
) -> list[Move]:
    """Pair each of the worst agents with one of the best, if that is better; best scores first."""
    order = list(scores)
    count = min(max(1, int(share * len(order))), len(order) // 2)
    moves = []
    for loser in order[len(order) - count :]:
        winner = order[int(random.integers(count))]
        if scores[winner] > scores[loser]:
            moves.append(Move(loser, winner))
    return moves


def perturb(name: str, value: float, config: Config, random: np.random.Generator) -> float:
    """Return ``value`` times or divided by ``pbt_factor``, within the range of the field."""
    factor = config.pbt_factor if random.random() < 0.5 else 1 / config.pbt_factor
    if name in FROM_ONE:
        return 1.0 - min(1.0, (1.0 - value) * factor)
    if name == "exploration_final_eps":
        return min(value * factor, config.exploration_initial_eps)
    return value * factor


def exploit(parts: Parts, standings: Standings, bad: set[int]) -> list[dict[str, Any]]:
    """Copy the best agents over the worst ones; return lines that report it.

    The reported values are those that kernels will read.
    """
    config, agents, env_steps = parts.config, agents_of(parts), parts.clock.env_steps
    assert isinstance(parts.model, RecordedLearner), "populations have this learner"
    # Only from seed and clock, so that a resumed run draws the same as an uninterrupted one.
    random = np.random.default_rng([config.seed, env_steps, config.pbt_interval])
    moves = choose_moves(rank(standings, agents.members, bad), config.pbt_share, random)
    before = agents.in_force()
    for loser, winner in moves:
        to, source = agents.members.index(loser), agents.members.index(winner)
        parts.model.copy_agent(to, source)
        for name in agents.varied:
            value = agents.values[name][source]
            agents.values[name][to] = perturb(name, value, config, random)
    agents.put_in_force()
    after = agents.in_force()
    standings.begin_round(move.loser for move in moves)
    lines = []
    for loser, winner in moves:
        row = agents.members.index(loser)
        line = {"env_steps": env_steps, "event": "exploit", "loser": loser, "winner": winner}
        lines.append({**line, "before": before[row], "after": after[row]})
    return lines


# --- successive halving -------------------------------------------------------------------------


def better_half(parts: Parts, standings: Standings, bad: set[int]) -> list[int]:
    """Return the agents that continue, in the order of their numbers."""
    members = list(parts.members)
    scores = rank(standings, members, bad)
    order = [*scores, *(agent for agent in members if agent not in scores)]
    return sorted(order[: len(order) - len(order) // 2])


def stop_others(parts: Parts, standings: Standings, kept: list[int]) -> dict[str, Any]:
    """Record the final standing of the agents that stop; return a line that reports it."""
    env_steps = parts.clock.env_steps
    stopped = [agent for agent in parts.members if agent not in kept]
    values = dict(zip(parts.members, agents_of(parts).in_force(), strict=True))
    for agent in stopped:
        standings.stop(agent, env_steps, values[agent])
    standings.begin_round(())
    return {"env_steps": env_steps, "event": "halve", "stopped": stopped, "kept": kept}


def narrowed(parts: Parts, kept: list[int], trace: Trace | None) -> Parts:
    """Return parts of these agents alone, which continue in a smaller batch."""
    members, own = agents_of(parts).members, parts.config.envs
    rows = [members.index(agent) for agent in kept]
    smaller = build(parts.config, parts.faults, trace=trace, members=kept)
    clock, state = parts.clock, parts.state_dict()
    memory = AgentRings if parts.config.replay else Rollout
    smaller.clock.env_steps, smaller.clock.updates = clock.env_steps, clock.updates
    smaller.load_state_dict(
        {
            "learner": RecordedLearner.select(state["learner"], rows),
            "memory": memory.select(state["memory"], rows, own),
            "actor": TensorActor.select(state["actor"], rows, own),
            "agents": Agents.select(state["agents"], rows),
        }
    )
    smaller.timers[0].load_state_dict(parts.timers[0].state_dict())
    for stage, timer in smaller.device_times.items():
        timer.add(parts.device_times[stage])
    parts.close()
    return smaller


def append_lines(folder: Path, lines: Iterable[dict[str, Any]], faults: FaultLog) -> None:
    """Add lines to the history of a population; count a failure to write as a fault."""
    text = "".join(json.dumps(line) + "\n" for line in lines)
    try:
        append_bytes(folder / POPULATION_FILE, text.encode())
    except OSError as error:
        faults("metrics", f"a round of the population was not written: {one_line(error)}")
