"""qfleet as a library: train, callbacks, what ends a run, load, act, evaluate."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import qfleet
from qfleet.core.errors import ConfigError, UnknownNameError
from qfleet.storage.checkpoint import list_checkpoints, load_checkpoint
from qfleet.telemetry.timers import STAGES
from qfleet.training.run import Run
from qfleet.training.run_state import RunOptions
from support.configs import tiny_fields
from support.messages import says

TINY = tiny_fields(
    steps=400,
    learning_starts=50,
    train_freq=4,
    batch_size=8,
    buffer_size=500,
    target_update_interval=50,
    eval_freq=200,
    n_eval_episodes=2,
    max_episode_steps=50,
)


def train(folder: Path, **changes: Any) -> qfleet.Trained:
    return qfleet.train("CartPole-v1", **TINY | changes, run_dir=folder)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> qfleet.Trained:
    return train(tmp_path_factory.mktemp("library") / "run")


class Diary(qfleet.Callback):
    """Writes down every call; says stop in one of them."""

    def __init__(self, stop_in: str = "", after: int = 1) -> None:
        self.calls: list[tuple[str, Any]] = []
        self._stop_in, self._after = stop_in, after

    def _note(self, method: str, what: Any) -> bool | None:
        self.calls.append((method, what))
        count = sum(name == method for name, _ in self.calls)
        return False if method == self._stop_in and count >= self._after else None

    def on_start(self, run: Run) -> bool | None:
        return self._note("on_start", run.parts.clock.env_steps)

    def on_log(self, run: Run, scalars: dict[str, float | None]) -> bool | None:
        assert scalars["time/env_steps"] == run.parts.clock.env_steps
        return self._note("on_log", run.parts.clock.env_steps)

    def on_evaluation(self, run: Run, evaluation: Any) -> bool | None:
        assert len(evaluation.returns) == run.config.n_eval_episodes
        return self._note("on_evaluation", run.parts.clock.env_steps)

    def on_end(self, run: Run, result: qfleet.Result) -> bool | None:
        assert run.folder.exists()
        return self._note("on_end", result.stopped_by)


# --- callbacks and other ends -----------------------------------------------------------------


def test_callbacks_hear_of_everything_in_order(tmp_path: Path) -> None:
    diary, second = Diary(), Diary()
    train(tmp_path / "run", callbacks=[diary, second])
    assert diary.calls == [
        ("on_start", 0),
        ("on_log", 100),
        ("on_log", 200),
        ("on_evaluation", 200),
        ("on_log", 300),
        ("on_log", 400),
        ("on_evaluation", 400),
        ("on_end", "steps"),
    ]
    assert second.calls == diary.calls


@pytest.mark.parametrize(
    ("method", "after", "env_steps"),
    [("on_log", 2, 200), ("on_evaluation", 1, 200), ("on_start", 1, 0)],
)
def test_a_callback_that_says_false_ends_the_run(
    method: str, after: int, env_steps: int, tmp_path: Path
) -> None:
    # The others are still called, and cannot take it back.
    diary, second = Diary(method, after), Diary()
    result = train(tmp_path / "run", callbacks=[diary, second]).result
    assert (result.stopped_by, result.env_steps) == ("callback", env_steps)
    assert second.calls == diary.calls
    assert diary.calls[-1] == ("on_end", "callback")
    assert list_checkpoints(tmp_path / "run" / "checkpoints") == [env_steps]


def test_a_return_that_is_reached_ends_the_run(tmp_path: Path) -> None:
    result = train(tmp_path / "run", target_return=1.0).result
    assert (result.stopped_by, result.env_steps) == ("target_return", 200)
    assert result.best_eval_return is not None
    assert result.best_eval_return >= 1.0


def test_patience_ends_the_run(tmp_path: Path) -> None:
    """Nothing but truncation ends an episode, so no evaluation beats the first."""
    result = train(tmp_path / "r", max_episode_steps=5, eval_freq=50, patience=3).result
    assert result.eval_return_mean == 5.0
    assert (result.stopped_by, result.env_steps) == ("patience", 200)


def test_a_plateau_lowers_the_learning_rate(tmp_path: Path) -> None:
    folder = train(
        tmp_path / "run",
        max_episode_steps=5,
        eval_freq=100,
        lr_plateau_patience=1,
        lr_plateau_factor=0.1,
        learning_rate=1e-3,
    ).folder
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    rates = [row["train/learning_rate"] for row in rows if "train/learning_rate" in row]
    assert rates == pytest.approx([1e-3, 1e-3, 1e-4, 1e-5])


def test_run_options_change_no_schedule(tmp_path: Path) -> None:
    halted = train(tmp_path / "halted", options=RunOptions(stop_after=300))
    whole = train(tmp_path / "whole")
    rows = [
        [json.loads(line) for line in (run.folder / "metrics.jsonl").open()]
        for run in (halted, whole)
    ]
    rates = [
        [row["rollout/exploration_rate"] for row in run if "train/loss" in row] for run in rows
    ]
    assert rates[0] == rates[1][:3]
    assert halted.result.stopped_by == "stop_after"
    assert halted.interrupted_by is None


# --- what a run leaves ------------------------------------------------------------------------


def test_a_run_leaves_the_files_it_promises(trained: qfleet.Trained) -> None:
    names = {path.name for path in trained.folder.iterdir() if not path.name.startswith(".")}
    assert names == {
        "config.json",
        "seeds.json",
        "metrics.jsonl",
        "result.json",
        "checkpoints",
        "best",
        "plots",
    }
    result = json.loads((trained.folder / "result.json").read_text())
    assert result == dataclasses.asdict(trained.result)
    assert set(result["time_share"]) == set(STAGES)
    ((thread, shares),) = result["resources"].items()
    assert thread == "learner"
    assert {"env", "act", "copy", "learn", "evaluate", "save", "idle"} == set(shares)
    assert sum(shares.values()) == pytest.approx(1.0)
    assert result["communication"] == {"bytes_sent": None, "bytes_received": None, "messages": None}
    assert result["updates"] == (400 - 50) // 4
    assert result["replay_ratio"] == result["updates"] * 8 / 400
    assert result["peak_rss_bytes"] > 10**7
    metrics = [json.loads(line) for line in (trained.folder / "metrics.jsonl").open()]
    assert [row["env_steps"] for row in metrics] == [100, 200, 200, 300, 400, 400]


def test_tensorboard_files_are_written_when_asked_for(tmp_path: Path) -> None:
    folder = train(tmp_path / "run", tensorboard=True).folder
    (events,) = (folder / "tensorboard").iterdir()
    assert b"rollout/" in events.read_bytes()
    assert b"learning_rate" in events.read_bytes()


def test_checkpoints_are_kept_as_asked(tmp_path: Path) -> None:
    folder = train(tmp_path / "run", checkpoint_freq=100, keep_checkpoints=3).folder
    assert list_checkpoints(folder / "checkpoints") == [200, 300, 400]


def test_the_default_folder_is_named_after_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = qfleet.train("CartPole-v1", **TINY, seed=3)
    assert run.folder.parent == tmp_path / "runs"
    assert run.folder.name.startswith("CartPole-v1-dqn-s3-")
    assert qfleet.load(run.folder.name).config == run.config


def test_seeds_are_trained_one_after_another(tmp_path: Path) -> None:
    seeds = qfleet.train_seeds([4, 2], "CartPole-v1", **TINY, run_dir=tmp_path / "run")
    assert [run.config.seed for run in seeds.runs] == [4, 2]
    assert seeds.aggregate["seeds"] == [4, 2]
    assert [run.folder.name for run in seeds.runs] == ["seed-4", "seed-2"]
    weights = [
        load_checkpoint(run.folder / "checkpoints").parts["learner"]["weights"]
        for run in seeds.runs
    ]
    assert not torch.equal(*weights)
    for bad in (0, [], [3, 3]):
        with pytest.raises(ConfigError, match=says("seed")):
            qfleet.train_seeds(bad, "CartPole-v1", **TINY, run_dir=tmp_path / "none")


def test_a_whole_config_and_single_fields_are_not_mixed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.replace"):
        qfleet.train(config=qfleet.Config(), steps=10, run_dir=tmp_path / "run")
    with pytest.raises(ConfigError, match="give one of them"):
        qfleet.train("CartPole-v1", **TINY, run_dir=tmp_path / "run", name="run")
    with pytest.raises(UnknownNameError, match=says("learning_rate")):
        train(tmp_path / "run", learning_rat=1e-3)
    assert list(tmp_path.iterdir()) == []


# --- policies ---------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["best", "last"])
def test_a_policy_acts_on_one_observation_and_on_many(which: Any, trained: qfleet.Trained) -> None:
    policy = qfleet.load(trained.folder, which)
    many = np.random.default_rng(0).normal(size=(20, 4)).astype(np.float32)
    actions = policy.act(many)
    assert isinstance(actions, np.ndarray)
    assert actions.shape == (20,)
    assert np.array_equal(actions, policy.q_values(many).argmax(axis=1))
    one = [policy.act(obs) for obs in many]
    assert all(type(action) is int for action in one)
    assert one == actions.tolist()
    assert policy.act(many[0].tolist()) == one[0]
    assert policy.act(many[0].astype(np.float64)) == one[0]


def test_an_observation_of_another_shape_is_refused(trained: qfleet.Trained) -> None:
    policy = qfleet.load(trained.folder)
    with pytest.raises(ConfigError, match=says("(3,)", "(4,)")):
        policy.act(np.zeros(3))
    with pytest.raises(ConfigError, match="must have shape"):
        policy.act(np.zeros((2, 5)))


def test_a_policy_read_back_is_the_one_that_was_evaluated(trained: qfleet.Trained) -> None:
    """The best one, in envs of the run's own seeds, earns what the run says it earned."""
    from qfleet.core.seeding import Seeds

    policy = trained.policy("best")
    evaluation = policy.evaluate(2, Seeds.of(trained.config.seed).eval_envs)
    assert evaluation.mean == trained.result.best_eval_return


