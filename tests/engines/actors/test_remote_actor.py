"""An actor in a process: the ordinary one, on its rungs of the ladder, with first priorities."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from qfleet.agent import schedules
from qfleet.agent.schedules import own_ladder
from qfleet.agent.weights import FlatWeights
from qfleet.algorithms.exploration import epsilon_ladder
from qfleet.config.config import Config
from qfleet.engines.actors.block_messages import decode
from qfleet.engines.actors.messages import Order
from qfleet.engines.actors.remote_actor import RemoteActor, actor_seed
from qfleet.engines.actors.shard import ReplayShard
from qfleet.engines.factories import make_objective
from qfleet.networks.factory import make_network
from support.in_process_cluster import small

HOST = torch.device("cpu")


def test_the_actors_rungs_make_up_one_ladder() -> None:
    config = small(workers=3, exploration_ladder=True, exploration_final_eps=0.4)
    rungs = [own_ladder(config, number) for number in range(3)]
    whole = epsilon_ladder(6, 0.4).numpy()
    assert np.array_equal(np.concatenate([rung for rung in rungs if rung is not None]), whole)
    assert whole[0] == pytest.approx(0.4)
    assert whole[-1] == pytest.approx(0.4**8)
    assert own_ladder(small(), 0) is None


def test_an_actor_explores_by_its_own_rungs() -> None:
    config = small(workers=2, exploration_ladder=True, exploration_final_eps=0.4)
    actors = [RemoteActor(config, number) for number in range(2)]
    rates = [actor._actor.exploration_rate(0) for actor in actors]
    ladder = epsilon_ladder(4, 0.4).numpy()
    assert rates == pytest.approx([ladder[:2].mean(), ladder[2:].mean()])


def test_without_a_ladder_epsilon_follows_the_whole_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = small(steps=1000, exploration_fraction=0.5, exploration_final_eps=0.0)
    actor = RemoteActor(config, 0)
    seen: list[int] = []
    epsilon = schedules.epsilon

    def noted(config: Config, env_steps: int) -> float:
        seen.append(env_steps)
        return epsilon(config, env_steps)

    monkeypatch.setattr(schedules, "epsilon", noted)
    actor.work(Order(5, 0, progress=0), None)
    actor.work(Order(5, 0, progress=400), None)
    # Its own steps are part of that progress, or will be: two envs.
    assert seen == [0, 2, 4, 6, 8, 400, 402, 404, 406, 408]


def test_every_actor_and_every_life_has_a_seed_of_its_own() -> None:
    seeds = {
        actor_seed(9, number, life, restarted)
        for number in range(4)
        for life in range(3)
        for restarted in (0, 500)
    }
    assert len(seeds) == 24
    assert actor_seed(9, 0, 0, 0) == 9


def test_weights_and_their_version_come_with_the_order() -> None:
    config = small(exploration_initial_eps=0.0, exploration_final_eps=0.0)
    actor = RemoteActor(config, 0)
    spec = actor._spec
    network = make_network(config, spec, HOST, 123)
    flat = FlatWeights(network)
    weights = flat.data.numpy().copy()
    weights.flags.writeable = False
    report, letter = actor.work(Order(5, 17, 0), weights)
    assert torch.equal(actor._weights.data, flat.data)
    assert (report.rows, report.version, letter.version) == (5, 17, 17)
    assert report.block_bytes == letter.nbytes > 0
    block = decode(letter)
    chosen = network.q_values(block.obs.view(-1, 4)).argmax(1)
    assert torch.equal(chosen, block.action.view(-1))
    # Without weights it goes on with those that it has.
    report, letter = actor.work(Order(5, 17, 10), None)
    assert torch.equal(actor._weights.data, flat.data)
    assert letter.start == 5


@pytest.mark.parametrize("head", ["q", "qr"])
def test_first_priorities_are_the_learners_errors_of_the_same_rows(head: str) -> None:
    config = small(
        workers=1, prioritized_replay=True, n_steps=3, double=True, head=head, n_quantiles=5
    )
    actor = RemoteActor(config, 0)
    shard = ReplayShard(config, actor._spec, [0])
    ring, sizes = shard._rings[0].ring, []
    for _ in range(8):
        _, letter = actor.work(Order(5, 0, 0), None)
        shard.insert(letter)
        assert letter.priority is not None
        sizes.append(len(letter.priority))
        starts = ring.newest_starts(len(letter.priority)).view(-1)
        batch = ring.gather(starts // 2, starts % 2)
        network, objective = actor._network, make_objective(config, HOST, 0)
        with torch.no_grad():
            target_terms = objective.target_terms(batch, network)
            target = objective.target(batch, target_terms, network, network)
            prediction = objective.predict(batch.obs, network)
            expected = objective.loss(prediction, batch.action, network, target).priority
        np.testing.assert_allclose(letter.priority.reshape(-1), expected.numpy(), rtol=1e-5)
    # The first block's last three rows have to wait for the second.
    assert sizes == [2, 5, 5, 5, 5, 5, 5, 5]


def test_an_actor_reports_episodes_and_where_its_time_went() -> None:
    actor = RemoteActor(small(block_rows=64), 1)
    report, letter = actor.work(Order(64, 0, 0), None)
    assert report.episodes
    assert all(episode.env < 2 for episode in report.episodes)
    assert report.seconds["env"] > 0
    assert letter.actor == 1
    assert report.faults == []


def test_faults_of_environments_are_told_with_the_actors_number() -> None:
    actor = RemoteActor(small(), 1)
    actor._note_fault("env_reward", "NaN")
    report, _ = actor.work(Order(5, 0, 0), None)
    assert report.faults == [("env_reward", "actor 1: NaN")]
    assert actor.work(Order(5, 0, 0), None)[0].faults == []
