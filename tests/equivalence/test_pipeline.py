"""The pipeline engine on the CPU: in lockstep it is serial bit for bit; ahead, it is reproducible.

Whole runs go in; their last checkpoints are compared.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import qfleet
from qfleet.agent.learner import Learner
from qfleet.config.config import Config
from qfleet.config.validation import validate
from qfleet.core.errors import CheckpointError
from qfleet.core.types import FIRST, SKIP
from qfleet.engines import placement, registry, stage_rates
from qfleet.engines.parts import Parts
from qfleet.engines.registry import build
from qfleet.storage.checkpoint import list_checkpoints, load_checkpoint
from qfleet.telemetry.faults import FaultLog
from qfleet.training.run_state import RunOptions
from support.messages import says
from support.runs import assert_equal, configure, final_state, leaves, resume, train

CARTPOLE: dict[str, Any] = {"eval_freq": 0, "n_eval_episodes": 1, "steps": 400}
PONG: dict[str, Any] = {
    "env": "ALE/Pong-v5",
    "steps": 60,
    "envs": 4,
    "batch_size": 4,
    "buffer_size": 48,  # wraps around
    "learning_starts": 36,
    "train_freq": 4,
    "gradient_steps": 1,
    "target_update_interval": 24,
    "max_episode_steps": 9,
    "noop_max": 3,
}
ASYNC: dict[str, Any] = {**CARTPOLE, "engine": "pipeline", "vectorize": "async", "envs": 4}


@pytest.fixture(autouse=True)
def no_long_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stages could do alone is not the question here."""
    monkeypatch.setattr(stage_rates, "MEASURE_S", 0.01)
    monkeypatch.setattr(placement, "MEASURE_S", 0.01)


class Watched:
    """An engine without a run around it: no evaluation, no files.

    ``owed`` is what was owed whenever it asked whether to go on collecting, ``state`` what it
    would leave in a checkpoint.
    """

    def __init__(self, config: Config) -> None:
        self.owed: list[int] = []
        self.parts: Parts = build(validate(config), FaultLog())
        self._steps = config.steps
        parts = self.parts
        try:
            registry.run(parts, self._keep_going)
            states = {
                "learner": parts.learner.state_dict(),
                "memory": parts.memory.state_dict(),
                "actor": parts.collector.state_dict(),
                "run": {"env_steps": parts.clock.env_steps, "updates": parts.clock.updates},
            }
            self.state = dict(leaves(states, "state"))
        finally:
            parts.close()

    def _keep_going(self) -> bool:
        self.owed.append(self.parts.limiter.updates_owed())
        return self.parts.clock.env_steps < self._steps


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Weights, moments, replay, priorities, generators, envs, clock: all of the checkpoint."""
    assert one.keys() == other.keys()
    for name, value in one.items():
        # Of noisy nets: what was drawn for the last use, and drawn anew before the next.
        if not name.startswith(("state.learner.buffers.", "state.learner.target_buffers.")):
            assert_equal(value, other[name], name)


def assert_same_state(left: Path, right: Path) -> dict[str, Any]:
    state = final_state(left)
    assert_same(state, final_state(right))
    return state


def result_of(folder: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result


def logged(folder: Path, name: str) -> list[float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    return [row[name] for row in rows if name in row]


# --- lockstep -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"envs": 1},
        {"envs": 3, "vectorize": "sync"},
        {"envs": 4, "vectorize": "async"},
        {"algo": "rainbow", "envs": 1, "steps": 240},
        {"algo": "rainbow", "envs": 4, "vectorize": "async", "steps": 240},
        {"algo": "qr-dqn", "envs": 3},
        {"envs": 4, "train_freq": 16, "gradient_steps": 8},
        {"envs": 3, "vectorize": "async", "train_freq": 16, "gradient_steps": 8, "tau": 0.05},
        {"algo": "prioritized-dqn", "envs": 3, "frame_stack": 2, "n_steps": 3, "steps": 240},
    ],
    ids=[
        "dqn-1",
        "dqn-3-sync",
        "dqn-4-async",
        "rainbow-1",
        "rainbow-4-async",
        "qr-dqn-3",
        "bursts-4",
        "bursts-soft-3-async",
        "stacks-3",
    ],
)
def test_in_lockstep_it_is_serial_bit_for_bit(changes: dict[str, Any], tmp_path: Path) -> None:
    fields = CARTPOLE | changes
    train(configure(**fields, engine="serial"), tmp_path / "serial")
    train(configure(**fields, engine="pipeline", lockstep=True), tmp_path / "pipeline")
    state = assert_same_state(tmp_path / "serial", tmp_path / "pipeline")
    # All that decides how a run goes on was among it, and something was learnt.
    for name in ("learner.weights", "learner.target_weights", "learner.noise", "memory.frames"):
        assert torch.is_tensor(state[f"state.{name}"]), name
    assert "state.actor.random.state.state" in state
    assert state["state.run.updates"] >= 5
    results = [result_of(tmp_path / engine) for engine in ("serial", "pipeline")]
    assert [result["engine"] for result in results] == ["serial", "pipeline"]
    for key in ("env_steps", "updates", "eval_return_mean", "stopped_by", "faults"):
        assert results[0][key] == results[1][key], key


def test_in_lockstep_pong_is_serial_bit_for_bit() -> None:
    fields = PONG | {"algo": "prioritized-dqn", "episodic_life": True, "clip_rewards": True}
    serial = Watched(configure(**fields, engine="serial"))
    pipeline = Watched(configure(**fields, engine="pipeline", lockstep=True))
    assert_same(serial.state, pipeline.state)
    assert serial.state["state.run.updates"] == 6
    assert len(serial.state["state.memory.frames"].unique()) > 2


@pytest.mark.parametrize(
    "changes",
    [
        {"envs": 1, "eval_freq": 200},
        {"algo": "rainbow", "envs": 4, "vectorize": "async", "steps": 240},
    ],
    ids=["dqn", "rainbow-async"],
)
def test_a_lockstep_run_resumes_bit_for_bit(changes: dict[str, Any], tmp_path: Path) -> None:
    config = configure(**CARTPOLE | changes, engine="pipeline", lockstep=True)
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    train(config, whole)
    train(config, parted, stop_after=137)
    assert list_checkpoints(parted / "checkpoints")[-1] < config.steps
    resume(parted)
    state = assert_same_state(whole, parted)
    assert state["state.run.env_steps"] == config.steps


# --- ahead ----------------------------------------------------------------------------------


def delay_learning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Now and then learning takes longer than a block, so that the other side must wait."""
    learn, count = Learner.learn, 0

    def delayed(self: Learner, updates: int) -> None:
        nonlocal count
        count += 1
        if count % 3 == 0:
            time.sleep(0.03)
        learn(self, updates)

    monkeypatch.setattr(Learner, "learn", delayed)


