"""Populations with replay: agent k is the run of seed + k, and each has noise of its own."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.func import functional_call

import qfleet
from qfleet.agent.device_actor import TensorActor
from qfleet.agent.population import draw_values
from qfleet.config.config import Config
from qfleet.config.validation import validate
from qfleet.core.errors import ConfigError, MemoryRefusedError
from qfleet.core.types import Block, EnvSpec
from qfleet.engines import registry
from qfleet.engines.parts import Parts
from qfleet.engines.registry import build
from qfleet.memory import ring, sizing
from qfleet.memory.agent_rings import AgentRings
from qfleet.memory.sizing import USABLE_PERCENT, replay_bytes
from qfleet.networks.population import Population
from qfleet.storage.checkpoint import load_checkpoint
from qfleet.telemetry.faults import FaultLog
from qfleet.training.run import Run
from qfleet.training.run_state import RunOptions
from qfleet.training.tournament import agents_of, narrowed
from support.configs import tiny_config
from support.messages import says

AGENTS = 4
CARTPOLE = EnvSpec("CartPole-v1", (4,), "float32", 2)
FIELDS: dict[str, Any] = {
    "engine": "device", "device": "cpu", "threads": 1, "population": AGENTS, "seed": 3,
    "envs": 2, "steps": 1000, "learning_starts": 40, "train_freq": 8, "gradient_steps": 2,
    "buffer_size": 300, "target_update_interval": 40, "max_episode_steps": 30,
    "learning_rate": 1e-3, "optimizer_eps": 1e-2,
}  # fmt: skip
PER = {"prioritized_replay": True}
KINDS: dict[str, dict[str, Any]] = {
    "dqn": {},
    "double": {"double": True, "dueling": True, "tau": 0.5},
    "prioritised": {**PER, "double": True, "n_steps": 3},
    "c51": {**PER, "algo": "c51", "n_atoms": 21},
    "qr": {"algo": "qr-dqn", "n_quantiles": 20},
    "munchausen": {"munchausen": True},
}
RAINBOW = {"algo": "rainbow", "n_steps": 3, "n_atoms": 21}


def configure(**changes: Any) -> Config:
    return tiny_config(**{**FIELDS, **changes})


def advanced(config: Config, updates: int) -> Parts:
    parts = build(config, FaultLog())
    registry.run(parts, lambda: parts.clock.updates < updates)
    assert parts.clock.updates == updates
    return parts


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=() if kind in ("dqn", "prioritised") else pytest.mark.slow)
        for kind in KINDS
    ],
)
def test_an_agent_is_the_single_run_of_its_seed_and_values(kind: str) -> None:
    vary = json.dumps({"gamma": [0.9, 0.99], "learning_rate": [5e-4, 1e-3, 5e-4, 1e-3]})
    config = configure(vary=vary, **KINDS[kind])
    whole = advanced(config, 100)
    for agent in range(AGENTS):
        alone = advanced(agents_of(whole).config_of(agent), 100)
        assert alone.config.gamma == (0.9 if agent < 2 else 0.99)
        ours = whole.learner.weights.row(agent)
        torch.testing.assert_close(ours, alone.learner.weights.data, rtol=0, atol=1e-5)
        other = whole.learner.weights.row((agent + 1) % AGENTS)
        assert not torch.allclose(other, alone.learner.weights.data, rtol=0, atol=1e-2)


@pytest.mark.slow
def test_with_the_steps_of_another_agent_it_is_another_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the test above."""
    alone = advanced(configure().replace(population=1), 100)
    extend = AgentRings.extend

    def extend_others(memory: AgentRings, block: Block) -> None:
        memory._rings.reverse()
        extend(memory, block)
        memory._rings.reverse()

    monkeypatch.setattr(AgentRings, "extend", extend_others)
    ours = advanced(configure(), 100).learner.weights.row(0)
    assert not torch.allclose(ours, alone.learner.weights.data, rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    "fields",
    [KINDS["prioritised"], pytest.param(RAINBOW, marks=pytest.mark.slow)],
    ids=["prioritised", "rainbow"],
)
def test_survivors_of_a_halving_go_on_where_they_were(fields: dict[str, Any]) -> None:
    kept = [1, 3]
    whole, parts = (advanced(configure(**fields), 20) for _ in range(2))
    smaller = narrowed(parts, kept, None)
    if "algo" not in fields:  # otherwise the noise of fewer agents is drawn
        for some in (whole, smaller):
            registry.run(some, lambda some=some: some.clock.updates < 40)
    ours, theirs = smaller.learner.weights.data, whole.learner.weights.data[kept]
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    registry.run(smaller, lambda: smaller.clock.updates < 60)


