"""Elastic averaging, local SGD with an outer step, ADMM and FedAvg, alone and on shards."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from server_cases import Client, make_shard, noise, weights_of
from torch import Tensor, nn

from qfleet.errors import ConfigError
from qfleet.parameter_server.admission import Async, Sync
from qfleet.parameter_server.schemes import (
    ConsensusADMM,
    ElasticAveraging,
    LocalSteps,
    Nesterov,
    elastic_difference,
    elastic_round,
    weighted_mean,
)
from qfleet.parameter_server.shard import Exchange, Shard
from qfleet.updaters.optimisers import make_optimiser

SIZE = 6


# --- elastic averaging ------------------------------------------------------------------------


def test_an_elastic_round_by_hand() -> None:
    workers, centre = elastic_round(
        [torch.tensor([4.0]), torch.tensor([-8.0])], torch.zeros(1), 0.25
    )
    assert [float(weights) for weights in workers] == [3.0, -6.0]
    assert float(centre) == -1.0


def test_elastic_moves_conserve_the_sum() -> None:
    workers = [torch.tensor([float(i), -2.0 * i]) * 8 for i in range(4)]
    moved, centre = elastic_round(workers, torch.tensor([16.0, -8.0]), 0.125)
    before = torch.stack([*workers, torch.tensor([16.0, -8.0])]).sum(0)
    assert torch.equal(torch.stack([*moved, centre]).sum(0), before)


def test_workers_and_centre_of_a_shard_come_together() -> None:
    """Without gradients nothing is left but the springs: all end where their mean was."""
    rule = ElasticAveraging(alpha=0.3, period=2)
    shard = make_shard(Async(), torch.zeros(SIZE), workers=3)
    local = [noise(SIZE, worker) for worker in range(3)]
    total = torch.stack(local).sum(0)
    sequence = 0
    for step in range(1, 121):
        if not rule.due(step):
            continue
        for worker, weights in enumerate(local):
            answer = shard.exchange(Exchange(worker, sequence, 0, weights, rule.alpha))
            assert answer.difference is not None
            weights.sub_(answer.difference)
        sequence += 1
    assert sequence == 60
    for weights in (*local, weights_of(shard)):
        torch.testing.assert_close(weights, total / 4, rtol=1e-4, atol=1e-5)


def test_one_worker_on_a_shard_is_an_elastic_round() -> None:
    shard = make_shard(Async(), noise(SIZE, 0), workers=1)
    weights = noise(SIZE, 1)
    (moved,), centre = elastic_round([weights], noise(SIZE, 0), 0.2)
    answer = shard.exchange(Exchange(0, 0, 0, weights, 0.2))
    assert answer.difference is not None
    assert torch.equal(weights - answer.difference, moved)
    assert torch.equal(weights_of(shard), centre)
    assert torch.equal(answer.difference, elastic_difference(weights, noise(SIZE, 0), 0.2))


# --- local SGD --------------------------------------------------------------------------------


def gradient_at(weights: Tensor, worker: int, step: int) -> Tensor:
    return weights + noise(SIZE, worker, step)


def nesterov_shard(start: Tensor, momentum: float) -> Shard:
    mine = start.clone()
    return Shard(mine, Nesterov(mine, momentum), Sync())


def run_local_sgd(shard: Shard, period: int, inner_rate: float, outer_rate: float) -> Tensor:
    rule = LocalSteps(period)
    clients = [Client(shard, worker) for worker in range(3)]
    for _ in range(10):
        for client in clients:
            start = client.pull()
            weights, step = start.clone(), 0
            while True:
                step += 1
                gradient = gradient_at(weights, client.worker, client.sequence * period + step)
                weights -= inner_rate * gradient
                if rule.due(step):
                    break
            client.push(rule.difference(start, weights), outer_rate)
    return weights_of(shard)


def test_one_local_step_without_momentum_is_sync_sgd() -> None:
    local = run_local_sgd(nesterov_shard(noise(SIZE, 9), 0.0), 1, 0.1, 1.0)
    shard = make_shard(Sync(), noise(SIZE, 9))
    clients = [Client(shard, worker) for worker in range(3)]
    for _ in range(10):
        for client in clients:
            client.pull()
            client.push(gradient_at(client.weights, client.worker, client.sequence + 1), 0.1)
    torch.testing.assert_close(local, weights_of(shard), rtol=1e-5, atol=1e-6)
    assert not torch.allclose(local, noise(SIZE, 9), atol=0.1)


def test_more_local_steps_go_further() -> None:
    start = noise(SIZE, 9) + 10
    distances = [
        float((run_local_sgd(nesterov_shard(start, 0.0), period, 0.02, 1.0) - start).norm())
        for period in (1, 4)
    ]
    assert distances[1] > 2 * distances[0]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_outer_step_is_torchs(momentum: float) -> None:
    mine, parameter = noise(SIZE, 0), nn.Parameter(noise(SIZE, 0))
    ours = Nesterov(mine, momentum)
    stock = torch.optim.SGD([parameter], lr=0.7, momentum=momentum, nesterov=momentum > 0)
    for step in range(20):
        parameter.grad = noise(SIZE, step)
        ours.step(mine, noise(SIZE, step), 0.7, None)
        stock.step()
    torch.testing.assert_close(mine, parameter.detach())


def test_a_bad_outer_gradient_changes_nothing_without_asking() -> None:
    weights = noise(SIZE, 0)
    optimiser = Nesterov(weights, 0.9)
    optimiser.step(weights, noise(SIZE, 1), 0.7, torch.zeros(()))
    before, velocity = weights.clone(), optimiser.state_dict()["velocity"].clone()
    optimiser.step(weights, noise(SIZE, 2) * torch.nan, 0.7, torch.ones(()))
    assert torch.equal(weights, before)
    assert torch.equal(optimiser.state_dict()["velocity"], velocity)


def test_the_outer_step_goes_on_from_a_snapshot() -> None:
    shard = nesterov_shard(noise(SIZE, 0), 0.9)
    client = Client(shard, 0)
    client.push(noise(SIZE, 1), 0.7)
    other = nesterov_shard(torch.zeros(SIZE), 0.9)
    other.restore(shard.snapshot())
    for each in (shard, other):
        Client(each, 0).push(noise(SIZE, 2), 0.7)
    assert torch.equal(weights_of(shard), weights_of(other))


# --- ADMM -------------------------------------------------------------------------------------


def least_squares(worker: int) -> tuple[Tensor, Tensor]:
    return noise(8 * 3, worker, 1).view(8, 3), noise(8, worker, 2)


def slope_of(worker: int) -> Callable[[Tensor], Tensor]:
    rows, values = least_squares(worker)
    return lambda x: rows.T @ (rows @ x - values)


def test_admm_reaches_the_closed_form_of_least_squares() -> None:
    count = 3
    problems = [least_squares(worker) for worker in range(count)]
    matrix = sum(rows.T @ rows for rows, _ in problems)
    exact = torch.linalg.solve(matrix, sum(rows.T @ values for rows, values in problems))
    own = [torch.linalg.solve(rows.T @ rows, rows.T @ values) for rows, values in problems]
    assert min(float((solution - exact).norm()) for solution in own) > 0.05

    weights = torch.zeros(3)
    shard = Shard(weights, make_optimiser("sgd", weights, 0.0), Sync())
    clients = [Client(shard, worker) for worker in range(count)]
    rho = 5.0
    steepest = max(float(torch.linalg.matrix_norm(rows.T @ rows, 2)) for rows, _ in problems)
    workers = [
        ConsensusADMM(weights, rho, inner_steps=20, inner_rate=1 / (steepest + rho))
        for _ in range(count)
    ]
    for _ in range(100):
        for client, admm in zip(clients, workers, strict=True):
            admm.solve(client.weights, slope_of(client.worker))
            client.push(admm.difference(client.weights))
        for client, admm in zip(clients, workers, strict=True):
            admm.agree(client.pull())
    torch.testing.assert_close(weights_of(shard), exact, rtol=1e-3, atol=1e-4)
    for admm in workers:
        torch.testing.assert_close(admm.weights, exact, rtol=1e-3, atol=1e-3)


def test_an_admm_round_by_hand() -> None:
    """f(x) = (x − 3)² / 2, ρ 1, one inner step of ½ from x = z = 1: the slope is −2, so x = 2."""
    z = torch.tensor([1.0])
    admm = ConsensusADMM(z, rho=1.0, inner_steps=1, inner_rate=0.5)
    admm.solve(z, lambda x: x - 3.0)
    assert admm.weights.tolist() == [2.0]
    assert admm.difference(z).tolist() == [-1.0]
    admm.agree(torch.tensor([1.5]))  # u = 0.5
    # Slope (2 − 3) + (2 − 1.5 + 0.5) = 0: it stays, and offers x + u = 2.5.
    admm.solve(torch.tensor([1.5]), lambda x: x - 3.0)
    assert admm.weights.tolist() == [2.0]
    assert admm.difference(torch.tensor([1.5])).tolist() == [-1.0]
    other = ConsensusADMM(torch.zeros(1), rho=1.0, inner_steps=1, inner_rate=0.5)
    other.load_state_dict(admm.state_dict())
    assert other.difference(torch.tensor([1.5])).tolist() == [-1.0]


# --- FedAvg -----------------------------------------------------------------------------------


def test_a_mean_by_samples() -> None:
    mean = weighted_mean([torch.tensor([4.0, 0.0]), torch.tensor([0.0, 8.0])], [3, 1])
    assert mean.tolist() == [3.0, 2.0]


def test_a_shard_holds_the_mean_by_samples() -> None:
    shard = make_shard(Sync(), noise(SIZE, 0))
    local, samples = [noise(SIZE, 1 + worker) for worker in range(3)], [5, 1, 14]
    clients = [Client(shard, worker) for worker in range(3)]
    for client, weights, count in zip(clients, local, samples, strict=True):
        client.push(LocalSteps.difference(client.weights, weights), weight=float(count))
    torch.testing.assert_close(weights_of(shard), weighted_mean(local, samples))


@pytest.mark.parametrize(
    "make",
    [
        lambda: ElasticAveraging(alpha=0.0, period=1),
        lambda: ElasticAveraging(alpha=0.5, period=0),
        lambda: LocalSteps(0),
        lambda: ConsensusADMM(torch.zeros(1), rho=0.0, inner_steps=1, inner_rate=0.1),
        lambda: ConsensusADMM(torch.zeros(1), rho=1.0, inner_steps=0, inner_rate=0.1),
        lambda: weighted_mean([torch.zeros(1)], [0]),
    ],
)
def test_settings_that_cannot_work_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(ConfigError, match="use"):
        make()
