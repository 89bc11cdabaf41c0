"""Elastic averaging, local SGD with an outer step and ADMM: the workers' updaters on live servers.

Several workers and servers in one process. Where workers meet at a barrier, each has a thread;
where they do not, they step one after another, so that the order is known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qfleet.agent.weights import FlatWeights
from qfleet.config.config import Config
from qfleet.config.validation import validate
from qfleet.core.types import StateDict
from qfleet.engines.parameter_server.client import Servers
from qfleet.engines.parameter_server.layout import cut
from qfleet.engines.parameter_server.schemes import Nesterov
from qfleet.engines.parameter_server.server import Server
from qfleet.engines.parameter_server.updaters import make_remote_updater
from qfleet.telemetry.timers import Timers
from support.server_cases import DirectLine, noise

SIZE = 6
Slope = Callable[[int, Tensor], Tensor]
"""Of a worker's loss at its weights."""


class Team:
    """Workers that have joined servers, and descend by gradients that they are given."""

    def __init__(self, start: Tensor, snapshots: list[StateDict] | None = None, **fields: Any):
        told = {
            "engine": "parameter-server", "workers": 2, "servers": 2, "optimizer": "sgd",
            "max_grad_norm": 0.0, "device": "cpu",
        }  # fmt: skip
        self.config = config = validate(Config(**(told | fields)))
        parts = cut(len(start), config.servers)
        self.servers = [Server(config, start[part].numpy()) for part in parts]
        if snapshots is not None:
            self.servers = [Server(config, s["weights"], snapshot=s) for s in snapshots]
        # What a worker begins with comes from the servers, not from its network.
        networks = [nn.Linear(len(start), 1, bias=False) for _ in range(config.workers)]
        self.workers = [FlatWeights(network) for network in networks]
        self.updaters = [
            make_remote_updater(config, weights, self._servers_of(worker))
            for worker, weights in enumerate(self.workers)
        ]
        for updater in self.updaters:
            updater.join()

    def _servers_of(self, worker: int) -> Servers:
        lines = [DirectLine(server) for server in self.servers]
        return Servers(worker, len(self.workers[worker].data), lines, Timers())

    @property
    def held(self) -> Tensor:
        """What the servers hold."""
        return torch.cat([torch.tensor(server.snapshot()["weights"]) for server in self.servers])

    def step(self, worker: int, gradient: Tensor | Sequence[float], rate: float) -> None:
        try:
            self.workers[worker].grad.copy_(torch.as_tensor(gradient))
            self.updaters[worker].apply(rate)
        except BaseException:
            for server in self.servers:  # or the others would wait for it
                server.leave(worker)
            raise

    def in_turn(self, gradients: Sequence[Sequence[float]], rate: float) -> None:
        for worker, gradient in enumerate(gradients):
            self.step(worker, gradient, rate)

    def at_once(self, gradients: Sequence[Sequence[float]], rate: float) -> None:
        """A step of every worker; who has to wait for the others waits in a thread of its own."""
        self.descend(lambda worker, _: torch.tensor(gradients[worker]), 1, rate)

    def descend(self, slope: Slope, steps: int, rate: float) -> None:
        def go(worker: int) -> None:
            for _ in range(steps):
                self.step(worker, slope(worker, self.workers[worker].data), rate)

        with ThreadPoolExecutor(len(self.workers)) as pool:
            for done in [pool.submit(go, worker) for worker in range(len(self.workers))]:
                done.result()

    def where(self) -> list[list[float]]:
        return [weights.data.tolist() for weights in self.workers]


def pulled_to(*targets: float) -> Slope:
    """The slope of (x − target)² / 2, a target for each worker."""
    return lambda worker, weights: weights - targets[worker]


def noisy(worker: int, weights: Tensor) -> Tensor:
    """Another slope for every worker."""
    return weights + noise(SIZE, worker)


# --- elastic averaging ------------------------------------------------------------------------


def test_elastic_meetings_by_hand() -> None:
    team = Team(torch.zeros(2), update="easgd", local_steps=1, easgd_alpha=0.25)
    team.step(0, [-4.0, 8.0], 1.0)  # at (4, −8), and a quarter of the way to the centre at 0
    assert team.workers[0].data.tolist() == [3.0, -6.0]
    assert team.held.tolist() == [1.0, -2.0]
    team.step(1, [7.0, 6.0], 1.0)  # at (−7, −6): (−8, −4) from where the first left the centre
    assert team.workers[1].data.tolist() == [-5.0, -5.0]
    assert team.held.tolist() == [-1.0, -3.0]
    assert team.workers[0].data.tolist() == [3.0, -6.0]


def test_elastic_moves_conserve_the_sum() -> None:
    """Worker and centre move by the same: what is added in all is what the own steps add."""
    start = torch.tensor([16.0, -8.0])
    team = Team(start, workers=4, update="easgd", local_steps=2, easgd_alpha=0.125)
    total = 5 * start
    for step in range(6):
        gradients = [[8.0 * worker, -16.0 * (worker - step)] for worker in range(4)]
        team.in_turn(gradients, 1.0)
        total = total - torch.tensor(gradients).sum(0)
        everybody = torch.stack([*(weights.data for weights in team.workers), team.held])
        assert torch.equal(everybody.sum(0), total)
    assert not torch.equal(team.held, start)


