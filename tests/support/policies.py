"""Policies with random weights: no test of a file's format needs a trained one."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import torch

from qfleet.agent.policy import Policy
from qfleet.agent.weights import FlatWeights
from qfleet.envs.factory import make_envs
from qfleet.networks.factory import make_network
from qfleet.telemetry.faults import FaultLog
from support.configs import tiny_config


def untrained(env: str = "CartPole-v1", algo: str = "dqn", **fields: Any) -> Policy:
    """Return a policy of this environment, which may be imported code."""
    config = tiny_config(env, algo, **fields)
    with closing(make_envs(config, 1, 0, training=False, on_fault=FaultLog())) as envs:
        spec = envs.spec
    network = make_network(config, spec, torch.device("cpu"), seed=7)
    weights = FlatWeights(network)
    state = {"weights": weights.data, "buffers": weights.buffers()}
    return Policy(config, spec, state, "cpu", trust=True)
