"""Short runs that are compared bit for bit: how they are made, stopped, resumed and read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from qfleet.config.config import Config
from qfleet.storage.checkpoint import load_checkpoint, load_policy
from qfleet.storage.segments import Segments
from qfleet.training.run import Run
from qfleet.training.run_state import RunOptions
from support.configs import tiny_config

STEPS = 640


BASE: dict[str, Any] = {
    "steps": STEPS,
    "learning_rate": 1e-3,
    "buffer_size": 300,  # wraps around
    "learning_starts": 50,
    "train_freq": 5,
    "gradient_steps": 2,
    "target_update_interval": 35,
    "exploration_fraction": 0.5,
    "eval_freq": 200,
    "n_eval_episodes": 2,
    "max_episode_steps": 40,
    "log_interval": 90,
    "checkpoint_freq": 10_000,
    "lr_schedule": "linear",
    "n_atoms": 11,
    "n_quantiles": 8,
    "iqn_samples": 4,
    "iqn_act_samples": 4,
    "iqn_embedding": 8,
    "seed": 5,
}


def configure(env: str = "CartPole-v1", algo: str = "dqn", **changes: Any) -> Config:
    return tiny_config(env, algo, **{**BASE, **changes})


def train(config: Config, folder: Path, stop_after: int | None = None) -> None:
    """Not qfleet.train: the learning curve it draws would cost more than these runs."""
    Run(config, folder, RunOptions(stop_after=stop_after)).go()


def resume(folder: Path, stop_after: int | None = None) -> None:
    config = Config(**json.loads((folder / "config.json").read_text()))
    checkpoint = load_checkpoint(folder / "checkpoints")
    Run(config, folder, RunOptions(stop_after=stop_after), checkpoint=checkpoint).go()


def leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, entry in value.items():
            yield from leaves(entry, f"{name}.{key}")
    elif isinstance(value, Segments):
        yield name, torch.cat(list(value.tensors))
    else:
        yield name, value


def final_state(folder: Path) -> dict[str, Any]:
    """The last checkpoint, flat: weights, moments, replay, random streams, envs, clock, marks."""
    state = dict(leaves(load_checkpoint(folder / "checkpoints").parts, "state"))
    return {name: value for name, value in state.items() if not _is_time(name)}


def _is_time(name: str) -> bool:
    return name.startswith(("state.run.wall_s", "state.run.timers.", "state.run.usage."))


def rows(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [
        {name: value for name, value in json.loads(line).items() if not name.startswith("time/")}
        for line in lines
    ]


def assert_equal(left: Any, right: Any, name: str) -> None:
    if isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype, name
        assert torch.equal(left, right), name
    else:
        assert left == right, name


def assert_same_run(whole: Path, parted: Path, stops: tuple[int, ...] = ()) -> None:
    left, right = final_state(whole), final_state(parted)
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert_equal(value, right[name], name)
    # A sitting closes with a row of its own; all other rows are those of the whole run.
    own = rows(whole)
    assert [row for row in rows(parted) if row in own] == own
    extra = [row for row in rows(parted) if row not in own]
    assert len(extra) <= len(stops)
    assert not any("eval/mean_reward" in row for row in extra)
    policies = [load_policy(folder / "best") for folder in (whole, parted)]
    best = [dict(leaves(policy.parts, "best")) for policy in policies]
    for name, value in best[0].items():
        assert_equal(value, best[1][name], name)
    assert policies[0].meta == policies[1].meta
    results = [json.loads((folder / "result.json").read_text()) for folder in (whole, parted)]
    for key in ("env_steps", "updates", "eval_return_mean", "best_eval_return", "stopped_by"):
        assert results[0][key] == results[1][key], key
    assert results[0]["stopped_by"] == "steps"
    assert results[0]["updates"] > 100
