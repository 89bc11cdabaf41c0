"""A server on a real cluster: what its answers hold when many calls are under way at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from qfleet.config.config import Config
from qfleet.engines.cluster.ray_cluster import Cluster, open_cluster
from qfleet.engines.parameter_server.server import RemoteServer, calls_at_once
from qfleet.engines.parameter_server.wire import (
    INLINE_VECTOR_BYTES,
    Join,
    Push,
    Stamp,
    decode,
    encode,
)
from support.clusters import RAY_MARKS
from support.waiting import deadline

pytestmark = RAY_MARKS

CALLS = 20
WITHIN, BEYOND = INLINE_VECTOR_BYTES // 8, INLINE_VECTOR_BYTES // 2
"""Weights that are half of what travels within a message, and twice as much."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """One for all tests: starting it takes seconds."""
    with open_cluster(2, inline_bytes=INLINE_VECTOR_BYTES, timeout_s=deadline(60.0)) as opened:
        yield opened


def push_all(cluster: Cluster, size: int) -> list[Any]:
    """So many gradients of ones, each sent before the answer to the first has come."""
    config = Config(engine="parameter-server", workers=1, update="async", optimizer="sgd")
    weights, gradient = np.zeros(size, dtype=np.float32), np.ones(size, dtype=np.float32)
    server = cluster.spawn(RemoteServer, config, weights, at_once=calls_at_once(config))
    cluster.get(server.ask.remote(encode(Join(0))), "the server")
    pushes = [Push(0, k, 0, k, gradient, learning_rate=1.0) for k in range(CALLS)]
    calls = [server.ask.remote(encode(push)) for push in pushes]
    for k, call in enumerate(calls):
        answer = decode(cluster.get(call, "the server"))
        assert answer.stamp == Stamp(0, k + 1)
        # All of them: an answer that was written down too late has later weights, or some.
        assert answer.weights.min() == answer.weights.max() == -(k + 1)
    cluster.stop(server)
    return calls


def nodes_of(cluster: Cluster, call: Any) -> list[str]:
    """Those in whose object store the answer is."""
    found: list[str] = cluster.ray.experimental.get_object_locations([call])[call]["node_ids"]
    return found


@pytest.mark.slow
def test_answers_are_of_their_own_update_and_short_ones_pass_by_the_store(
    cluster: Cluster,
) -> None:
    assert not nodes_of(cluster, push_all(cluster, WITHIN)[-1])


def test_long_answers_are_of_their_own_update_and_in_the_store(cluster: Cluster) -> None:
    assert nodes_of(cluster, push_all(cluster, BEYOND)[-1])
