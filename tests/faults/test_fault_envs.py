"""Faults 1, 2, 6, 7, 10 to 14 and 52 of docs/faults.md, at the level of a whole run."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import qfleet
from qfleet.core.errors import (
    EnvironmentFault,
    FaultRateError,
    MemoryRefusedError,
    UnknownNameError,
    UnsupportedEnvError,
    UserError,
)
from qfleet.storage.checkpoint import load_checkpoint
from support.exact_values import solve_q
from support.faulty_envs import TINY, ChainEnv, FaultyEnv, RudeEnv, faulty, result_of, rude
from support.messages import holds, says


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("nan_reward", "env_reward"),
        ("large_reward", "env_reward"),
        ("nan_obs", "env_observation"),
    ],
)
def test_a_rare_bad_number_is_counted_and_never_learnt_from(
    fault: str, kind: str, tmp_path: Path
) -> None:
    trained = qfleet.train(**faulty(fault, every=150), run_dir=tmp_path / "run")
    count = trained.result.faults[kind]
    assert 3 <= count <= 4
    assert result_of(trained.folder)["faults"] == {kind: count}
    assert trained.result.stopped_by == "steps"
    memory = load_checkpoint(trained.folder / "checkpoints").parts["memory"]
    assert np.isfinite(memory["reward"].numpy()).all()
    assert np.isfinite(torch.cat(memory["frames"].tensors).numpy()).all()


@pytest.mark.parametrize(
    ("fault", "kind"),
    [("nan_reward", "env_reward"), ("nan_obs", "env_observation"), ("crash", "env_crash")],
)
def test_too_many_faults_end_the_run_with_env_and_step_named(
    fault: str, kind: str, tmp_path: Path
) -> None:
    with pytest.raises(FaultRateError) as caught:
        qfleet.train(**faulty(fault, every=7), run_dir=tmp_path / "run")
    message = str(caught.value)
    assert message.startswith(f"{kind}: ")
    assert holds(message, "env 0", "support.faulty_envs:FaultyEnv", "step 7", "--max-fault-rate")
    result = result_of(tmp_path / "run")
    assert result["stopped_by"].startswith("error: ")
    assert result["env_steps"] < 600


def test_a_higher_rate_may_be_tolerated(tmp_path: Path) -> None:
    trained = qfleet.train(
        **faulty("nan_reward", every=7), run_dir=tmp_path / "r", max_fault_rate=1
    )
    assert trained.result.faults["env_reward"] > 50


def test_a_run_that_ends_in_error_at_its_last_step_says_so_in_its_result(tmp_path: Path) -> None:
    """The rate is looked at per log interval, and the last of them lies behind the loop."""
    with pytest.raises(FaultRateError):
        qfleet.train(
            **{**faulty("nan_reward", every=7), "log_interval": 10_000}, run_dir=tmp_path / "run"
        )
    assert result_of(tmp_path / "run")["stopped_by"].startswith("error: ")


@pytest.mark.parametrize("vectorize", ["sync", "async"])
def test_a_crashing_env_is_rebuilt_and_counted(vectorize: str, tmp_path: Path) -> None:
    """A rebuilt one counts its steps anew, so each crashes after 90 calm steps."""
    trained = qfleet.train(
        **faulty("crash", every=90), envs=2, vectorize=vectorize, run_dir=tmp_path / "run"
    )
    assert 4 <= trained.result.faults["env_crash"] <= 6
    assert trained.result.env_steps == 600
    assert trained.result.stopped_by == "steps"


def test_an_env_that_never_resets_ends_in_a_typed_error(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault) as caught:
        qfleet.train(**faulty("reset"), max_env_restarts=3, run_dir=tmp_path / "run")
    message = str(caught.value)
    assert holds(message, "reset", "no licence", "4", "max_env_restarts", "3")


@pytest.mark.parametrize("vectorize", ["sync", "async"])
def test_an_env_that_fails_in_every_episode_ends_an_evaluation(
    vectorize: str, tmp_path: Path
) -> None:
    """Though every other step is completed. The policy is saved."""
    fields = {**faulty("", every=2), "max_env_restarts": 3, "vectorize": vectorize}
    fields["eval_env_kwargs"] = json.dumps({"fault": "crash"})
    with pytest.raises(EnvironmentFault, match=says("boom", "restart 4", "max_env_restarts 3")):
        qfleet.train(**fields, run_dir=tmp_path / "run")
    result = result_of(tmp_path / "run")
    assert result["stopped_by"].startswith("error: ")
    assert result["faults"] == {"env_crash": 4}
    assert result["eval_return_mean"] is None
    assert not any("eval/mean_reward" in row for row in read_metrics(tmp_path / "run"))
    assert load_checkpoint(tmp_path / "run" / "checkpoints").env_steps == 600
    with pytest.raises(EnvironmentFault, match=says("boom", "max_env_restarts 3")):
        qfleet.evaluate(tmp_path / "run", which="last", trust=True)


def test_an_evaluation_that_failed_is_repeated_by_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {**faulty("", every=2), "eval_env_kwargs": json.dumps({"fault": "crash"})}
    with pytest.raises(EnvironmentFault):
        qfleet.train(**fields, run_dir=tmp_path / "run")
    monkeypatch.setattr(FaultyEnv, "fault", property(lambda _: "", lambda *_: None), raising=False)
    resumed = qfleet.resume(tmp_path / "run", trust=True)
    assert (resumed.result.stopped_by, resumed.result.env_steps) == ("steps", 600)
    assert resumed.result.eval_return_mean is not None
    with pytest.raises(UserError, match="complete"):
        qfleet.resume(tmp_path / "run", trust=True)


@pytest.mark.parametrize("engine", ["serial", "pipeline"])
@pytest.mark.parametrize("eval_freq", [0, 300])
@pytest.mark.usefixtures("default_signals")
def test_an_evaluation_that_a_signal_cut_short_is_repeated_by_a_resume(
    engine: str, eval_freq: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does anything list it: neither the last one nor one between."""
    monkeypatch.setattr(RudeEnv, "met", False)
    fields = {**rude("", ""), "eval_freq": eval_freq, "engine": engine, "vectorize": "sync"}
    signalled = json.dumps({"how": "signal", "where": "step", "at": 5, "once": True})
    cut = qfleet.train(**fields, eval_env_kwargs=signalled, run_dir=tmp_path / "run")
    assert cut.interrupted_by == signal.SIGINT
    assert cut.result.stopped_by == "SIGINT"
    assert cut.result.eval_return_mean is None
    assert not any("eval/mean_reward" in row for row in read_metrics(cut.folder))
    resumed = qfleet.resume(cut.folder, trust=True)
    assert (resumed.result.stopped_by, resumed.result.env_steps) == ("steps", 600)
    rows = read_metrics(cut.folder)
    evaluated = [row["env_steps"] for row in rows if "eval/mean_reward" in row]
    assert evaluated == ([cut.result.env_steps, 600] if eval_freq else [600])


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").open()]


