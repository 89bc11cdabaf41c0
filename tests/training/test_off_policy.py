"""Off-policy evaluation against returns that are known, and its ranking on the command line."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

import qfleet
from qfleet.cli.main import main
from qfleet.config.config import Config
from qfleet.core.types import FIRST, SKIP, TERMINATED, Block, EnvSpec
from qfleet.data.manifest import Dataset
from qfleet.networks.factory import make_network
from qfleet.networks.qnetwork import QNetwork
from qfleet.training import off_policy
from qfleet.training.off_policy import (
    Returns,
    Steps,
    _log_ratio,
    compare,
    range_of_returns,
    weighted_doubly_robust,
)
from support.datasets import record_block

SPEC = EnvSpec("Box-v0", (2,), "float32", 2)
ONCE = np.ones((1, 2))


def steps(reward: object, q: object, v: object, ratio: object) -> Steps:
    return Steps(*(np.array(one, np.float64) for one in (reward, q, v, ratio)))


def test_weighted_doubly_robust_by_hand() -> None:
    """Two episodes of one step, with weights 3/4 and 1/4: ¾·(1 − 2) + ¼·(4 − 2) + mean(3, 5)."""
    found = weighted_doubly_robust(
        steps([[1], [4]], [[2], [2]], [[3], [5]], [[1.0], [1 / 3]]), 0.5, ONCE
    )
    np.testing.assert_allclose(found, [0.75 * -1 + 0.25 * 2 + 4])


def test_weighted_doubly_robust_discounts_and_ends_with_the_value() -> None:
    """No weight is left at step 1: its values count with the weights of step 0, γ·(¾·8 + ¼·4)."""
    found = weighted_doubly_robust(
        steps([[0, 9], [0, 9]], [[0, 7], [0, 7]], [[0, 8], [0, 4]], [[1, 0], [1 / 3, 0]]), 0.5, ONCE
    )
    np.testing.assert_allclose(found, [0.5 * (0.75 * 8 + 0.25 * 4)])


def test_steps_of_episodes_that_terminate_are_cut_off_or_have_no_beginning() -> None:
    """Rows: a terminated episode of two steps, a truncated one of one, and one without step 0."""
    recording = SimpleNamespace(episode=torch.tensor([0, 0, 1, 2]), step=torch.tensor([0, 1, 0, 5]))
    found = Steps.of(
        recording,  # type: ignore[arg-type]
        reward=torch.tensor([1.0, 2, 3, 4]),
        q=torch.tensor([5.0, 6, 7, 8]),
        v=torch.tensor([9.0, 10, 11, 12]),
        v_next=torch.tensor([13.0, 14, 15, 16]),
        goes_on=torch.tensor([True, False, True, True]),
        log_ratio=np.log([4.0, 0.5, 2.0, 3.0]),
    )
    np.testing.assert_array_equal(found.reward, [[1, 2, 0], [3, 0, 0]])
    np.testing.assert_array_equal(found.q, [[5, 6, 0], [7, 0, 0]])
    np.testing.assert_array_equal(found.v, [[9, 10, 0], [11, 15, 0]])
    np.testing.assert_allclose(found.ratio, [[1, 1, 1], [0.5, 1, 1]])


def test_returns_follow_the_data_as_long_as_it_takes_the_actions_of_the_policy() -> None:
    """Rows 0 to 3 are an episode, stored as 3, 1, 2, 0; row 4 is a truncated one."""
    following = torch.tensor([-1, 2, 0, 1, -1])
    reward = torch.tensor([8.0, 2, 4, 1, 5])
    discount = torch.tensor([0.0, 0.5, 0.5, 0.5, 0.5])
    found = Returns.of(following, reward, discount, torch.tensor([True, True, False, False, True]))
    assert found.reward.tolist() == [8, 2, 4 + 0.5 * 8, 1 + 0.5 * 2, 5]
    assert found.discount.tolist() == [0, 0.5, 0, 0.25, 0.5]
    assert found.last.tolist() == [0, 1, 0, 1, 4]


def test_returns_have_a_largest_length() -> None:
    rows = 100
    following = torch.cat((torch.arange(1, rows), torch.tensor([-1])))
    found = Returns.of(following, torch.ones(rows), torch.ones(rows), torch.ones(rows).bool())
    assert found.reward[0] == 2**off_policy.DOUBLINGS < rows - 1
    assert found.last[0] == 2**off_policy.DOUBLINGS - 1
    assert found.reward[-3:].tolist() == [3, 2, 1]


def test_a_bootstrap_sample_weights_episodes_by_their_count() -> None:
    sample = np.array([[2.0, 0.0]])
    found = weighted_doubly_robust(steps([[1], [4]], [[2], [2]], [[3], [5]], [[1], [1]]), 1, sample)
    np.testing.assert_allclose(found, [1 - 2 + 3])


def test_a_probability_that_is_not_known_is_that_of_the_model() -> None:
    recorded = torch.tensor([0.5, 0.0, torch.nan, 0.5], dtype=torch.float64)
    agrees = torch.tensor([True, True, True, False])
    found = _log_ratio(recorded, torch.full((4,), 0.25).log(), agrees)
    np.testing.assert_allclose(found, [np.log(2), np.log(4), np.log(4), -np.inf], rtol=1e-6)


def test_the_model_of_the_data_leaves_illegal_actions_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits (0, ln 3, 5), the last one illegal: −ln ¾ for action 1."""
    spec = EnvSpec("Box-v0", (2,), "float32", 3).with_masks()
    network = make_network(Config(net_arch=()), spec, torch.device("cpu"), 0)
    for parameter in network.parameters():
        parameter.data.zero_()
    bias = dict(network.named_parameters())["head.advantage.bias_0"]
    bias.data.copy_(torch.tensor([0.0, np.log(3), 5.0]))
    losses = list[float]()

    def fit(*arguments: Any) -> QNetwork:
        batch = SimpleNamespace(obs=torch.tensor([[0.0, 0, 1, 1, 0]]), action=torch.tensor([1]))
        losses.append(arguments[-1](network, network, None, batch).item())
        return network

    monkeypatch.setattr(off_policy, "_fit", fit)
    off_policy._fit_behaviour(Mock(), Mock(), 1, 0)
    assert losses == pytest.approx([np.log(4 / 3)], rel=1e-5)


