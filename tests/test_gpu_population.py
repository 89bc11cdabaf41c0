"""Populations with replay on an accelerator. Skipped where there is none."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from qfleet.config.presets import resolve
from qfleet.config.validation import validate
from qfleet.engines import registry
from qfleet.engines.parts import Parts
from qfleet.engines.registry import build
from qfleet.telemetry.faults import FaultLog
from qfleet.training.tournament import agents_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]
AGENTS = 3
KINDS: dict[str, dict[str, Any]] = {
    "dqn": {"algo": "dqn"},
    "prioritised": {"algo": "prioritized-dqn", "double": True, "n_steps": 3},
    "rainbow": {"algo": "rainbow", "n_atoms": 21},
}


def parts_of(kind: str, env: str = "MinAtar/Breakout-v1", **changes: Any) -> Parts:
    fields = {
        "engine": "device", "device": "cuda", "precision": "fp32", "compile": "off", "envs": 16,
        "steps": 20_000, "learning_starts": 320, "train_freq": 32, "gradient_steps": 4,
        "buffer_size": 4000, "target_update_interval": 640, "learning_rate": 1e-4, "seed": 3,
        "population": AGENTS, "vary": '{"gamma": [0.9, 0.95, 0.99]}', **KINDS[kind], **changes,
    }  # fmt: skip
    if fields["population"] == 1:
        del fields["vary"]
    algo = fields.pop("algo")
    return build(validate(resolve(env, algo, preset="none", fields=fields)[0]), FaultLog())


def advance(parts: Parts, updates: int) -> torch.Tensor:
    """Return the agents' weights ``[K, P]`` after this many updates."""
    registry.run(parts, lambda: parts.clock.updates < updates)
    return torch.stack([parts.model.weights.row(row) for row in range(len(parts.members))])


@pytest.mark.parametrize("kind", KINDS)
def test_recorded_bursts_are_unrecorded_ones_with_new_values_too(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the bursts an agent is copied over another and gets another discount factor."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    ends = []
    for graphs, exploits in ((False, True), (True, True), (True, False)):
        parts = parts_of(kind, graphs=graphs)
        first = advance(parts, 40)
        if exploits:
            parts.model.copy_agent(0, 2)  # type: ignore[attr-defined]
            agents = agents_of(parts)
            agents.values["gamma"][0] = 0.5
            agents.put_in_force()
            assert agents.in_force()[0]["gamma"] == 0.5
        ends.append((first, advance(parts, 200)))
        parts.close()
    (first, eager), (_, recorded), (_, other) = ends
    moved = float((eager - first).norm())
    assert float((recorded - eager).norm()) < 1e-3 * moved
    # The control: the agent that was not exploited has learnt something else, the others the same.
    assert float((recorded[0] - other[0]).norm()) > 0.1 * float((recorded[0] - first[0]).norm())
    assert float((recorded[1] - other[1]).norm()) < 1e-3 * moved


@pytest.mark.parametrize("kind", KINDS)
def test_an_agent_is_the_single_run_of_its_seed_on_the_device(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "rainbow":
        pytest.skip("agents with noise draw it together")
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    whole = parts_of(kind)
    ours = advance(whole, 40)
    for agent in range(AGENTS):
        alone = build(agents_of(whole).config_of(agent), FaultLog())
        theirs = advance(alone, 40)[0]
        alone.close()
        apart = [float((row - theirs).norm()) for row in ours]
        assert apart[agent] < 0.02 * min(apart[:agent] + apart[agent + 1 :])
    whole.close()
