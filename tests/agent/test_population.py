"""Populations: values, what is refused, that agent k is the run of seed + k, and bad agents."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import qfleet
from qfleet.agent.evaluation import Evaluation
from qfleet.agent.population import draw_values
from qfleet.config.validation import validate
from qfleet.core.errors import ConfigError, DivergedError, FaultRateError, QfleetError
from qfleet.core.types import Batch, Episode
from qfleet.engines import registry
from qfleet.engines.auto import settle
from qfleet.engines.parts import Parts
from qfleet.engines.registry import build
from qfleet.envs.factory import make_tensors
from qfleet.memory.rollout import Rollout
from qfleet.storage.checkpoint import list_checkpoints, load_checkpoint
from qfleet.telemetry.faults import FaultLog
from qfleet.training.run import Run
from qfleet.training.run_state import RunOptions
from qfleet.training.standings import EPISODE_WINDOW, Standings
from qfleet.training.tournament import agents_of
from support.messages import holds, says
from support.populations import configure, rows_of, train
from support.tensor_envs import evaluate_on_device

RATES = '{"learning_rate": [0.01, 0.001, 0.0001]}'


# --- values -----------------------------------------------------------------------------------


def test_a_list_gives_each_value_as_many_agents() -> None:
    config = validate(configure(population=4, vary='{"gamma": [0.9, 0.99]}'))
    values = draw_values(config)
    assert values["gamma"] == [0.9, 0.9, 0.99, 0.99]
    assert values["learning_rate"] == [1e-2] * 4


def test_a_range_is_drawn_from_the_runs_seed_within_its_bounds() -> None:
    rates = {"from": 1e-4, "to": 1e-2, "log": True}
    vary = {"learning_rate": rates, "gamma": {"from": 0.9, "to": 1}}
    config = configure(population=64, vary=json.dumps(vary))
    drawn, again, other = (draw_values(c) for c in (config, config, config.replace(seed=3)))
    assert drawn == again
    assert drawn["learning_rate"] != other["learning_rate"]
    logs = [math.log10(value) for value in drawn["learning_rate"]]
    assert -4 <= min(logs) < -3.5
    assert -2.5 < max(logs) <= -2
    assert 16 < sum(log < -3 for log in logs) < 48  # half of them lie below the middle of the logs
    assert 0.9 <= min(drawn["gamma"]) < 0.92
    assert 0.98 < max(drawn["gamma"]) <= 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vary": "{"}, "vary { JSON"),
        ({"vary": "[1]"}, "vary [1] JSON"),
        ({"population": 1, "vary": RATES}, "is for --population"),
        ({"vary": '{"gama": [0.9]}'}, "gama gamma"),
        ({"vary": '{"gamma": [0.9, 0.99]}'}, "2 3 agents"),
        ({"vary": '{"gamma": 0.9}'}, "0.9 list"),
        ({"vary": '{"gamma": [true]}'}, "list"),
        ({"vary": '{"gamma": [1.5]}'}, "gamma 1.5"),
        ({"vary": '{"learning_rate": [0]}'}, "learning_rate 0.0 > 0"),
        ({"vary": '{"gamma": {"from": 0, "to": 1, "log": true}}'}, "bounds 0"),
        ({"vary": '{"exploration_final_eps": [1.1]}'}, "exploration_final_eps 1.1"),
        ({"population": 0}, "population 0"),
        ({"engine": "serial"}, "engine serial population"),
        (
            {"engine": "auto", "step_latency_s": 0.1},
            "step_latency_s 0.1 population",
        ),
        ({"population": 1, "pbt_interval": 64}, "pbt_interval 64 --population"),
        ({"population": 1, "halving_interval": 64}, "halving_interval 64 agents"),
        ({"pbt_interval": 64, "halving_interval": 64}, "halving_interval pbt_interval 64"),
        ({"pbt_interval": -1}, "pbt_interval -1"),
        ({"pbt_share": 0.6}, "pbt_share 0.6"),
        ({"pbt_share": 0.0}, "pbt_share 0.0"),
        ({"pbt_factor": 1.0}, "pbt_factor 1.0"),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(QfleetError, match=says(*words.split())) as caught:
        draw_values(validate(configure(**changes)))
    assert "\n" not in str(caught.value)


class Batched(torch.nn.Module):
    """A user's torso that keeps numbers of its own."""

    def __init__(self, obs_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.features = obs_shape[0]
        self.norm = torch.nn.BatchNorm1d(obs_shape[0])

    def forward(self, obs: Tensor) -> Tensor:
        normal: Tensor = self.norm(obs)
        return normal


def test_networks_with_state_of_their_own_are_refused() -> None:
    config = configure(network=f"{__name__}:Batched", layer_norm=False)
    with pytest.raises(ConfigError, match=says("weights")):
        build(config, FaultLog())


def test_discrete_observations_go_into_a_population() -> None:
    parts = build(configure(env="qfleet.envs.device.maze:Maze"), FaultLog())
    registry.run(parts, lambda: parts.clock.env_steps < 128)
    assert parts.clock.updates == 16


def test_seeds_and_a_population_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says("population", "3", "seeds")):
        qfleet.train_seeds(2, config=configure(), run_dir=tmp_path / "run")


