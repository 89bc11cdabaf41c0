"""Metrics of a dataset after every epoch, and what a run does when they are on a plateau."""

from __future__ import annotations

import contextlib
import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import qfleet
from qfleet.config.config import Config
from qfleet.core.types import EnvSpec
from qfleet.data.manifest import Dataset
from qfleet.engines.offline import make_dataset_memory, with_dataset
from qfleet.engines.parts import LoopParts
from qfleet.engines.registry import build
from qfleet.memory.ring import Ring
from qfleet.networks.factory import make_network
from qfleet.storage.checkpoint import load_checkpoint, load_policy
from qfleet.telemetry.faults import FaultLog
from qfleet.training import plateau
from qfleet.training.early_stopping import EarlyStopping
from qfleet.training.validate_data import Validate, agreement, measure
from support.configs import tiny_config, tiny_fields
from support.datasets import CARTPOLE, record_block, scripted_block, telling_block


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An episode's first action is 0, the others are 1; the first observation tells which."""
    folder = tmp_path_factory.mktemp("data")
    record_block(folder, telling_block(200), CARTPOLE)
    return str(folder)


def train(data: str, run_dir: Path, **fields: Any) -> qfleet.Trained:
    fields = tiny_fields(**{"validation_data": data, "learning_rate": 1e-2, **fields})
    fields.pop("preset")
    trained = qfleet.train(data=data, run_dir=run_dir, **fields)
    assert isinstance(trained, qfleet.Trained)
    return trained


