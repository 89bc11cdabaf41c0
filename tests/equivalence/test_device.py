"""The device engine on the CPU: without chance it is serial bit for bit; stopped, it goes on so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from qfleet.config.config import Config
from support.runs import assert_equal, assert_same_run, configure, final_state, resume, rows, train

GAME = "MinAtar/Breakout-v1"
DEVICE: dict[str, Any] = {
    "engine": "device", "envs": 4, "network": "mlp", "steps": 400, "eval_freq": 200, "threads": 1,
}  # fmt: skip
GREEDY: dict[str, Any] = {"exploration_initial_eps": 0.0, "exploration_final_eps": 0.0}
ACTOR = "state.actor."


def on_device(algo: str = "dqn", env: str = GAME, **changes: Any) -> Config:
    return configure(env, algo, **{**DEVICE, **changes})


@pytest.mark.parametrize(
    ("algo", "changes"),
    [
        ("dqn", {"block_rows": 7, "train_freq": 16, "gradient_steps": 6, "clip_rewards": True}),
        ("c51", {"double": True, "n_steps": 3, "block_rows": 3}),
        pytest.param("rainbow", {}, marks=pytest.mark.slow),
    ],
)
def test_without_chance_it_is_serial(algo: str, changes: dict[str, Any], tmp_path: Path) -> None:
    config = on_device(algo, **GREEDY, **changes)
    train(config, tmp_path / "device")
    train(config.replace(engine="serial"), tmp_path / "serial")
    ours, theirs = (final_state(tmp_path / name) for name in ("device", "serial"))
    compared = 0
    for name, value in theirs.items():
        if not name.startswith(ACTOR):
            assert_equal(ours[name], value, name)
            compared += 1
    assert compared > 20
    for name in ("noise", "returns", "episodes"):
        assert_equal_numbers(ours[f"{ACTOR}{name}"], theirs[f"{ACTOR}{name}"])
    # Logs and evaluations too: the same episodes, in the same order.
    assert rows(tmp_path / "device") == rows(tmp_path / "serial")
    results = [result(tmp_path / name) for name in ("device", "serial")]
    assert results[0]["updates"] == results[1]["updates"] > 100
    seeds = [json.loads((tmp_path / n / "seeds.json").read_text()) for n in ("device", "serial")]
    assert seeds[0] == seeds[1]


def assert_equal_numbers(ours: Any, theirs: Any) -> None:
    assert (ours.tolist() if hasattr(ours, "tolist") else ours) == (
        theirs.tolist() if hasattr(theirs, "tolist") else theirs
    )


def result(folder: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return values


@pytest.mark.parametrize(
    ("config", "stops"),
    [
        (on_device(), (137, 311)),
        (on_device("rainbow", "CartPole-v1", envs=3, eval_eps=0.2), (201,)),
        (
            on_device(
                env="MountainCar-v0",
                exploration_ladder=True,
                exploration_final_eps=0.4,
                block_rows=5,
            ),
            (100,),
        ),
    ],
    ids=lambda value: f"{value.env}-{value.algo}" if type(value) is Config else None,
)
def test_a_resumed_run_is_the_whole_run(
    config: Config, stops: tuple[int, ...], tmp_path: Path
) -> None:
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    train(config, whole)
    train(config, parted, stop_after=stops[0])
    for stop in (*stops[1:], None):
        resume(parted, stop_after=stop)
    assert_same_run(whole, parted, stops)
