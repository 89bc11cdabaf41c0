"""Small populations of agents on the device engine, on the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import qfleet
from qfleet.config.config import Config
from qfleet.training.run import Run
from qfleet.training.run_state import RunOptions
from support.configs import tiny_config

FIELDS: dict[str, Any] = {
    "engine": "device", "device": "cpu", "steps": 512, "envs": 4, "train_freq": 64,
    "gradient_steps": 8, "learning_rate": 1e-2, "max_episode_steps": 30, "seed": 2,
    "population": 3, "eval_freq": 256, "n_eval_episodes": 2,
    "log_interval": 128, "checkpoint_freq": 256, "threads": 1,
    # So large that gradients which are nothing but rounding do not decide a step's direction.
    "optimizer_eps": 1e-2,
}  # fmt: skip


def configure(**changes: Any) -> Config:
    return tiny_config(algo="pqn", **{**FIELDS, **changes})


def train(folder: Path, **changes: Any) -> qfleet.Result:
    """Not qfleet.train: the learning curve it draws would cost more than these runs."""
    return Run(configure(**changes), folder, RunOptions()).go()


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").open()]