@pytest.mark.parametrize(
    "changes",
    [
        ASYNC | {"env_groups": 2, "block_rows": 5},
        ASYNC | {"env_groups": 1, "block_rows": 2, "replay_slack": 5},
        pytest.param(
            ASYNC | {"env_groups": 3, "algo": "rainbow", "steps": 320, "block_rows": 4},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["groups", "slack", "rainbow"],
)
def test_what_it_computes_does_not_depend_on_timing(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configure(**changes)
    train(config, tmp_path / "one")
    delay_learning(monkeypatch)
    train(config, tmp_path / "two")
    state = assert_same_state(tmp_path / "one", tmp_path / "two")
    assert state["state.run.updates"] >= 5
    # It did work ahead: blocks were collected with weights older than the newest.
    assert logged(tmp_path / "one", "pipeline/version_lag_max")[-1] > 0
    lags = [logged(tmp_path / name, "pipeline/version_lag_mean") for name in ("one", "two")]
    assert lags[0] == lags[1]


@pytest.mark.slow
def test_pong_does_not_depend_on_timing_either(monkeypatch: pytest.MonkeyPatch) -> None:
    config = configure(**PONG, engine="pipeline", env_groups=2, block_rows=3)
    one = Watched(config)
    delay_learning(monkeypatch)
    two = Watched(config)
    assert_same(one.state, two.state)
    assert one.state["state.run.updates"] == 6
    assert one.parts.channel.lag.largest > 0


def test_seeds_matter_when_it_works_ahead(tmp_path: Path) -> None:
    for seed in (5, 6):
        train(configure(**ASYNC | {"steps": 200}, env_groups=2, seed=seed), tmp_path / str(seed))
    states = [final_state(tmp_path / str(seed)) for seed in (5, 6)]
    for name in ("learner.weights", "memory.frames"):
        assert not torch.equal(*(state[f"state.{name}"] for state in states)), name


def updates_of(config: Config) -> int:
    """Exactly what the replay ratio asks for at the end of a run."""
    return (config.steps - config.learning_starts) // config.train_freq * config.gradient_steps


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"block_rows": 1},
        {"block_rows": 7},
        {"train_freq": 16, "gradient_steps": 8, "env_groups": 1},
        {"lockstep": True, "env_groups": 1},
    ],
    ids=str,
)
def test_the_replay_ratio_is_exact(changes: dict[str, Any], tmp_path: Path) -> None:
    config = configure(**ASYNC | {"env_groups": 2, "steps": 300, "buffer_size": 1000} | changes)
    train(config, tmp_path / "run")
    result = result_of(tmp_path / "run")
    assert (result["env_steps"], result["updates"]) == (300, updates_of(config))
    memory = load_checkpoint(tmp_path / "run" / "checkpoints").parts["memory"]
    # All of the steps are in the memory, and none of those that were in flight.
    assert memory["total_rows"] == 75


