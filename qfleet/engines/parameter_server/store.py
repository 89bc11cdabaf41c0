"""What a run of workers and servers needs of the object store of the servers' node.

In: a configuration and its weights; out: bytes, and a refusal where there are fewer. All that
travels passes through that node: gradients, the weights that answer them, and snapshots.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qfleet.config.config import Config
from qfleet.core.errors import ClusterError
from qfleet.engines.cluster.ray_cluster import Cluster
from qfleet.engines.parameter_server.server import make_shard_optimiser

SNAPSHOTS = 3
"""That are held at a time: the last one of every server, the next, and that of a checkpoint."""
FREE = 0.2
"""Of the store, above what is needed: Ray begins to write to the disk when it has less."""


def snapshot_bytes(config: Config, weights: Tensor) -> int:
    """Of all servers together, at most."""
    state = make_shard_optimiser(config, torch.zeros_like(weights)).state_dict().values()
    optimiser = sum(value.nbytes for value in state if isinstance(value, Tensor))
    # Gradients that wait for others, and differences that may be asked for again, are in it too.
    kept = 0 if config.update == "async" else config.workers * weights.nbytes
    return weights.nbytes + optimiser + kept


def store_bytes(config: Config, weights: Tensor) -> int:
    """What may be under way or held at one time."""
    sent_and_answered = 2 * config.workers * weights.nbytes
    fetched = weights.nbytes
    held = sent_and_answered + fetched + SNAPSHOTS * snapshot_bytes(config, weights)
    return int(held / (1 - FREE))


def check_store(cluster: Cluster, needed_bytes: int) -> None:
    """Ray would go on by writing to the disk, many times slower: say it instead."""
    there = cluster.store_bytes_here()
    if there < needed_bytes:
        raise ClusterError(
            f"the object store of this node of cluster {cluster.address} has "
            f"{there / 2**20:.0f} MiB, too few for {needed_bytes / 2**20:.0f} MiB of gradients, "
            "weights and snapshots; give it more (ray start --object-store-memory) or lower "
            "--workers or --net-arch"
        )