def test_auto_is_the_device_engine_on_any_machine() -> None:
    config, said = settle(configure(engine="auto"))
    assert config.engine == "device"
    assert said is not None
    assert holds(said, "population")


def test_values_are_where_kernels_read_them_and_are_read_back_from_there() -> None:
    rates, gammas, lambdas = [0.01, 0.001, 0.0003], [0.9, 0.95, 1], [0, 0.5, 1]
    vary = {"learning_rate": rates, "gamma": gammas, "td_lambda": lambdas}
    parts = build(configure(vary=json.dumps(vary), lr_schedule="linear"), FaultLog())
    assert isinstance(parts.memory, Rollout)
    parts.clock.env_steps = 256  # half of the run: the schedule is not part of the value
    assert agents_of(parts).in_force() == [
        {"learning_rate": 0.01, "gamma": 0.9, "td_lambda": 0.0},
        {"learning_rate": 0.001, "gamma": 0.95, "td_lambda": 0.5},
        {"learning_rate": 0.0003, "gamma": 1.0, "td_lambda": 1.0},
    ]
    parts.clock.env_steps = 512  # at its end the schedule is 0
    assert agents_of(parts).in_force()[2]["learning_rate"] == 0.0003
    parts.memory.gamma[4:8] = 0.25
    assert agents_of(parts).in_force()[1]["gamma"] == 0.25


# --- agent k is a single run ------------------------------------------------------------------


def advance(parts: Parts, rollouts: int) -> None:
    steps = rollouts * parts.config.train_freq
    registry.run(parts, lambda: parts.clock.env_steps < steps)


TARGET = {"target_network": True, "target_update_interval": 64}