def choices(path: Path, *, biased: bool = False, **env: Any) -> Dataset:
    """Record episodes of two steps; action 1 is rewarded with 1, action 0 with 0.

    ``biased``: action 1 is never taken.
    """
    rows, envs = 300, 2
    random = np.random.default_rng(0)
    flags = torch.zeros(rows, envs, dtype=torch.uint8)
    flags[0::3], flags[1::3], flags[2::3] = FIRST, TERMINATED, SKIP
    action = torch.from_numpy(random.integers(2, size=(rows, envs))) * (not biased)
    obs = torch.zeros(rows, envs, 2)
    obs[..., 0] = (torch.arange(rows) % 3).unsqueeze(1)
    obs[..., 1] = torch.from_numpy(random.normal(size=(rows, envs)))
    chance = torch.full((rows, envs), 1.0 if biased else 0.5)
    block = Block(obs, action, action.float(), flags, probability=chance)
    return record_block(path, block, SPEC, chunk_rows=400, group_rows=400, part_bytes=10**6, **env)


def always(action: int) -> qfleet.Policy:
    config = Config(env=SPEC.env_id, net_arch=())
    network = make_network(config, SPEC, torch.device("cpu"), 0)
    state = {"weights": torch.zeros(6), "buffers": dict(network.named_buffers())}
    state["weights"][4 + action] = 1.0
    return qfleet.Policy(config, SPEC, state)


@pytest.mark.slow
def test_policies_are_ranked_by_their_returns(tmp_path: Path) -> None:
    """Always action 1: 1 + 0.9; always action 0: 0. A quarter of the episodes agree throughout."""
    dataset = choices(tmp_path / "data")
    policies = {"zero": always(0), "one": always(1)}
    one, zero = compare(policies, dataset, gamma=0.9, updates=200)
    assert (one.policy, zero.policy) == ("one", "zero")
    for estimate, truth in ((one, 1.9), (zero, 0.0)):
        assert estimate.fqe == pytest.approx(truth, abs=0.1)
        assert estimate.wdr == pytest.approx(truth, abs=0.1)
        assert estimate.wdr_interval[0] <= estimate.wdr <= estimate.wdr_interval[1]
        assert estimate.fqe_interval[0] <= estimate.fqe <= estimate.fqe_interval[1]
        assert estimate.agreement == pytest.approx(0.5, abs=0.1)
        assert estimate.warning is None
    assert compare({"one": always(1)}, dataset, gamma=0.9, updates=200) == [one]
    other = compare({"one": always(1)}, dataset, gamma=0.9, updates=200, seed=1)
    assert other != [one]  # the negative control