def test_elastic_workers_meet_the_centre_every_so_many_steps() -> None:
    team = Team(torch.zeros(2), update="easgd", local_steps=3, easgd_alpha=0.5)
    for step in range(1, 3):
        team.in_turn([[-2.0, 2.0]] * 2, 1.0)
        assert team.where() == [[2.0 * step, -2.0 * step]] * 2
        assert team.held.tolist() == [0.0, 0.0]
    team.step(0, [-2.0, 2.0], 1.0)
    assert (team.where()[0], team.held.tolist()) == ([3.0, -3.0], [3.0, -3.0])


def test_without_gradients_workers_and_centre_come_together() -> None:
    """Nothing is left but the springs: all end where their mean was."""
    team = Team(torch.zeros(SIZE), workers=3, update="easgd", local_steps=2, easgd_alpha=0.3)
    local = [noise(SIZE, worker) for worker in range(3)]
    for weights, away in zip(team.workers, local, strict=True):
        weights.data.copy_(away)
    for _ in range(120):
        team.in_turn([[0.0] * SIZE] * 3, 1.0)
    assert [server.account()["applied"] for server in team.servers] == [3 * 60] * 2
    for held in (*(weights.data for weights in team.workers), team.held):
        torch.testing.assert_close(held, torch.stack(local).sum(0) / 4, rtol=1e-4, atol=1e-5)


def test_alpha_is_0_9_over_the_number_of_workers_by_default() -> None:
    team = Team(torch.zeros(2), workers=3, update="easgd", local_steps=1)
    team.step(0, [-10.0, 20.0], 1.0)
    torch.testing.assert_close(team.held, torch.tensor([3.0, -6.0]))


# --- local SGD --------------------------------------------------------------------------------


def test_outer_rounds_by_hand() -> None:
    """Two own steps, and a Nesterov step (rate ½, momentum ½) down the mean of the ways gone."""
    team = Team(
        torch.tensor([8.0, 0.0]),
        update="local-sgd",
        local_steps=2,
        outer_learning_rate=0.5,
        outer_momentum=0.5,
    )
    team.at_once([[1.0, 0.0], [5.0, -2.0]], 1.0)
    assert team.where() == [[7.0, 0.0], [3.0, 2.0]]
    assert team.held.tolist() == [8.0, 0.0]
    # Ways back (4, 0) and (8, −4), in the mean (6, −2), which is the velocity too.
    team.at_once([[3.0, 0.0], [3.0, -2.0]], 1.0)
    assert team.held.tolist() == [8.0 - 0.5 * (6.0 + 0.5 * 6.0), 0.5 * (2.0 + 0.5 * 2.0)]
    assert team.where() == [[3.5, 1.5]] * 2  # both go on from there
    # Ways back (2, 2) and (6, 2), in the mean (4, 2); velocity (3, −1) + (4, 2) = (7, 1).
    team.at_once([[1.0, 2.0], [2.0, 0.0]], 1.0)
    team.at_once([[1.0, 0.0], [4.0, 2.0]], 1.0)
    assert team.held.tolist() == [3.5 - 0.5 * (4.0 + 0.5 * 7.0), 1.5 - 0.5 * (2.0 + 0.5 * 1.0)]
    assert team.where() == [[-0.25, 0.25]] * 2


PLAIN = {"update": "local-sgd", "outer_learning_rate": 1.0, "outer_momentum": 0.0}
"""The servers hold the mean of where workers ended."""


