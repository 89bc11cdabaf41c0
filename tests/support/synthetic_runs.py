"""Synthetic run folders for the tests of this room."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

EVAL = "eval/mean_reward"
ROLLOUT = "rollout/ep_rew_mean"


def write_run(
    path: Path,
    metrics: list[dict[str, Any]] | None = None,
    result: dict[str, Any] | None = None,
    **config: Any,
) -> Path:
    path.mkdir(parents=True)
    base = {"env": "CartPole-v1", "algo": "dqn", "engine": "serial", "seed": 0, "steps": 1000}
    (path / "config.json").write_text(json.dumps(base | config))
    if metrics is not None:
        (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
    if result is not None:
        (path / "result.json").write_text(json.dumps(result))
    return path


def curve(*values: float, every: int = 100) -> list[dict[str, Any]]:
    return [
        {"env_steps": (i + 1) * every, EVAL: value, ROLLOUT: value / 2, "train/loss": 0.5}
        for i, value in enumerate(values)
    ]