def test_a_copied_agent_has_the_target_network_of_the_other() -> None:
    parts = advanced(configure(), 20)
    parts.learner.copy_agent(0, 2)
    state = parts.learner.state_dict()
    for name in ("weights", "target_weights"):
        assert state[name][0].equal(state[name][2])
        assert not state[name][1].equal(state[name][2])


def test_rainbow_agents_have_noise_of_their_own() -> None:
    network = advanced(configure(**RAINBOW), 10).learner.online
    assert isinstance(network, Population)
    network.store_noise(network.draw_noise(torch.Generator().manual_seed(0)))
    obs = torch.randn(AGENTS, 5, 4)
    together = network(obs.flatten(0, 1)).unflatten(0, (AGENTS, 5))
    parameters = dict(network.named_parameters()) | dict(network.named_buffers())
    names = {name.replace("/", ".") for name, _ in network.named_parameters()}
    for agent in range(AGENTS):
        own = {
            name.replace("/", "."): value[agent]
            for name, value in parameters.items()
            if name.replace("/", ".") in names or "noise" in name
        }
        alone = functional_call(network.template.train(), own, (obs[agent],))
        torch.testing.assert_close(together[agent], alone, rtol=1e-4, atol=1e-5)
    same = obs[:1].expand(AGENTS, -1, -1).flatten(0, 1)
    network.eval()
    quiet = network(same)
    network.store_noise(network.draw_noise(torch.Generator().manual_seed(1)))
    assert quiet.equal(network(same))
    assert not quiet.equal(network.train()(same))


@pytest.mark.slow
def test_a_rainbow_population_stops_resumes_and_plays(tmp_path: Path) -> None:
    config = configure(**RAINBOW, steps=400, eval_freq=200, checkpoint_freq=200)
    whole = Run(config, tmp_path / "whole", RunOptions()).go()
    Run(config, tmp_path / "parted", RunOptions(stop_after=200)).go()
    resumed = qfleet.resume(tmp_path / "parted")
    assert isinstance(resumed, qfleet.Trained)
    assert whole.agents == resumed.result.agents
    obs = torch.zeros(4).numpy()
    for which in ("best", "last"):
        policies = [
            qfleet.load(tmp_path / run / "agents" / "2", which=which) for run in ("whole", "parted")
        ]
        assert policies[0].weights.data.equal(policies[1].weights.data)
        assert policies[0].act(obs) in (0, 1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"algo": "iqn"}, "head iqn c51"),
        ({"replay_dir": "somewhere"}, "replay_dir agent"),
        ({"vary": '{"td_lambda": [0.5]}'}, "td_lambda rollouts"),
        (
            {"noisy": True, "vary": '{"exploration_final_eps": [0.1]}'},
            "exploration_final_eps noisy",
        ),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=says(*words.split())):
        draw_values(validate(configure(**changes)))


@pytest.mark.parametrize(("halving", "memories"), [(0, 4), (500, 6)])
def test_the_memories_of_all_agents_must_fit(
    halving: int, memories: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While half of the agents stop, the memories of the others are there twice."""
    config = configure(halving_interval=halving)
    needed = replay_bytes(CARTPOLE, config.envs, config.replay_capacity, False)
    usable = memories * needed * 100 // USABLE_PERCENT
    monkeypatch.setattr(sizing, "available_bytes", lambda: usable - 2 * needed)
    told = says(f"{memories}", "×", f"{config.replay_capacity}", "--buffer-size")
    with pytest.raises(MemoryRefusedError, match=told) as caught:
        build(config, FaultLog())
    assert "--replay-dir" not in str(caught.value)
    fits = re.search(r"--buffer-size (\d+)", str(caught.value))
    assert fits is not None
    build(config.replace(buffer_size=int(fits[1])), FaultLog()).close()
    monkeypatch.setattr(sizing, "available_bytes", lambda: usable + needed)
    build(config, FaultLog()).close()


def test_noisy_agents_explore_without_epsilon() -> None:
    actor = advanced(configure(**RAINBOW), 10).collector
    assert isinstance(actor, TensorActor)
    assert not actor.final_eps.any()


def test_stopped_agents_leave_no_frames_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpoints share files: those of a row must not be taken for another agent's."""
    monkeypatch.setattr(ring, "SEGMENT_BYTES", 16 * 2 * 4 * 8)
    config = configure(steps=400, halving_interval=200, checkpoint_freq=100, buffer_size=2000)
    run = Run(config, tmp_path / "run", RunOptions())
    run.go()
    assert len(run.parts.members) == 2
    shown = run.parts.memory.state_dict()["rings"]
    stored = load_checkpoint(tmp_path / "run" / "checkpoints").parts["memory"]["rings"]
    assert list(stored) == list(shown) == [str(agent) for agent in run.parts.members]
    for name, own in shown.items():
        ours, theirs = (torch.cat(list(one["frames"].tensors)) for one in (own, stored[name]))
        assert ours.equal(theirs)
