"""One small configuration for all tests that train: each test names what it needs besides."""

from __future__ import annotations

from typing import Any

from qfleet.config.config import Config
from qfleet.config.presets import resolve

TINY: dict[str, Any] = {
    "net_arch": (16,),
    "batch_size": 16,
    "eval_freq": 0,
    "n_eval_episodes": 1,
    "log_interval": 100,
    "checkpoint_freq": 100_000,
    "tensorboard": False,
}
"""A small network, one evaluation of one episode at the end, and no files that nobody reads."""


def tiny_config(env: str = "CartPole-v1", algo: str = "dqn", **fields: Any) -> Config:
    """Return the configuration of a short run, without a preset."""
    return resolve(env, algo, "none", fields=TINY | fields)[0]


def tiny_fields(**fields: Any) -> dict[str, Any]:
    """Return the same as keyword arguments of ``qfleet.train``."""
    return {"preset": "none", **TINY, **fields}