def test_a_changed_observation_names_both_shapes(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match=says("(2,)", "(5,)", "float32")):
        qfleet.train(**faulty("shape", every=99), run_dir=tmp_path / "run")
    assert "got (5,)" in result_of(tmp_path / "run")["stopped_by"]


HUGE = {"buffer_size": 10**15, "steps": 10**15}
REFUSED: list[tuple[dict[str, Any], type[UserError], str]] = [
    ({"env": "Pendulum-v1"}, UnsupportedEnvError, "Pendulum-v1 action Box"),
    ({"env": "CartPol-v1"}, UnknownNameError, "CartPol-v1 CartPole-v1"),
    ({"env": "ALE/Pongg-v5"}, UnknownNameError, "ALE/Pongg-v5 ALE/Pong-v5"),
    ({"env": "CartPole-v1", "algo": "rainbo"}, UnknownNameError, "rainbo rainbow"),
    ({"env": "CartPole-v1", "preset": "cartpol"}, UnknownNameError, "cartpol cartpole"),
    ({"env": "CartPole-v1", **HUGE}, MemoryRefusedError, "buffer-size"),
]


@pytest.mark.parametrize(("asked", "error", "words"), REFUSED, ids=[str(r[0]) for r in REFUSED])
def test_what_cannot_work_is_refused_before_anything_is_written(
    asked: dict[str, Any], error: type[UserError], words: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=says(*words.split())):
        qfleet.train(**{**TINY, **asked}, run_dir=tmp_path / "runs" / "mine")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    # Nor an empty folder, or every mistyped name would leave one behind.
    assert not (tmp_path / "runs" / "mine").exists()


def test_the_largest_memory_that_fits_is_named(tmp_path: Path) -> None:
    with pytest.raises(MemoryRefusedError) as caught:
        qfleet.train("CartPole-v1", **{**TINY, **HUGE}, run_dir=tmp_path / "run")
    named = re.search(r"use --buffer-size (\d+) or less", str(caught.value))
    assert named is not None
    assert 10_000 < int(named[1]) < 10**12


@pytest.mark.slow
def test_a_truncation_bootstraps_and_a_termination_does_not(tmp_path: Path) -> None:
    """Exact Q of a chain whose episodes are cut after five steps, wherever they are."""
    gamma, cells, end = 0.9, ChainEnv.CELLS, ChainEnv.CELLS
    transition = np.zeros((cells + 1, 2, cells + 1))
    reward = np.zeros((cells + 1, 2))
    for cell in range(cells):
        transition[cell, 0, cell] = transition[cell, 1, cell + 1] = 1
        reward[cell, 0] = 0.2
    reward[cells - 1, 1] = 1.0
    transition[end, :, end] = 1
    exact = solve_q(transition, reward, np.arange(cells + 1) == end, gamma)[:cells]
    assert exact == pytest.approx(np.array([[2.0, 1.8], [2.0, 1.8], [2.0, 1.0]]))
    trained = qfleet.train(
        "support.faulty_envs:ChainEnv",
        **TINY
        | {
            "steps": 3000,
            "max_episode_steps": 5,
            "train_freq": 2,
            "batch_size": 64,
            "buffer_size": 3000,
            "net_arch": (64,),
            "gamma": gamma,
            "learning_rate": 1e-2,
            "lr_schedule": "linear",
            "target_update_interval": 30,
            "exploration_fraction": 1.0,
            "exploration_final_eps": 1.0,
            "log_interval": 1000,
            "loss": "mse",
            "max_grad_norm": 0.0,
        },
        run_dir=tmp_path / "run",
    )
    learnt = qfleet.load(trained.folder, "last", trust=True).q_values(np.arange(cells))
    assert learnt == pytest.approx(exact, abs=0.05)
    # Were a truncation taken for a termination, a fifth of all targets would be the bare reward:
    # staying would be worth 0.2 / (1 − 0.9 × 0.8), and a terminated exit 1 + 0.9 × 2 otherwise.
    assert abs(learnt[0, 0] - 0.2 / (1 - 0.9 * 0.8)) > 1.0
    assert abs(learnt[cells - 1, 1] - (1 + 0.9 * 2)) > 1.0
