"""Agents that compete: which are copied over which, with which values, and which continue."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from qfleet.agent.device_actor import TensorActor
from qfleet.agent.evaluation import Evaluation
from qfleet.config.config import Config
from qfleet.config.validation import validate
from qfleet.engines import registry
from qfleet.engines.parts import Parts
from qfleet.engines.registry import build
from qfleet.memory.rollout import Rollout
from qfleet.storage.checkpoint import load_checkpoint
from qfleet.telemetry.faults import FaultLog
from qfleet.training.run import Run
from qfleet.training.run_state import RunOptions
from qfleet.training.standings import Standings
from qfleet.training.tournament import (
    Move,
    agents_of,
    better_half,
    choose_moves,
    exploit,
    narrowed,
    perturb,
    rank,
)
from support.populations import configure, rows_of, train

VARY = json.dumps(
    {
        "learning_rate": [1e-2, 1e-3, 1e-2, 1e-3],
        "gamma": [0.9, 0.95, 0.98, 0.99],
        "td_lambda": [0.2, 0.4, 0.6, 0.8],
        "exploration_final_eps": [0.01, 0.02, 0.04, 0.08],
    }
)
PBT: dict[str, Any] = {"population": 4, "vary": VARY, "pbt_interval": 128}


def begun(**changes: Any) -> Parts:
    """A population that has learnt for two rollouts."""
    parts = build(configure(**{**PBT, **changes}), FaultLog())
    steps = 2 * parts.config.train_freq
    registry.run(parts, lambda: parts.clock.env_steps < steps)
    return parts


def scored(*scores: float) -> Standings:
    standings = Standings(len(scores))
    for own, score in zip(standings.agents, scores, strict=True):
        own.recent.append((score, 1))
    return standings


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "population.jsonl").open()]


# --- ranking ----------------------------------------------------------------------------------


def test_agents_are_ranked_by_evaluation_or_else_by_episodes_and_diverged_ones_last() -> None:
    standings = scored(1.0, 4.0, 3.0, 2.0)
    assert list(rank(standings, [0, 1, 2, 3], set())) == [1, 2, 3, 0]
    assert list(rank(standings, [0, 1, 2, 3], {1})) == [2, 3, 0, 1]
    assert list(rank(standings, [0, 3], set())) == [3, 0]
    standings.agents[0].judged = 9.0
    assert list(rank(standings, [0, 1, 2, 3], set())) == [0, 1, 2, 3]
    standings.begin_round([1])
    assert list(rank(standings, [0, 1, 2, 3], set())) == [2, 3, 0]  # 1 has done nothing yet


def test_the_worst_share_takes_over_from_the_best_share() -> None:
    scores = {agent: float(-agent) for agent in range(8)}  # 0 is the best
    chosen: set[Move] = set()
    for seed in range(20):
        moves = choose_moves(scores, 0.25, np.random.default_rng(seed))
        assert [move.loser for move in moves] == [6, 7]
        chosen |= set(moves)
    assert {move.winner for move in chosen} == {0, 1}
    assert len(choose_moves(scores, 0.01, np.random.default_rng(0))) == 1
    assert choose_moves({0: 5.0, 1: 5.0}, 0.5, np.random.default_rng(0)) == []
    assert choose_moves({0: 5.0}, 0.5, np.random.default_rng(0)) == []


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("learning_rate", 1e-3, (8e-4, 1.25e-3)),
        ("gamma", 0.99, (0.992, 0.9875)),
        ("td_lambda", 0.1, (0.28, 0.0)),  # 1 − 0.9 × 1.25 would be below 0
        ("exploration_final_eps", 0.9, (0.72, 1.0)),
        ("gamma", 1.0, (1.0, 1.0)),
    ],
)
def test_a_value_goes_up_or_down_and_stays_valid(
    name: str, value: float, allowed: tuple[float, float]
) -> None:
    config = configure()
    found = [perturb(name, value, config, np.random.default_rng(seed)) for seed in range(20)]
    assert {round(v, 9) for v in found} == {round(v, 9) for v in allowed}
    for v in found:
        validate(config.replace(population=1, **{name: v}))


# --- population-based training ----------------------------------------------------------------


def test_an_exploitation_is_in_force_and_reported() -> None:
    parts = begun()
    learner, memory, actor, agents = (
        parts.learner,
        parts.memory,
        parts.collector,
        agents_of(parts),
    )
    assert isinstance(memory, Rollout)
    assert isinstance(actor, TensorActor)
    before = agents.in_force()
    envs = {name: tensor.clone() for name, tensor in actor.state_dict()["envs"]["inner"].items()}
    untouched = learner.weights.data[1:3].clone()
    (line,) = exploit(parts, scored(1.0, 2.0, 3.0, 4.0), set())
    assert (line["env_steps"], line["loser"], line["winner"]) == (128, 0, 3)
    assert line["before"] == before[0]
    # Told: what the kernels read.
    after = line["after"]
    assert after != before[0]
    assert after != before[3]
    torch.testing.assert_close(memory.gamma[:4], torch.full((4,), after["gamma"]))
    torch.testing.assert_close(memory.td_lambda[:4], torch.full((4,), after["td_lambda"]))
    final = torch.full((4,), after["exploration_final_eps"])
    torch.testing.assert_close(actor.final_eps[:4], final)
    # The loser has the winner's state but its own envs; no other agent has changed.
    optimiser = learner.state_dict()["optimiser"]
    for rows in (learner.weights.data, *optimiser.values()):
        assert torch.equal(rows[0], rows[3])
    assert float(optimiser["steps"][0]) == parts.clock.updates
    assert torch.equal(learner.weights.data[1:3], untouched)
    for name, tensor in actor.state_dict()["envs"]["inner"].items():
        assert torch.equal(tensor, envs[name])


def test_the_next_update_uses_the_reported_values() -> None:
    """Equal weights, moments and gradients: two rows then move as their learning rates do."""
    parts = begun()
    learner = parts.learner
    (line,) = exploit(parts, scored(1.0, 2.0, 3.0, 4.0), set())
    reported = [line["after"]["learning_rate"], agents_of(parts).in_force()[3]["learning_rate"]]
    start = learner.weights.data.clone()
    learner._read_schedules()
    learner.weights.grad.copy_(torch.ones_like(learner.weights.grad))
    learner._updater.apply(learner._learning_rate)
    moved = (learner.weights.data - start)[[0, 3]].double().norm(dim=1)
    ratio = reported[0] / reported[1]
    assert float(moved[0] / moved[1]) == pytest.approx(ratio, rel=1e-3)
    assert ratio == pytest.approx(0.8) or ratio == pytest.approx(1.25)


def test_a_diverged_agent_takes_over_and_is_never_taken_from() -> None:
    parts = begun()
    (line,) = exploit(parts, scored(1.0, 2.0, 3.0, 4.0), bad={3})
    assert (line["loser"], line["winner"]) == (3, 2)


def test_a_run_writes_every_exploitation_and_reports_what_is_in_force(tmp_path: Path) -> None:
    run = Run(configure(**PBT), tmp_path / "run", RunOptions())
    result = run.go()
    reported = lines(tmp_path / "run")
    assert reported
    assert {line["env_steps"] for line in reported} <= {128, 256, 384}  # never at the very end
    newest = {line["loser"]: line["after"] for line in reported}
    assert result.agents is not None
    for agent, values in newest.items():
        assert result.agents[agent]["values"] == values
    memory = run.parts.memory
    assert isinstance(memory, Rollout)
    gammas = [row["values"]["gamma"] for row in result.agents]
    torch.testing.assert_close(memory.gamma[::4], torch.tensor(gammas))
    config = json.loads((tmp_path / "run" / "agents" / "0" / "config.json").read_text())
    assert validate(Config(**config)).pbt_interval == 0


# --- successive halving -----------------------------------------------------------------------


def test_the_better_half_goes_on_and_one_at_least() -> None:
    parts = begun(pbt_interval=0, halving_interval=128)
    standings = scored(1.0, 4.0, 3.0, 2.0)
    assert better_half(parts, standings, set()) == [1, 2]
    assert better_half(parts, standings, {1, 2}) == [0, 3]
    parts.members = [0, 1, 3]
    assert better_half(parts, standings, set()) == [1, 3]  # half of three is one
    parts.members = [3]
    assert better_half(parts, standings, set()) == [3]


@pytest.mark.parametrize("kept", [[1, 3], [2]])
def test_a_smaller_population_goes_on_where_its_agents_were(kept: list[int]) -> None:
    parts, whole = begun(), begun()
    smaller = narrowed(parts, kept, None)
    assert smaller.learner.weights.data.shape[0] == len(kept)
    steps = 4 * smaller.config.train_freq
    for some in (smaller, whole):
        registry.run(some, lambda some=some: some.clock.env_steps < steps)
    assert smaller.clock.updates == whole.clock.updates
    torch.testing.assert_close(
        smaller.learner.weights.data, whole.learner.weights.data[kept], rtol=1e-4, atol=1e-5
    )
    own = smaller.config.envs
    envs = [env for agent in kept for env in range(agent * own, (agent + 1) * own)]
    ours, theirs = smaller.memory.state_dict(), whole.memory.state_dict()
    assert torch.equal(ours["action"], theirs["action"][:, envs])
    assert torch.equal(ours["shuffles"], theirs["shuffles"][kept])
    assert agents_of(smaller).in_force() == [agents_of(whole).in_force()[agent] for agent in kept]


HALVING: dict[str, Any] = {"population": 5, "halving_interval": 128, "eval_freq": 0}


@pytest.fixture(scope="module")
def halved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("halving") / "run"
    train(folder, **HALVING)
    return folder


def test_half_stops_time_and_again(halved: Path) -> None:
    reported = lines(halved)
    assert [(line["env_steps"], len(line["kept"])) for line in reported] == [
        (128, 3),
        (256, 2),
        (384, 1),
    ]
    evaluated = [row for row in rows_of(halved) if "eval/mean_reward" in row]
    training = set(range(5))
    for line, row in zip(reported, evaluated, strict=False):
        own = {agent: row[f"agent_{agent}/eval/mean_reward"] for agent in training}
        assert row["env_steps"] == line["env_steps"]
        assert set(line["kept"]) | set(line["stopped"]) == training
        assert max(own[agent] for agent in line["stopped"]) <= min(own[a] for a in line["kept"])
        training = set(line["kept"])
    assert len(evaluated) == 4  # and the last agent's own at the end


def test_stopped_agents_are_reported_and_kept(halved: Path) -> None:
    result = json.loads((halved / "result.json").read_text())
    steps = dict.fromkeys(range(5), 512)
    for line in lines(halved):
        steps |= dict.fromkeys(line["stopped"], line["env_steps"])
    assert [row["env_steps"] for row in result["agents"]] == list(steps.values())
    assert all(row["eval_return_mean"] is not None for row in result["agents"])
    assert all((halved / "agents" / str(agent) / "best").is_dir() for agent in range(5))
    assert result["env_steps_per_s"] == pytest.approx(sum(steps.values()) / result["wall_s"])
    seeds = json.loads((halved / "seeds.json").read_text())
    assert len(seeds["each_env"]) == 5 * 4


def test_the_checkpoint_is_of_the_agents_that_go_on(halved: Path) -> None:
    (survivor,) = lines(halved)[-1]["kept"]
    parts = load_checkpoint(halved / "checkpoints").parts
    assert parts["agents"]["members"] == [survivor]
    assert parts["learner"]["weights"].shape[0] == 1


def test_survivors_are_the_same_as_without_a_halving(halved: Path, tmp_path: Path) -> None:
    train(tmp_path / "run", **HALVING | {"halving_interval": 0})
    (survivor,) = lines(halved)[-1]["kept"]
    ours = load_checkpoint(halved / "checkpoints").parts["learner"]["weights"][0]
    theirs = load_checkpoint(tmp_path / "run" / "checkpoints").parts["learner"]["weights"]
    torch.testing.assert_close(ours, theirs[survivor], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(ours, theirs[(survivor + 1) % 5], rtol=1e-4, atol=1e-5)
    assert math.isfinite(float(ours.sum()))


def test_of_equal_evaluations_the_later_policy_is_kept() -> None:
    standings = Standings(1)
    kept = [
        standings.add_evaluation(Evaluation([score], [1]), [0], counts=True)
        for score in (1.0, 3.0, 3.0, 2.0)
    ]
    assert kept == [[0], [0], [0], []]
