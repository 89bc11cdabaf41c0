"""Shards against what they must equal: the local updater, one shard, the full batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from qfleet.agent.updaters.local import LocalUpdater
from qfleet.agent.updaters.optimisers import make_optimiser
from qfleet.agent.weights import FlatWeights
from qfleet.engines.parameter_server.admission import Async, Sync
from qfleet.engines.parameter_server.clipping import clip
from qfleet.engines.parameter_server.layout import cut
from qfleet.engines.parameter_server.shard import Shard
from support.server_cases import EPS, NAMES, Client, make_shard, noise, weights_of

STEPS = 30


def make_network() -> FlatWeights:
    torch.manual_seed(0)
    return FlatWeights(nn.Sequential(nn.Linear(5, 9), nn.Linear(9, 3)))


def gradient_of(size: int, step: int) -> Tensor:
    """Small and large ones, some of which are clipped; every seventh is bad."""
    gradient = noise(size, step) * 10 ** (step % 4 - 2)
    if step % 7 == 6:
        gradient[step % size] = torch.nan
    return gradient


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0])
@pytest.mark.parametrize("shards", [1, 4])
def test_one_worker_at_a_barrier_is_the_local_updater_bit_for_bit(
    name: str, max_grad_norm: float, shards: int
) -> None:
    local = make_network()
    updater = LocalUpdater(local, make_optimiser(name, local.data, EPS), max_grad_norm)
    size = local.data.numel()
    slices = cut(size, shards)
    servers = [make_shard(Sync(), local.data[part], name) for part in slices]
    clients = [Client(server, 0) for server in servers]
    skipped = 0.0
    for step in range(STEPS):
        rate = 0.1 / (step + 1)
        local.grad.copy_(gradient_of(size, step))
        skipped += float(updater.apply(rate)["skipped"])
        gradient = gradient_of(size, step)
        clip(gradient, max_grad_norm)
        for client, part in zip(clients, slices, strict=True):
            client.push(gradient[part], rate)
            client.pull()
        assert torch.equal(torch.cat([client.weights for client in clients]), local.data)
    assert skipped > 0
    for server in servers:
        assert server.counters.dropped == {"not-finite": skipped}
        assert server.stamp.version == STEPS - skipped


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [11, 257, 4099])
@pytest.mark.parametrize("shards", [2, 3, 7])
def test_many_shards_are_one_shard_bit_for_bit(shards: int, size: int, name: str) -> None:
    start = noise(size, 99)
    ends = []
    for count in (1, shards):
        slices = cut(size, count)
        servers = [make_shard(Sync(), start[part], name) for part in slices]
        clients = [[Client(server, worker) for server in servers] for worker in range(3)]
        for step in range(STEPS // 2):
            for worker, mine in enumerate(clients):
                known = torch.cat([client.pull() for client in mine])
                gradient = known * 0.1 + noise(size, worker, step)
                clip(gradient, 5.0)
                for client, part in zip(mine, slices, strict=True):
                    client.push(gradient[part], 0.05, weight=1.0 + worker)
        ends.append(torch.cat([weights_of(server) for server in servers]))
    assert torch.equal(ends[0], ends[1])
    assert not torch.equal(ends[0], start)


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_split_over_workers_is_about_the_full_batch(name: str) -> None:
    torch.manual_seed(1)
    network = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    local = FlatWeights(network)
    updater = LocalUpdater(local, make_optimiser(name, local.data, 1e-3), 0.0)
    start = local.data.clone()
    inputs = noise(24 * 4, 0).view(24, 4)
    targets = noise(24, 1)

    def gradient_on(weights: Tensor, rows: slice) -> Tensor:
        local.data.copy_(weights)
        loss = (network(inputs[rows]).squeeze(1) - targets[rows]).square().mean()
        local.set_grad(torch.autograd.grad(loss, local.parameters))
        return local.grad.clone()

    weights = start.clone()
    for _ in range(STEPS):
        local.grad.copy_(gradient_on(weights, slice(0, 24)))
        updater.apply(0.01)
        weights = local.data.clone()

    mine = start.clone()
    shard = Shard(mine, make_optimiser(name, mine, 1e-3), Sync())
    clients = [Client(shard, worker) for worker in range(3)]
    for _ in range(STEPS):
        for client in clients:
            rows = slice(client.worker * 8, client.worker * 8 + 8)
            client.push(gradient_on(client.pull(), rows), 0.01)
    torch.testing.assert_close(weights_of(shard), weights, rtol=1e-3, atol=1e-4)
    assert not torch.allclose(weights, start, atol=1e-2)


def test_async_workers_on_one_quadratic_end_at_its_minimum() -> None:
    """Two workers by turns, each one update behind: stale, but a small rate forgives it."""
    shard = make_shard(Async(), noise(4, 0))
    clients = [Client(shard, worker) for worker in range(2)]
    for _ in range(200):
        for client in clients:
            client.push(client.weights - 3.0, 0.1)
            client.pull()
    assert set(shard.counters.staleness) == {0, 1}
    torch.testing.assert_close(weights_of(shard), torch.full((4,), 3.0))