def validations(run_dir: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").open()]
    return [line for line in lines if "data/agreement" in line]


def test_precision_and_recall_by_hand() -> None:
    """Of 10 actions 0, 6 are chosen as 0; of 5 actions 1, 4 as 1; action 2 never occurs."""
    found = agreement(torch.tensor([[6, 4, 0], [1, 4, 0], [0, 0, 0]]))
    assert found == pytest.approx({
        "data/agreement": 10 / 15,
        "data/precision_0": 6 / 7, "data/precision_1": 4 / 8,
        "data/recall_0": 6 / 10, "data/recall_1": 4 / 5,
    })  # fmt: skip


def test_the_metrics_of_a_known_network(data: str) -> None:
    """Q = (3, 1) everywhere, γ 0: the loss is that of the rewards, and action 0 is chosen."""
    config = Config(data=data, net_arch=(), gamma=0.0, loss="mse")
    network = make_network(config, CARTPOLE, torch.device("cpu"), 0)
    for parameter in network.parameters():
        parameter.data.zero_()
    dict(network.named_parameters())["head.advantage.bias_0"].data.copy_(torch.tensor([3.0, 1.0]))
    memory = make_dataset_memory(config, Dataset(data), 0, torch.device("cpu"))
    found = measure(config, network, memory)
    batch = memory.sample(memory.transitions, 0.0)
    error = batch.reward - torch.where(batch.action == 0, 3.0, 1.0)
    assert found["data/td_loss"] == pytest.approx(float(error.square().mean() / 2), rel=1e-5)
    assert found["data/q_spread"] == pytest.approx(2.0)
    assert found["data/agreement"] == pytest.approx(float((batch.action == 0).double().mean()))
    assert found["data/recall_0"] == 1
    assert found["data/recall_1"] == 0
    assert "data/precision_1" not in found
    assert measure(config, network, memory) == found  # also when the memory was read from
    assert measure(config.replace(cql_alpha=1.0), network, memory) == found  # without the penalty
    network.train()
    assert measure(config, network, memory, give_up=lambda: True) is None
    assert network.training  # also when it gave up
    memory.close()


def test_the_td_loss_of_bcq_is_without_the_loss_of_its_model(data: str) -> None:
    """γ 0 and all values 0: the loss is that of the rewards."""
    config = tiny_config(algo="bcq", data=data, net_arch=(), gamma=0.0, loss="mse")
    network = make_network(config, CARTPOLE, torch.device("cpu"), 0)
    for parameter in network.parameters():
        parameter.data.zero_()
    memory = make_dataset_memory(config, Dataset(data), 0, torch.device("cpu"))
    found = measure(config, network, memory)
    reward = memory.sample(memory.transitions, 0.0).reward
    assert found is not None
    assert found["data/td_loss"] == pytest.approx(float(reward.square().mean() / 2), rel=1e-5)
    memory.close()


def test_an_epoch_ends_with_a_validation(data: str, tmp_path: Path) -> None:
    trained = train(data, tmp_path / "run", algo="bc", epochs=5, engine="serial")
    assert trained.result.engine == "offline"  # which is serial without environments
    lines = validations(tmp_path / "run")
    assert len(lines) == 5
    assert lines[-1]["data/agreement"] > 0.95
    assert lines[-1]["data/td_loss"] < lines[0]["data/td_loss"]


def test_a_run_stops_when_the_agreement_is_on_a_plateau(data: str, tmp_path: Path) -> None:
    trained = train(
        data, tmp_path / "run", algo="bc", epochs=100, plateau_metric="agreement", patience=3,
        eval_freq=0, n_eval_episodes=1,
    )  # fmt: skip
    assert trained.result.stopped_by == "patience"
    assert trained.result.eval_return_mean is not None  # no evaluation has stopped it
    values = [line["data/agreement"] for line in validations(tmp_path / "run")]
    assert 3 < len(values) < 100
    assert max(values[:-3]) >= max(values[-3:])
    best = validations(tmp_path / "run")[values.index(max(values))]
    assert load_policy(tmp_path / "run" / "best").meta["env_steps"] == best["env_steps"]


def test_the_best_policy_is_that_of_the_smallest_loss(data: str, tmp_path: Path) -> None:
    train(data, tmp_path / "run", algo="bc", epochs=4, plateau_metric="td_loss", patience=4)
    lines = validations(tmp_path / "run")
    losses = [line["data/td_loss"] for line in lines]
    assert losses.index(min(losses)) != losses.index(max(losses))
    best = lines[losses.index(min(losses))]
    assert load_policy(tmp_path / "run" / "best").meta["env_steps"] == best["env_steps"]


def test_a_metric_that_is_not_finite_is_never_the_best() -> None:
    stopping = EarlyStopping(tiny_config(patience=2))
    added = [stopping.add(value) for value in (float("nan"), -1.0, float("nan"), float("inf"))]
    assert [is_best for is_best, *_ in added] == [False, True, False, False]
    assert [stops for _, stops, _ in added] == [False, False, False, True]
    assert stopping.best == -1.0


def test_patience_counts_epochs_that_pass_between_two_looks(data: str, tmp_path: Path) -> None:
    """A fleet may read several epochs of a small dataset meanwhile."""
    config = with_dataset(tiny_config(
        algo="bc", data=data, validation_data=data, plateau_metric="td_loss", patience=3
    ))  # fmt: skip
    parts = build(config, FaultLog())
    run: Any = Mock(config=config, parts=parts, folder=tmp_path, is_out_of_time=lambda: False)
    run.not_training = lambda _: contextlib.nullcontext()
    hook = Validate(config, plateau.Plateau())
    hook.on_start(run)
    for epochs, stops in ((2, False), (4, False), (5, True)):
        parts.clock.env_steps = epochs * Dataset(data).manifest.transitions
        hook.on_step(run)
        assert run.stop.called == stops
    parts.close()


@pytest.mark.parametrize(
    ("spec", "fields", "words"),
    [
        (CARTPOLE, {"frame_stack": 4}, "frame_stack"),
        (replace(CARTPOLE, env_id="Acrobot-v1"), {}, "env"),
        (CARTPOLE, {"clip_rewards": True}, "clip_rewards"),
        (replace(CARTPOLE, obs_shape=(5,)), {}, "observations or actions"),
    ],
)
def test_validation_data_that_does_not_fit_is_refused_at_once(
    spec: EnvSpec, fields: dict[str, Any], words: str, data: str, tmp_path: Path
) -> None:
    validation = tmp_path / "validation"
    record_block(validation, scripted_block(spec, 60, 1), spec, **fields)
    with pytest.raises(
        qfleet.ConfigError, match=f"/validation' has other {words} than data .*split"
    ):
        train(data, tmp_path / "run", validation_data=str(validation))
    assert not (tmp_path / "run").exists()


def test_validation_data_may_move_while_a_run_is_stopped(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its path is relative to where the run began."""
    shutil.copytree(data, tmp_path / "validation")
    monkeypatch.chdir(tmp_path)
    cut = train(
        data, tmp_path / "run", algo="bc", epochs=3, validation_data="validation",
        options=qfleet.RunOptions(stop_after=400),
    )  # fmt: skip
    assert cut.config.validation_data == str(tmp_path / "validation")
    (tmp_path / "validation").rename(tmp_path / "moved")
    with pytest.raises(qfleet.QfleetError, match="has no manifest"):
        qfleet.resume(tmp_path / "run")
    qfleet.resume(tmp_path / "run", validation_data="moved")
    assert len(validations(tmp_path / "run")) == 3


@pytest.mark.parametrize(("most", "grown"), [(40, 40), (16, 0), (8, 0)])
def test_batches_grow_up_to_a_limit_and_never_shrink(
    most: int, grown: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plateau, "MOST_SAMPLES", most)
    fields = tiny_fields(
        steps=300, engine="serial", eval_freq=60, lr_plateau_patience=1, learning_rate=1e-9,
        batch_plateau_factor=4.0,
    )  # fmt: skip
    trained = qfleet.train("CartPole-v1", run_dir=tmp_path / "run", **fields)
    assert load_checkpoint(trained.folder / "checkpoints").parts["run"]["batch"][0] == grown
    assert trained.result.updates == 50  # one for six env steps, however large batches are


def test_a_burst_of_larger_batches_draws_no_more_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to 64 batches of 128 are drawn at once, and then one batch of 8192."""
    drawn, sample = list[int](), Ring.sample

    def noted(self: Ring, count: int, beta: float) -> Any:
        drawn.append(count)
        return sample(self, count, beta)

    monkeypatch.setattr(Ring, "sample", noted)
    fields = tiny_fields(
        steps=768, engine="serial", envs=1, learning_starts=256, train_freq=256, gradient_steps=4,
        batch_size=128, eval_freq=256, eval_max_steps=20, lr_plateau_patience=1, net_arch=(2,),
        batch_plateau_factor=64.0, learning_rate=1e-9,
    )  # fmt: skip
    qfleet.train("CartPole-v1", run_dir=tmp_path / "run", **fields)
    assert 4 * 128 in drawn
    assert max(drawn) == 8192


def test_rows_that_are_owed_when_batches_grow_stay_owed(data: str) -> None:
    """64 rows are read and one of their four updates is made; then 64 more rows are read."""
    fields = tiny_fields(data=data, batch_plateau_factor=2.0, lr_plateau_patience=1)
    fields.pop("preset")
    config = with_dataset(Config(**fields))
    state: dict[str, Any] = {}
    for resumes in (False, True):
        parts = build(config, FaultLog())
        assert isinstance(parts, LoopParts)
        run: Any = SimpleNamespace(config=config, parts=parts, progress=Mock())
        parts.clock.env_steps, parts.clock.updates = 64, 1
        grows = plateau.Plateau()
        if resumes:
            parts.clock.env_steps = 128
            grows.load_state_dict(run, state)
        else:
            grows.reached(run)
            assert parts.limiter.updates_owed() == 1  # of 48 rows, and 16 rows are left
            parts.clock.env_steps = 128
            state = grows.state_dict(run)
        assert parts.limiter.updates_owed() == 3  # of 112 rows
        parts.close()


def test_batches_grow_on_a_plateau_and_a_resumed_run_goes_on_alike(
    data: str, tmp_path: Path
) -> None:
    fields = {
        "algo": "bc", "epochs": 12, "plateau_metric": "agreement", "lr_plateau_patience": 2,
        "lr_plateau_factor": 1.0, "batch_plateau_factor": 2.0,
    }  # fmt: skip
    whole = train(data, tmp_path / "whole", **fields)
    state = load_checkpoint(whole.folder / "checkpoints").parts
    assert state["run"]["batch"][0] >= 32
    assert whole.result.updates < whole.result.env_steps // 16
    options = qfleet.RunOptions(stop_after=whole.result.env_steps * 3 // 4)
    train(data, tmp_path / "cut", options=options, **fields)
    cut = load_checkpoint(tmp_path / "cut" / "checkpoints").parts
    assert cut["run"]["batch"][0]  # it had grown before the run was stopped
    qfleet.resume(tmp_path / "cut")
    resumed = load_checkpoint(tmp_path / "cut" / "checkpoints").parts
    assert torch.equal(resumed["learner"]["weights"], state["learner"]["weights"])
    assert resumed["run"]["updates"] == state["run"]["updates"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"plateau_metric": "td_loss", "validation_data": ""}, "plateau_metric"),
        ({"batch_plateau_factor": 2.0}, "lr_plateau_patience"),
        ({"batch_plateau_factor": 2.0, "engine": "all-reduce"}, "batch_plateau_factor"),
        ({"cql_alpha": 1.0, "head": "c51"}, "head must be q or qr"),
        ({"bcq_threshold": 0.3, "algo": "bc"}, "loss"),
        ({"balance": True, "engine": "parameter-server"}, "balance"),
        ({"record": "somewhere", "engine": "all-reduce"}, "record"),
        ({"record": "somewhere", "engine": "parameter-server"}, "record"),
        ({"baseline": "run", "engine": "parameter-server"}, "baseline"),
        ({"plateau_metric": "td_loss"}, "plateau_metric .* patience"),
        ({"dropout": 0.5, "net_arch": ()}, "dropout needs hidden layers"),
    ],
)
def test_what_does_not_go_together_is_refused(
    fields: dict[str, Any], words: str, data: str, tmp_path: Path
) -> None:
    with pytest.raises(qfleet.ConfigError, match=words):
        train(data, tmp_path / "run", **fields)


def test_cql_needs_a_dataset(tmp_path: Path) -> None:
    with pytest.raises(qfleet.ConfigError, match="--data"):
        qfleet.train("CartPole-v1", algo="cql", run_dir=tmp_path / "run")
