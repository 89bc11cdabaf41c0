"""``--population`` from the command line: train, the table, resume, evaluate and film an agent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from qfleet.cli.main import main

TEXT = (
    "--algo pqn --preset none --engine device --device cpu --steps 512 --envs 4 --train-freq 64 "
    "--gradient-steps 8 --batch-size 16 --net-arch 16 --max-episode-steps 30 --eval-freq 256 "
    "--n-eval-episodes 2 --log-interval 128 --checkpoint-freq 256 --no-tensorboard --quiet"
)
WORDS = [*TEXT.split(), "--population", "4"]


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def test_agents_are_trained_told_resumed_and_played(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    vary = ["--vary", '{"learning_rate": [1e-2, 1e-4]}', "--pbt-interval", "128"]
    words = [*WORDS, *vary, "--run-dir", str(run)]
    assert main(["train", "CartPole-v1", *words, "--stop-after", "256"]) == 0
    assert main(["resume", str(run), "--quiet"]) == 0
    lines = capsys.readouterr().out.splitlines()
    title = max(number for number, line in enumerate(lines) if line.split()[:1] == ["agent"])
    assert lines[title].split() == ["agent", "seed", "learning_rate", "steps", "return", "best"]
    table = [line.split() for line in lines[title + 1 : title + 5]]
    assert sorted(row[0] for row in table) == ["0", "1", "2", "3"]
    best = [float(row[-1]) for row in table]
    assert best == sorted(best, reverse=True)
    assert any("4 agents" in line for line in lines)
    assert (run / "population.jsonl").exists()
    assert len(read(run / "result.json")["agents"]) == 4
    for folder in (run, run / "agents" / "3"):
        assert main(["evaluate", str(folder), "--episodes", "2", "--json"]) == 0
        assert len(json.loads(capsys.readouterr().out)["returns"]) == 2


def test_an_agent_of_a_game_is_filmed(tmp_path: Path) -> None:
    run, film = tmp_path / "run", tmp_path / "film.gif"
    words = [*WORDS, "--network", "mlp", "--steps", "128", "--eval-freq", "128"]
    words += ["--population", "2", "--run-dir", str(run)]
    assert main(["train", "MinAtar/Breakout-v1", *words]) == 0
    agent = str(run / "agents" / "1")
    assert main(["video", agent, "--out", str(film), "--max-frames", "5"]) == 0
    assert film.stat().st_size > 0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--seeds", "2"], "population 4 does not go with several seeds"),
        (["--vary", '{"batch_size": [1]}'], "unknown field to vary 'batch_size'"),
        (["--halving-interval", "64", "--pbt-interval", "64"], "does not go with pbt_interval 64"),
        (["--algo", "iqn"], "head 'iqn' does not go with a population; use q, c51 or qr"),
    ],
    ids=str,
)
def test_what_does_not_go_is_one_line(
    words: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert main(["train", "CartPole-v1", *WORDS, "--run-dir", str(run), *words]) == 2
    told = capsys.readouterr().err.strip().splitlines()
    assert len(told) == 1
    assert says in told[0]
    assert not run.exists()
