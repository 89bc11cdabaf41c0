"""Every algorithm of the table trains, and those with a loss of their own learn a small task."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import qfleet
from qfleet.config.algorithms import ALGORITHMS
from qfleet.config.presets import resolve
from qfleet.engines.registry import build
from qfleet.storage.checkpoint import load_checkpoint
from qfleet.telemetry.faults import FaultLog
from qfleet.training.run import Run
from qfleet.training.run_state import RunOptions
from support.configs import tiny_fields
from support.toy_envs import Corridor, Drift

SMALL = tiny_fields(
    buffer_size=2000,
    n_eval_episodes=4,
    n_quantiles=8,
    iqn_samples=8,
    iqn_act_samples=8,
    iqn_embedding=16,
    n_atoms=21,
)


OFFLINE_ROWS = ("behaviour-cloning", "cql", "bcq")


@pytest.mark.parametrize("algo", [row for row in ALGORITHMS if row not in OFFLINE_ROWS])
def test_a_row_of_the_table_trains(algo: str, tmp_path: Path) -> None:
    fields = SMALL | {
        "steps": 300,
        "learning_starts": 50,
        "train_freq": 4,
        "target_update_interval": 120,
        "learning_rate": 1e-3,
    }
    has_replay = ALGORITHMS[algo].get("replay", True)
    has_target = has_replay or ALGORITHMS[algo].get("target_network", False)
    if not has_replay:
        fields |= {"envs": 2, "gradient_steps": 1}
    preset = fields.pop("preset")
    config, _ = resolve("CartPole-v1", algo, preset, fields=fields)
    parts = build(config, FaultLog())
    before = [parameter.detach().clone() for parameter in parts.learner.online.parameters()]
    names = [name for name, _ in parts.learner.online.named_parameters()]
    initial = parts.learner.weights.data.clone()
    parts.close()
    run = Run(config, tmp_path / "run", RunOptions())
    after = list(run.parts.learner.online.parameters())
    for old, new in zip(before, after, strict=True):
        assert torch.equal(old, new)  # the same seed gives the same network
    result = run.go()
    assert result.updates == (300 - 50) // 4
    unchanged = [
        name for name, old, new in zip(names, before, after, strict=True) if torch.equal(old, new)
    ]
    assert unchanged == []
    learner = load_checkpoint(run.folder / "checkpoints").parts["learner"]
    assert learner["weights"].isfinite().all()
    assert ("target_weights" in learner) == has_target
    if has_target:
        # The target network moved at 120 and 240, and has lagged behind since.
        assert learner["target_updates"] == 2
        assert not torch.equal(learner["target_weights"], initial)
        assert not torch.equal(learner["target_weights"], learner["weights"])
    rows = [json.loads(line) for line in (run.folder / "metrics.jsonl").open()]
    losses = [row["train/loss"] for row in rows if row.get("train/n_updates")]
    assert len(losses) == 3
    assert all(loss is not None and np.isfinite(loss) for loss in losses)
    assert result.faults == {}


QUICK = SMALL | {
    "steps": 1200,
    "learning_starts": 100,
    "train_freq": 2,
    "batch_size": 32,
    "learning_rate": 5e-3,
    "target_update_interval": 50,
    "exploration_fraction": 0.6,
    "exploration_final_eps": 0.1,
    "gamma": 0.9,
    "v_min": 0.0,
    "v_max": 1.2,
    "log_interval": 1000,
    "seed": 1,
}


@pytest.mark.parametrize(
    "algo",
    [
        "dqn",
        *(
            pytest.param(algo, marks=pytest.mark.slow)
            for algo in ("c51", "qr-dqn", "iqn", "munchausen-dqn", "rainbow")
        ),
    ],
)
def test_the_corridor_is_learnt(algo: str, tmp_path: Path) -> None:
    trained = qfleet.train(
        "support.toy_envs:Corridor", algo=algo, **QUICK, run_dir=tmp_path / "run"
    )
    assert trained.result.eval_return_mean == 1.0
    assert trained.result.eval_return_std == 0.0
    inner = np.eye(Corridor.CELLS, dtype=np.float32)[1:-1]
    policy = trained.policy("last")
    assert np.array_equal(policy.act(inner), [1, 1, 1])
    values = policy.q_values(inner)
    assert (values[:, 1] - values[:, 0] > 0.02).all()
    # Munchausen's bonus too is nothing for an action that the policy is sure of.
    assert values[:, 1] == pytest.approx([0.81, 0.9, 1.0], abs=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "algo",
    [
        "dqn",
        *(
            pytest.param(algo, marks=pytest.mark.slow)
            for algo in ("c51", "qr-dqn", "iqn", "munchausen-dqn", "rainbow")
        ),
    ],
)
def test_the_bandit_is_learnt(algo: str, tmp_path: Path) -> None:
    trained = qfleet.train(
        "support.toy_envs:Bandit",
        algo=algo,
        **QUICK | {"steps": 900, "envs": 2, "n_eval_episodes": 12},
        run_dir=tmp_path / "run",
    )
    assert trained.result.eval_return_mean == 1.0
    assert np.array_equal(trained.policy("last").act(np.eye(3)), [0, 1, 2])


@pytest.mark.slow
def test_stacks_returns_priorities_and_truncation_together(tmp_path: Path) -> None:
    fields = QUICK | {
        "steps": 2400,
        "frame_stack": 2,
        "n_steps": 3,
        "prioritized_replay": True,
        "double": True,
        "envs": 2,
        "net_arch": (32,),
        "n_eval_episodes": 20,
        "gamma": 0.8,
    }
    trained = qfleet.train("support.toy_envs:Drift", **fields, run_dir=tmp_path / "run")
    most = Drift.LENGTH - 1
    assert trained.result.eval_return_mean is not None
    assert trained.result.eval_return_mean >= 0.95 * most
    memory = load_checkpoint(trained.folder / "checkpoints").parts["memory"]
    frames = torch.cat(memory["frames"].tensors)
    assert frames.dtype == torch.uint8
    assert frames.shape[2:] == (2, Drift.WIDTH)  # one frame a row and env, not a stack
    # Cut episodes go on being worth what they would have been: about 1 / (1 − γ) all along.
    env = Drift()
    env.place, env.direction = 2, 1
    first = env._obs()
    env.place = 3
    values = trained.policy("last").q_values(np.stack([first, env._obs()])[None])
    assert values.max() == pytest.approx(5.0, abs=0.8)


@pytest.mark.slow
def test_without_the_stack_the_direction_cannot_be_learnt(tmp_path: Path) -> None:
    """So that the test above does not pass for another reason."""
    trained = qfleet.train(
        "support.toy_envs:Drift", **QUICK | {"n_eval_episodes": 40}, run_dir=tmp_path / "run"
    )
    assert trained.result.eval_return_mean is not None
    assert trained.result.eval_return_mean <= 0.75 * (Drift.LENGTH - 1)
