from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from qfleet.cli import plot, runs
from qfleet.core.errors import ConfigError, UnknownNameError
from support.messages import says
from support.synthetic_runs import curve, write_run


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


def test_plot_of_one_run_goes_into_its_folder(root: Path, capsys) -> None:
    write_run(root / "a", curve(1, 2, 3))
    assert plot.run(["a"]) == 0
    path = Path("runs") / "a" / "plots" / "learning_curve.png"
    assert capsys.readouterr().out == f"{path}\n"
    assert path.is_file()
    assert plot.run(["a", "--metric", "train/loss"]) == 0
    assert (root / "a" / "plots" / "train_loss.png").is_file()


def test_plot_groups_runs_and_speaks_json(root: Path, capsys) -> None:
    for seed in (0, 1):
        write_run(root / "many" / f"seed-{seed}", curve(1, 2 + seed), seed=seed)
    write_run(root / "b", curve(3, 4), algo="rainbow")
    args = ["many", "b", str(root / "many" / "seed-1"), "--json"]
    assert plot.run(args) == 0
    assert json.loads(capsys.readouterr().out) == {
        "path": "plot.png",
        "metric": "eval/mean_reward",
        "groups": {
            "CartPole-v1 · dqn": ["many/seed-0", "many/seed-1"],
            "CartPole-v1 · rainbow": ["b"],
        },
    }
    assert Path("plot.png").is_file()
    assert plot.run(["many", "b", "--by-algo", "--json", "--out", "x/y.png"]) == 0
    assert list(json.loads(capsys.readouterr().out)["groups"]) == ["dqn", "rainbow"]
    assert Path("x/y.png").is_file()
    assert plot.run(["many"]) == 0
    assert (root / "many" / "plots" / "learning_curve.png").is_file()


def test_plot_errors_are_typed(root: Path) -> None:
    write_run(root / "alpha", curve(1, 2))
    with pytest.raises(UnknownNameError, match=says("alpha")):
        plot.run(["alpa"])
    with pytest.raises(ConfigError, match="qfleet runs"):
        plot.run([])


def test_runs_lists_newest_first(root: Path, capsys) -> None:
    write_run(
        root / "done",
        curve(1, 2),
        {
            "env_steps": 1000,
            "eval_return_mean": 480.2,
            "best_eval_return": float("nan"),
            "env_steps_per_s": 1432.0,
            "wall_s": 42.0,
            "stopped_by": "target_return",
        },
    )
    write_run(root / "full", curve(1), {"env_steps": 1000, "stopped_by": "steps"})
    write_run(root / "going", [*curve(7, 5), {"env_steps": 250, "time/fps": 99.0}])
    write_run(root / "resumed", curve(1, 2, 3), {"env_steps": 200, "stopped_by": "interrupted"})
    write_run(root / "empty")
    write_run(root / "broken")
    (root / "broken" / "config.json").write_text("{")
    for age, name in enumerate(("broken", "empty", "resumed", "going", "full", "done")):
        for file in (root / name).iterdir():
            os.utime(file, (1e9 - age, 1e9 - age))
    assert runs.run(["--json"]) == 0
    rows = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert [(row["name"], row["state"]) for row in rows] == [
        ("broken", "unreadable config.json"),
        ("empty", "running or interrupted"),
        ("resumed", "running or interrupted"),
        ("going", "running or interrupted"),
        ("full", "finished"),
        ("done", "target_return"),
    ]
    going, done = rows[3], rows[5]
    assert (going["env_steps"], going["total_env_steps"]) == (250, 1000)
    assert (going["eval_return_mean"], going["best_eval_return"]) == (5.0, 7.0)
    assert (going["env_steps_per_s"], going["wall_s"]) == (99.0, None)
    assert (done["eval_return_mean"], done["best_eval_return"]) == (480.2, None)
    assert (done["env_steps_per_s"], done["wall_s"]) == (1432.0, 42.0)
    assert (done["env"], done["algo"], done["engine"]) == ("CartPole-v1", "dqn", "serial")

    assert runs.run([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:4] == ["name", "env", "algo", "engine"]
    assert lines[6].split() == [
        *("done", "CartPole-v1", "dqn", "serial", "0"),
        *("1,000/1,000", "480.2", "–", "1,432", "42", "s", "target_return"),
    ]


def test_runs_without_any(root: Path, capsys) -> None:
    assert runs.run(["--root", str(root)]) == 0
    assert "no runs in" in capsys.readouterr().out
    assert runs.run(["--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []


@pytest.mark.parametrize("verb", [plot, runs])
def test_help_shows_examples(verb, capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        verb.run(["--help"])
    assert caught.value.code == 0
    assert "Examples:" in capsys.readouterr().out
    assert "\n" not in verb.HELP


def test_telemetry_is_light() -> None:
    code = (
        "import sys; import qfleet.cli.plot, qfleet.cli.runs; "
        "from qfleet.telemetry import faults, plots, progress, report, timers, writers; "
        "sys.exit(any(name in sys.modules for name in ('torch', 'matplotlib')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