@pytest.mark.parametrize(
    "changes",
    [*({"optimizer": name} for name in ("radam", "adam", "rmsprop", "sgd")), TARGET],
    ids=str,
)
def test_an_agent_is_the_single_run_of_its_seed_and_values(changes: dict[str, Any]) -> None:
    config = configure(vary=RATES, **changes)
    whole = build(config, FaultLog())
    advance(whole, 1)
    together = whole.collector.take_episodes()
    later = build(config, FaultLog())
    advance(later, 3)
    for agent, rate in enumerate((1e-2, 1e-3, 1e-4)):
        alone = agents_of(later).config_of(agent)
        assert alone == config.replace(
            population=1, vary="{}", seed=config.seed + agent, learning_rate=rate
        )
        single = build(alone, FaultLog())
        advance(single, 1)
        torch.testing.assert_close(
            whole.learner.weights.row(agent), single.learner.weights.data, rtol=1e-5, atol=1e-6
        )
        own = [episode for episode in together if episode.env // config.envs == agent]
        episodes = single.collector.take_episodes()
        assert [(e.env % config.envs, e.reward, e.length) for e in own] == [
            (e.env, e.reward, e.length) for e in episodes
        ]
        advance(single, 3)
        torch.testing.assert_close(
            later.learner.weights.row(agent), single.learner.weights.data, rtol=1e-4, atol=1e-5
        )


# --- standings --------------------------------------------------------------------------------


def test_every_agent_has_a_window_of_its_own() -> None:
    standings = Standings(2)
    busy = [Episode(0, float(number), 1) for number in range(EPISODE_WINDOW + 50)]
    standings.add_episodes([Episode(3, 7.0, 9), *busy], members=[0, 1], envs_each=2)
    scalars = standings.rollout_scalars([0, 1])
    assert scalars["agent_1/rollout/ep_rew_mean"] == 7.0  # not pushed out by the other's
    mean = sum(range(50, 150)) / 100
    assert scalars["agent_0/rollout/ep_rew_mean"] == mean
    assert scalars["rollout/ep_rew_mean"] == (mean + 7.0) / 2
    assert scalars["rollout/ep_len_mean"] == 5.0


def test_rows_belong_to_the_agents_that_still_train() -> None:
    standings = Standings(4)
    standings.add_episodes([Episode(2, 5.0, 1)], members=[1, 3], envs_each=2)
    assert standings.agents[3].recent_return == 5.0
    evaluation = Evaluation([1.0, 2.0, 10.0, 20.0], [1, 1, 1, 1])
    assert standings.add_evaluation(evaluation, [1, 3], counts=True) == [1, 3]
    assert (standings.agents[1].best, standings.agents[3].best) == (1.5, 15.0)
    assert standings.leader == 3
    worse = Evaluation([3.0, 3.0, 4.0, 4.0], [1, 1, 1, 1])
    assert standings.add_evaluation(worse, [1, 3], counts=True) == [1]
    assert standings.evaluation_scalars([1, 3])["agent_3/eval/mean_reward"] == 4.0
    assert (standings.agents[3].best, standings.leader) == (15.0, 3)


def test_steps_of_all_count_no_agent_after_it_stopped() -> None:
    standings = Standings(3)
    standings.stop(1, 100, {})
    assert standings.steps_of_all(50) == 150
    assert standings.steps_of_all(300) == 700


# --- a run ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("population") / "run"
    train(folder, vary=RATES)
    return folder


def test_metrics_have_means_and_every_agent(finished: Path) -> None:
    rows = rows_of(finished)
    evaluations = [row for row in rows if "eval/mean_reward" in row]
    assert [row["env_steps"] for row in evaluations] == [256, 512]
    for row in evaluations:
        own = [row[f"agent_{agent}/eval/mean_reward"] for agent in range(3)]
        assert row["eval/mean_reward"] == pytest.approx(sum(own) / 3)
    logged = [row for row in rows if "train/loss" in row]
    for row in logged[1:]:
        own = [row[f"agent_{agent}/rollout/ep_rew_mean"] for agent in range(3)]
        assert row["rollout/ep_rew_mean"] == pytest.approx(sum(own) / 3)
        assert len(set(own)) > 1


def test_the_result_has_a_row_per_agent(finished: Path) -> None:
    result = json.loads((finished / "result.json").read_text())
    assert [row["agent"] for row in result["agents"]] == [0, 1, 2]
    assert [row["seed"] for row in result["agents"]] == [2, 3, 4]
    rates = [row["values"] for row in result["agents"]]
    assert rates == [{"learning_rate": rate} for rate in (0.01, 0.001, 0.0001)]
    last = [row for row in rows_of(finished) if "eval/mean_reward" in row][-1]
    for row in result["agents"]:
        assert row["eval_return_mean"] == last[f"agent_{row['agent']}/eval/mean_reward"]
        assert row["best_eval_return"] >= row["eval_return_mean"]
        assert row["env_steps"] == 512
    assert result["env_steps_per_s"] == pytest.approx(3 * 512 / result["wall_s"])


def test_every_agents_policy_plays_and_the_runs_is_the_best_ones(finished: Path) -> None:
    result = json.loads((finished / "result.json").read_text())
    best = max(result["agents"], key=lambda row: row["best_eval_return"])
    seeds = json.loads((finished / "seeds.json").read_text())
    policies = [qfleet.load(finished / "agents" / str(agent)) for agent in range(3)]
    for agent, policy in enumerate(policies):
        assert (policy.config.population, policy.config.seed) == (1, 2 + agent)
        assert policy.config.learning_rate == (0.01, 0.001, 0.0001)[agent]
        # Gymnasium's CartPole, which the policy would play, draws its starts otherwise.
        values, envs = policy.network.q_values, make_tensors(policy.config)
        played = evaluate_on_device(values, envs, 2, 0.0, policy.device, seeds["eval_envs"])
        assert played is not None
        assert played.mean == result["agents"][agent]["best_eval_return"]
    own, leader = qfleet.load(finished), policies[best["agent"]]
    obs = [0.1, 0.2, -0.1, 0.3]
    assert own.q_values(obs).tolist() == leader.q_values(obs).tolist()
    assert len({tuple(policy.q_values(obs).tolist()) for policy in policies}) == 3


def test_the_newest_policy_is_named_by_its_agent(finished: Path) -> None:
    weights = load_checkpoint(finished / "checkpoints").parts["learner"]["weights"]
    policy = qfleet.load(finished / "agents" / "1", which="last")
    ours = torch.cat([parameter.detach().view(-1) for parameter in policy.network.parameters()])
    assert torch.equal(ours, weights[1, : len(ours)])
    with pytest.raises(ConfigError, match=says("3", "agent")):
        qfleet.load(finished, which="last")


def test_the_mean_over_agents_decides_when_to_stop(tmp_path: Path) -> None:
    result = train(tmp_path / "run", target_return=1.0)
    assert (result.stopped_by, result.env_steps) == ("target_return", 256)


def test_single_runs_have_no_agents(tmp_path: Path) -> None:
    result = train(tmp_path / "run", population=1)
    assert result.agents is None
    assert not (tmp_path / "run" / "agents").exists()
    assert not any(name.startswith("agent_") for row in rows_of(tmp_path / "run") for name in row)


# --- agents that go bad -----------------------------------------------------------------------


def poison(monkeypatch: pytest.MonkeyPatch, agents: set[int], value: float) -> None:
    """Every batch of these agents has ``value`` for a target."""
    sample = Rollout.sample

    def poisoned(self: Rollout, count: int, beta: float) -> Batch:
        batch = sample(self, count, beta)
        by_agent = batch.reward.view(-1, 3, configure().batch_size)
        for agent in agents:
            by_agent[:, agent] = value
        return batch

    monkeypatch.setattr(Rollout, "sample", poisoned)


def test_one_exploding_agent_is_named_and_the_others_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, {1}, 1e9)
    run = Run(configure(), tmp_path / "run", RunOptions())
    result = run.go()
    assert result.stopped_by == "steps"
    assert result.faults["exploding_q"] == 4  # once a log
    assert holds(run.parts.faults.first_messages("exploding_q")[0], "agent 1")
    assert list_checkpoints(tmp_path / "run" / "checkpoints") == [256, 512]


def test_a_run_whose_agents_all_explode_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, {0, 1, 2}, 1e9)
    with pytest.raises(DivergedError, match=r"Q-values.*1e"):
        train(tmp_path / "run")
    assert list_checkpoints(tmp_path / "run" / "checkpoints") == []


def test_non_finite_gradients_of_one_agent_stop_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, {2}, math.nan)
    run = Run(configure(), tmp_path / "run", RunOptions())
    before = run.parts.learner.weights.data.clone()
    result = run.go()
    assert result.stopped_by == "steps"
    assert result.faults["gradient"] == result.updates
    assert "agent 2" in run.parts.faults.first_messages("gradient")[0]
    assert torch.equal(run.parts.learner.weights.data[2], before[2])
    assert not torch.equal(run.parts.learner.weights.data[1], before[1])


def test_gradients_of_all_agents_that_are_not_finite_stop_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, {0, 1, 2}, math.nan)
    with pytest.raises(FaultRateError, match=says("gradient")):
        train(tmp_path / "run")