def test_an_evaluation_is_repeatable_and_epsilon_matters(trained: qfleet.Trained) -> None:
    first = qfleet.evaluate(trained.folder, episodes=5, seed=3)
    assert qfleet.evaluate(trained.folder, episodes=5, seed=3) == first
    assert len(first.returns) == 5
    assert first.lengths == [int(r) for r in first.returns]  # CartPole pays 1 a step
    assert qfleet.evaluate(trained.folder, episodes=5, seed=4) != first
    assert qfleet.evaluate(trained.folder, episodes=5, seed=3, epsilon=1.0) != first


def test_an_evaluation_uses_the_epsilon_of_its_run(trained: qfleet.Trained) -> None:
    policy = trained.policy()
    greedy, random = policy.evaluate(5, 3, 0.0), policy.evaluate(5, 3, 1.0)
    assert policy.evaluate(5, 3) == greedy != random
    policy.config = policy.config.replace(eval_eps=1.0)
    assert policy.evaluate(5, 3) == random
    assert policy.evaluate(5, 3, 0.0) == greedy


def test_evaluating_changes_nothing_in_a_run(tmp_path: Path) -> None:
    """Noise, replay and random streams included."""
    states = []
    for name, freq in (("often", 60), ("never", 0)):
        run = train(tmp_path / name, eval_freq=freq, noisy=True, prioritized_replay=True)
        states.append(load_checkpoint(run.folder / "checkpoints").parts)
    often, never = states
    for name in ("weights", "target_weights", "noise"):
        assert torch.equal(often["learner"][name], never["learner"][name]), name
    for name, buffer in often["learner"]["buffers"].items():
        assert torch.equal(buffer, never["learner"]["buffers"][name]), name
    assert all(
        torch.equal(left, right)
        for left, right in zip(
            often["memory"]["frames"].tensors, never["memory"]["frames"].tensors, strict=True
        )
    )
    assert often["actor"]["random"] == never["actor"]["random"]


def test_a_missing_run_is_reported_with_the_nearest_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    qfleet.train("CartPole-v1", **TINY, name="mine")
    with pytest.raises(UnknownNameError, match=says("mined", "mine")):
        qfleet.load("mined")