def test_one_local_step_without_momentum_is_sync_sgd() -> None:
    start = noise(SIZE, 9)
    local = Team(start, workers=3, local_steps=1, **PLAIN)
    sync = Team(start, workers=3, update="sync")
    for team in (local, sync):
        team.descend(noisy, 10, 0.1)
    torch.testing.assert_close(local.held, sync.held, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(local.held, start, atol=0.1)


def test_more_local_steps_go_further() -> None:
    start = noise(SIZE, 9) + 10
    distances = []
    for period in (1, 4):
        team = Team(start, workers=3, local_steps=period, **PLAIN)
        team.descend(noisy, 10 * period, 0.02)
        assert team.servers[0].account()["version"] == 10
        distances.append(float((team.held - start).norm()))
    assert distances[1] > 2 * distances[0]


def test_the_mean_of_local_steps_is_by_samples() -> None:
    """As in FedAvg (1602.05629)."""
    start, samples = noise(SIZE, 0), [5, 1, 14]
    team = Team(start, workers=3, local_steps=1, **PLAIN)
    for updater, count in zip(team.updaters, samples, strict=True):
        updater.share = float(count)
    ends = [noise(SIZE, 1 + worker) for worker in range(3)]
    team.descend(lambda worker, weights: weights - ends[worker], 1, 1.0)
    mean = sum(end * (count / 20) for end, count in zip(ends, samples, strict=True))
    torch.testing.assert_close(team.held, mean)


@pytest.mark.parametrize("update", ["local-sgd", "admm"])
def test_a_way_that_is_bad_for_one_server_is_taken_by_none(update: str) -> None:
    team = Team(torch.zeros(4), workers=1, update=update, local_steps=1)
    team.workers[0].data[0] = math.inf
    team.step(0, [1.0] * 4, 1.0)
    assert team.held.tolist() == [0.0] * 4
    assert [server.account()["dropped"] for server in team.servers] == [{"not-finite": 1}] * 2


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
    fields = {"workers": 1, "update": "local-sgd", "local_steps": 2}
    team = Team(noise(SIZE, 0), **fields)
    team.descend(noisy, 2, 0.5)
    restored = Team(team.held, [server.snapshot() for server in team.servers], **fields)
    without_velocity = Team(team.held, **fields)
    for each in (team, restored, without_velocity):
        each.descend(noisy, 2, 0.5)
    assert torch.equal(team.held, restored.held)
    assert not torch.allclose(team.held, without_velocity.held, atol=0.01)


# --- ADMM -------------------------------------------------------------------------------------


def test_admm_rounds_by_hand() -> None:
    """f(x) = (x − 3)² / 2 and (x − 1)² / 2, ρ 2, one own step of ½ a round, from x = z = 1."""
    team = Team(torch.ones(2), update="admm", local_steps=1, admm_rho=2.0)
    slope = pulled_to(3.0, 1.0)
    # Slopes −2 and 0. Nobody has a price yet: z is the mean of 2 and 1, and u = ±½.
    team.descend(slope, 1, 0.5)
    assert (team.where(), team.held.tolist()) == ([[2.0] * 2, [1.0] * 2], [1.5] * 2)
    # −1 + 2 (2 − 1.5 + 0.5) = 1, and 0 + 2 (1 − 1.5 − 0.5) = −2. The mean of x + u is that of 2
    # and 1.5; u = ½ + (1.5 − 1.75) and −½ + (2 − 1.75).
    team.descend(slope, 1, 0.5)
    assert (team.where(), team.held.tolist()) == ([[1.5] * 2, [2.0] * 2], [1.75] * 2)
    # −1.5 + 2 (1.5 − 1.75 + 0.25) = −1.5, and 1 + 2 (2 − 1.75 − 0.25) = 1; x + u = 2.5 and 1.25.
    team.descend(slope, 1, 0.5)
    assert (team.where(), team.held.tolist()) == ([[2.25] * 2, [1.5] * 2], [1.875] * 2)


def test_duals_of_who_is_left_go_into_the_consensus() -> None:
    """As long as the same workers meet, duals add up to 0; then one leaves, and ½ is left."""
    team = Team(torch.ones(2), update="admm", local_steps=1, admm_rho=2.0)
    team.descend(pulled_to(3.0, 1.0), 1, 0.5)
    for server in team.servers:
        server.leave(1)
    team.step(0, [-1.0, -1.0], 0.5)  # at 1.5, as in the second round above
    assert (team.where()[0], team.held.tolist()) == ([1.5] * 2, [2.0] * 2)


def test_who_joins_anew_begins_at_the_consensus_without_duals() -> None:
    team = Team(torch.ones(2), update="admm", local_steps=1, admm_rho=2.0)
    team.descend(pulled_to(3.0, 1.0), 1, 0.5)
    assert team.where() == [[2.0] * 2, [1.0] * 2]
    for updater in team.updaters:
        updater.join()
    assert team.where() == [[1.5] * 2] * 2
    team.descend(pulled_to(1.5, 1.5), 1, 0.5)  # at the minimum of both, and nothing pulls
    assert (team.where(), team.held.tolist()) == ([[1.5] * 2] * 2, [1.5] * 2)


def test_admm_reaches_the_closed_form_of_least_squares() -> None:
    """Two workers with other rows each, two servers with other weights each."""
    problems = [
        (noise(8 * 3, worker, 1).view(8, 3), noise(8, worker, 2) + worker) for worker in range(2)
    ]
    matrix = sum(rows.T @ rows for rows, _ in problems)
    exact = torch.linalg.solve(matrix, sum(rows.T @ values for rows, values in problems))
    own = [torch.linalg.solve(rows.T @ rows, rows.T @ values) for rows, values in problems]
    assert min(float((solution - exact).norm()) for solution in own) > 0.05

    def slope(worker: int, x: Tensor) -> Tensor:
        rows, values = problems[worker]
        return rows.T @ (rows @ x - values)

    rho = 5.0
    steepest = max(float(torch.linalg.matrix_norm(rows.T @ rows, 2)) for rows, _ in problems)
    team = Team(torch.zeros(3), update="admm", local_steps=10, admm_rho=rho)
    team.descend(slope, 10 * 60, 1 / (steepest + rho))
    torch.testing.assert_close(team.held, exact, rtol=1e-3, atol=1e-4)
    for weights in team.workers:
        torch.testing.assert_close(weights.data, exact, rtol=1e-3, atol=1e-3)