def test_returns_are_bounded_by_the_rewards_of_the_data() -> None:
    assert range_of_returns(torch.tensor([0.5, 1.0]), 0.9) == pytest.approx((0.0, 10.0))
    assert range_of_returns(torch.tensor([-2.0, -1.0]), 0.5) == pytest.approx((-4.0, 0.0))


def test_a_target_network_that_diverges_does_not_move_the_targets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its values are 10⁶; rewards of at most 1 and γ = 0.9 leave targets of at most 10."""
    original, losses = off_policy._fit, list[float]()

    def fit(recording: Any, dataset: Any, _updates: int, seed: int, loss: Any) -> QNetwork:
        online, diverged = (original(recording, dataset, 1, seed, loss) for _ in range(2))
        dict(diverged.named_parameters())["head.advantage.bias_2"].data.fill_(1e6)
        rows = torch.arange(10)
        losses.append(loss(online, diverged, rows, recording.batch(rows)).item())
        return online

    monkeypatch.setattr(off_policy, "_fit", fit)
    compare({"one": always(1)}, choices(tmp_path), gamma=0.9)
    assert 1 < losses[-1] < 12**2


def test_estimates_are_bounded_even_if_fitted_values_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = off_policy._fit

    def fit(recording: Any, dataset: Any, _updates: int, seed: int, loss: Any) -> QNetwork:
        network = original(recording, dataset, 1, seed, loss)
        dict(network.named_parameters())["head.advantage.bias_2"].data.fill_(1e6)
        return network

    monkeypatch.setattr(off_policy, "_fit", fit)
    (found,) = compare({"one": always(1)}, choices(tmp_path), gamma=0.9)
    assert found.fqe == pytest.approx(10)
    assert -10 <= found.wdr <= 20


def test_what_follows_a_lost_life_has_no_beginning(tmp_path: Path) -> None:
    """A game of two lives, with a step and a reward of 1 each: the estimates are of the first."""
    rows = 300
    flags = torch.zeros(rows, 1, dtype=torch.uint8)
    flags[0::3], flags[1::3], flags[2::3] = FIRST | TERMINATED, TERMINATED, SKIP
    obs, ones = torch.ones(rows, 1, 2), torch.ones(rows, 1)
    block = Block(obs, ones.long(), ones, flags, probability=ones)
    dataset = record_block(tmp_path, block, SPEC)
    (found,) = compare({"one": always(1)}, dataset, gamma=0.9, updates=200)
    assert found.fqe == pytest.approx(1, abs=0.1)
    assert found.wdr == pytest.approx(1, abs=0.1)


def test_actions_that_the_data_lacks_are_warned_about(tmp_path: Path) -> None:
    one, zero = sorted(
        compare({"zero": always(0), "one": always(1)}, choices(tmp_path, biased=True), updates=150),
        key=lambda estimate: estimate.policy,
    )
    assert one.rare > 0.9
    assert one.agreement == 0
    assert one.effective_episodes < 1
    assert "rare" in (one.warning or "")
    assert zero.rare == 0
    assert zero.warning is None


def test_the_command_prints_a_ranking(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    choices(tmp_path / "data")
    files = [str(always(action).save(tmp_path / f"always-{action}")) for action in (0, 1)]
    arguments = ["data", "compare", *files, "--data", str(tmp_path / "data"), "--updates", "150"]
    assert main([*arguments, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [report[file]["rank"] for file in files] == [2, 1]
    assert report["warnings"] == []


def test_the_command_notes_clipped_rewards_and_needs_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = str(tmp_path / "data")
    choices(tmp_path / "data", clip_rewards=True)
    file = str(always(1).save(tmp_path / "always-1"))
    assert main(["data", "compare", file, "--data", data, "--updates", "5", "--json"]) == 0
    assert "clipped" in json.loads(capsys.readouterr().out)["warnings"][-1]
    assert main(["data", "compare", "--data", data]) != 0
    assert "at least one run" in capsys.readouterr().err


def test_a_policy_of_other_observations_is_refused(tmp_path: Path) -> None:
    other = EnvSpec("Box-v0", (3,), "float32", 2)
    config = Config(env="Box-v0", net_arch=())
    state = {"weights": torch.zeros(8)}
    buffers = make_network(config, other, torch.device("cpu"), 0).named_buffers()
    policy = qfleet.Policy(config, other, {**state, "buffers": dict(buffers)})
    with pytest.raises(qfleet.ConfigError, match="this policy needs"):
        compare({"other": policy}, choices(tmp_path))
