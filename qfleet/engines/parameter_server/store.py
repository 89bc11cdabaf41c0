"""The memory that a run needs in the object store of the servers' node.

In: a configuration and its weights. Out: bytes, and an error if the store has fewer. All vectors
pass through that node: gradients, the weights in replies, and snapshots.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qfleet.config.config import Config
from qfleet.engines.cluster import ray_cluster
from qfleet.engines.cluster.ray_cluster import Cluster
from qfleet.engines.parameter_server.server import make_shard_optimiser

SNAPSHOTS = 3
"""Snapshots per server in memory: the last one, the next one, and that of a checkpoint."""
FREE = 0.2
"""Share of the store that must stay free: with less, Ray begins to write to the disk."""


def snapshot_bytes(config: Config, weights: Tensor) -> int:
    """Return the largest size of one snapshot of all servers together."""
    state = make_shard_optimiser(config, torch.zeros_like(weights)).state_dict().values()
    optimiser = sum(value.nbytes for value in state if isinstance(value, Tensor))
    # It includes kept gradients, and differences that may be requested again.
    kept = 0 if config.update == "async" else config.workers * weights.nbytes
    return weights.nbytes + optimiser + kept


def store_bytes(config: Config, weights: Tensor) -> int:
    """Return the bytes that may be in flight or held at one time."""
    sent_and_answered = 2 * config.workers * weights.nbytes
    fetched = weights.nbytes
    held = sent_and_answered + fetched + SNAPSHOTS * snapshot_bytes(config, weights)
    return int(held / (1 - FREE))


def check_store(cluster: Cluster, needed_bytes: int) -> None:
    contents, lower = "gradients, weights and snapshots", "--workers or --net-arch"
    ray_cluster.check_store(cluster, cluster.store_bytes_here(), needed_bytes, contents, lower)