@pytest.mark.parametrize("slack", [0, 7])
def test_collecting_runs_ahead_by_no_more_than_the_slack(slack: int) -> None:
    config = configure(**ASYNC, env_groups=2, block_rows=1, replay_slack=slack)
    watched = Watched(config)
    # A row is four env steps, and five of them owe two updates: rows owe two or none.
    assert set(watched.owed) == ({0} if slack == 0 else {0, 2, 4, 6})
    owed = watched.parts.limiter.updates_owed()
    assert watched.parts.clock.updates == updates_of(config) - owed
    assert owed <= slack


def test_groups_keep_their_rows_apart_where_nobody_works_ahead() -> None:
    """Envs of this process are stepped in turn with learning; their groups are in flight too."""
    config = configure(
        "support.stateless_envs:StatelessEnv",
        **CARTPOLE | {"engine": "pipeline", "vectorize": "sync", "max_episode_steps": 0},
        envs=4,
        env_groups=2,
        block_rows=5,
        buffer_size=1000,
    )
    memory = Watched(config).parts.memory.state_dict()
    frames = torch.cat(memory["frames"].tensors)[:100]
    flags, reward, action = (memory[k].reshape(-1, 4)[:100] for k in ("flags", "reward", "action"))
    usable = (flags & SKIP) == 0
    assert torch.equal(reward[usable], action[usable].float())
    # [episode, step in it]: 23 steps, then the row of the autoreset.
    rows = torch.arange(100)
    expected = torch.stack((1 + rows // 24, rows % 24), dim=1).float()
    for env in range(4):
        assert torch.equal(frames[:, env], expected), f"env {env}"


def test_a_run_that_worked_ahead_resumes_with_new_episodes_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    config = configure(**ASYNC, env_groups=2, block_rows=5, buffer_size=1000)
    train(config, folder, stop_after=290)
    (stopped,) = list_checkpoints(folder / "checkpoints")
    assert stopped == 300
    capsys.readouterr()
    qfleet.resume(folder, options=RunOptions(display="plain"))
    told = " ".join(capsys.readouterr().err.split())
    assert "open episodes were cut" in told
    result = result_of(folder)
    assert (result["env_steps"], result["stopped_by"]) == (config.steps, "steps")
    assert result["updates"] == updates_of(config)
    memory = load_checkpoint(folder / "checkpoints", config.steps).parts["memory"]
    flags = memory["flags"].reshape(-1, 4)
    frames = torch.cat(memory["frames"].tensors)
    # The last row before the stop leads to a place that nobody saw, and the next is a beginning.
    assert ((flags[74] & SKIP) != 0).all()
    assert ((flags[75] & FIRST) != 0).all()
    assert (frames[75].abs() <= 0.05).all()  # CartPole's openings
    assert not torch.equal(frames[75], frames[0]), "the first episodes are not played again"


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"engine": "pipeline"}, "engine serial pipeline"),
        ({"lockstep": True}, "lockstep False True"),
        ({"env_groups": 2}, "env_groups 1 2"),
    ],
    ids=str,
)
def test_another_engine_is_refused_by_name(
    changed: dict[str, Any], words: str, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    train(configure(**CARTPOLE, envs=4, engine="serial"), folder, stop_after=100)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    with pytest.raises(CheckpointError, match=says(*words.split())):
        qfleet.resume(folder)
