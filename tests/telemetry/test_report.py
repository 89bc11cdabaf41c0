from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from qfleet.telemetry.report import final_report

RESULT = {
    "env_id": "CartPole-v1",
    "algo": "dqn",
    "engine": "serial",
    "seed": 3,
    "env_steps": 50_000,
    "stopped_by": "target_return",
    "eval_return_mean": 480.25,
    "eval_return_std": 12.0,
    "best_eval_return": 500.0,
    "env_steps_per_s": 1432.4,
    "updates_per_s": 358.1,
    "wall_s": 135.0,
    "time_share": {"env": 0.2, "act": 0.1, "copy": None, "learn": 0.6, "idle": 0.1},
    "faults": {"env_reward": 37, "gradient": 0},
}


def test_says_what_matters() -> None:
    text = final_report(RESULT, Path("runs/x"), Path("runs/x/plots/c.png")).plain
    assert text.splitlines() == [
        "CartPole-v1 · dqn · serial · seed 3 · 50,000 steps · stopped by target_return",
        "  score      480.2 ± 12.0",
        "  best       500.0",
        "  speed      1,432 steps/s, 358 updates/s",
        "  wall time  2 m 15 s",
        "  time in    env 20%  act 10%  learn 60%  idle 10%",
        "  faults     env_reward ×37",
        "  folder     runs/x",
        "  curve      runs/x/plots/c.png",
    ]


def test_every_thread_has_a_line() -> None:
    resources = {"learner": {"learn": 0.9, "idle": 0.1}, "collector": {"env": 0.7, "idle": 0.3}}
    lines = final_report(RESULT | {"resources": resources}, Path("x"), None).plain.splitlines()
    assert lines[5:7] == ["  learner    learn 90%  idle 10%", "  collector  env 70%  idle 30%"]


def test_nulls_leave_their_lines_out() -> None:
    nothing = dict.fromkeys(RESULT)
    for result in (nothing, {}, nothing | {"eval_return_mean": float("nan"), "faults": {}}):
        assert final_report(result, Path("runs/x"), None).plain.split() == ["folder", "runs/x"]


def test_brackets_in_a_folder_are_not_markup() -> None:
    stream = io.StringIO()
    Console(file=stream, width=100).print(final_report({}, Path("runs/[bold]x"), None))
    assert "runs/[bold]x" in stream.getvalue()
