"""Every verb of the command line, in this process, on one small run."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
import typing
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

import qfleet
from qfleet.cli.main import VERBS, main
from qfleet.cli.run_options import RunArguments, finish
from qfleet.config.config import OPTIONS, Config, Group
from qfleet.training.parallel_advice import Row, Sizes
from qfleet.training.result import Result
from support.configs import tiny_config
from support.messages import holds
from support.waiting import PHASE_S, deadline

RESULT_KEYS = {field.name for field in dataclasses.fields(Result)}
WORDS = (
    "--steps 400 --learning-starts 50 --train-freq 4 --gradient-steps 1 --net-arch 16 "
    "--batch-size 8 --buffer-size 500 --eval-freq 200 --n-eval-episodes 2 --max-episode-steps 50 "
    "--log-interval 100 --no-tensorboard"
)
SMALL = WORDS.split()


class Shell:
    """Calls the command line as a terminal would; remembers what it printed."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self.out = self.err = ""

    def __call__(self, *argv: object) -> int:
        self._capsys.readouterr()
        try:
            code = main([str(word) for word in argv])
        except SystemExit as exit_:
            code = int(exit_.code or 0)
        self.out, self.err = self._capsys.readouterr()
        return code

    def json(self, *argv: object) -> dict[str, Any]:
        assert self(*argv, "--json") == 0, self.err
        assert self.err == ""
        value: dict[str, Any] = json.loads(self.out)
        return value


@pytest.fixture
def shell(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Shell:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    return Shell(capsys)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, for the verbs that only read."""
    folder = tmp_path_factory.mktemp("made") / "small"
    assert main(["train", "CartPole-v1", *SMALL, "--run-dir", str(folder), "--quiet"]) == 0
    return folder


# --- help -------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_a_verb_shows_an_example(verb: str, shell: Shell) -> None:
    assert shell(verb, "--help") == 0
    assert shell.err == ""
    assert "xamples:" in shell.out
    assert f"qfleet {verb} " in shell.out.split("xamples:", 1)[1]


@pytest.mark.parametrize("argv", [(), ("--help",), ("-h",), ("help",)])
def test_help_lists_every_verb(argv: tuple[str, ...], shell: Shell) -> None:
    assert shell(*argv) == 0
    assert "qfleet train CartPole-v1" in shell.out
    for verb in VERBS:
        assert f"\n  {verb} " in shell.out


def listed(help_text: str) -> dict[str, str]:
    """Option → the group that shows it; an option that is shown twice fails."""
    found: dict[str, str] = {}
    group = ""
    for line in help_text.splitlines():  # in boxes, or without lines if the output is not UTF-8
        if title := re.fullmatch(r"(\w+) options|options", line.strip("╭─╮ ")):
            group = title[1] or ""
        elif option := re.match(r"(?:│ |  )(?:-h, )?--([a-z][\w-]*)", line):
            assert option[1] not in found
            found[option[1]] = group
    return found


@pytest.mark.parametrize("verb", ["train", "profile"])
def test_help_all_shows_every_field_in_its_group(verb: str, shell: Shell) -> None:
    assert shell(verb, "--help-all") == 0
    found = listed(shell.out)
    fields = {name.replace("_", "-"): option.group for name, option in OPTIONS.items()}
    assert fields.items() <= found.items()
    assert set(fields.values()) <= set(typing.get_args(Group))


@pytest.mark.parametrize("verb", ["train", "profile"])
def test_help_shows_common_options_only(verb: str, shell: Shell) -> None:
    assert shell(verb, "-h") == 0
    found = listed(shell.out)
    common = {name.replace("_", "-") for name, option in OPTIONS.items() if option.common}
    assert {name for name, group in found.items() if group} == common
    assert {"help", "help-all", "preset", "run-dir"} <= found.keys()
    assert len(found) <= 45
    assert max(map(len, shell.out.splitlines())) <= 100


@pytest.mark.parametrize(
    ("words", "steps", "learning_rate"),
    [
        ("--help", "100000", "0.0001"),
        ("CartPole-v1 --help", "50000", "0.0023"),
        ("--preset pong --help", "3000000", "0.0001"),
        ("--preset pong --help-all", "3000000", "0.0001"),
        ("CartPole-v1 --algo pqn -h", "80000", "0.004"),
    ],
)
def test_help_shows_the_values_of_the_preset(
    words: str, steps: str, learning_rate: str, shell: Shell
) -> None:
    assert shell("train", *words.split()) == 0
    plain = " ".join(re.sub("[│\n]", " ", shell.out).split())
    for name, value in (("steps", steps), ("learning-rate", learning_rate)):
        assert re.search(rf" --{name} [A-Z]+ [^(]*\(default: {re.escape(value)}\)", plain)
    assert "--algo" in plain.split("Examples:")[1]


@pytest.mark.parametrize("flag", ["--version", "-V", "version"])
def test_version(flag: str, shell: Shell) -> None:
    assert shell(flag) == 0
    assert shell.out == f"qfleet {version('qfleet')}\n"


@pytest.mark.parametrize("words", ["--help", "runs", "train CartPole-v1 --help"])
def test_quick_verbs_answer_without_the_heavy_libraries(words: str, tmp_path: Path) -> None:
    code = (
        "import contextlib, sys; from qfleet.cli.main import main\n"
        f"with contextlib.suppress(SystemExit): main({words.split()})\n"
        "print(sorted({'torch', 'gymnasium', 'matplotlib', 'ale_py'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=deadline(PHASE_S),
        check=True,
        cwd=tmp_path,
    )
    assert done.stdout.splitlines()[-1] == "[]"


# --- mistakes ---------------------------------------------------------------------------------

MISTAKES = [
    ("trian CartPole-v1", "verb trian train"),
    ("train", "environment CartPole-v1"),
    ("train CartPol-v1", "CartPol-v1 CartPole-v1"),
    ("train Pendulum-v1", "Pendulum-v1 action"),
    ("train CartPole-v1 --algo dqnn", "dqnn dqn"),
    ("train CartPole-v1 --preset cartpol", "cartpol cartpole"),
    ("train CartPole-v1 --learnin-rate 1", "--learning-rate"),
    ("train CartPole-v1 --steps abc", "abc"),
    ("train CartPole-v1 --steps", "--steps"),
    ("train CartPole-v1 --steps 0", "steps 0"),
    ("train CartPole-v1 --algo pqn --train-freq 2048 --steps 2000", "train_freq 2048"),
    (
        "train CartPole-v1 --engine actors --address 127.0.0.1:99999 --run-dir made",
        "address 127.0.0.1:99999",
    ),
    ("train CartPole-v1 --algo", "--algo"),
    ("train CartPole-v1 --loss l1", "l1"),
    ("train CartPole-v1 --max-wall 5parsecs", "5parsecs"),
    ("train CartPole-v1 --config no.json", "no.json"),
    ("train CartPole-v1 --name ../x", "../x"),
    ("train CartPole-v1 --name x --run-dir y", "name run_dir"),
    ("train CartPole-v1 --buffer-size 1000000000000000 --steps 1000000000000000", "buffer-size"),
    ("train CartPole-v1 --device nosuch", "device nosuch"),
    ("train CartPole-v1 --network no.such:Net", "network no.such:Net"),
    ("train CartPole-v1 --network natur", "natur nature"),
    ("train no.such.module:Env", "environment no.such.module:Env"),
    ("train CartPole-v1 --imports nosuchmodule", "nosuchmodule"),
    ("train CartPole-v1 --seeds 0", "seeds 0"),
    ("train CartPole-v1 --seeds 1000000000000000000", "seeds 1000000000000000000 10000"),
    ("resume", "run"),
    ("resume nosuch", "run nosuch"),
    ("scale nosuch --workers 2", "run nosuch"),
    ("scale nosuch", "--workers"),
    ("evaluate nosuch", "run nosuch"),
    ("train CartPole-v1 --stop-after 0", "--stop-after 0"),
    ("train CartPole-v1 --max-wall 0s", "--max-wall 0s"),
    ("train CartPole-v1 --threads 100000", "threads 100000"),
    ("train CartPole-v1 --sticky-actions 0.5", "sticky_actions Atari"),
    ("train CartPole-v1 --algo noisy-dqn --exploration-ladder", "exploration_ladder noisy"),
    ("video nosuch", "run nosuch"),
    ("plot nosuch", "run nosuch"),
    ("plot", "plot"),
    ("plot nosuch --metrics x", "--metrics"),
    ("runs --rooot x", "--rooot"),
    ("doctor --seconds 0", "--seconds"),
    ("doctor --env CartPol-v1", "CartPol-v1 CartPole-v1"),
    ("doctor --parallel --workers 1", "--workers 1"),
    ("doctor --width 2", "--width --parallel"),
    ("doctor --workers 3", "--workers --parallel"),
    ("doctor --tune --parallel", "--tune --parallel"),
    ("doctor --tune --envs 4", "--envs --tune"),
    ("doctor --tune --seconds 1", "--seconds --tune"),
    ("doctor --parallel --envs 4", "--envs --parallel"),
    ("doctor --env Windmill-v3", "Windmill-v3 PACKAGE:ID"),
    ("doctor --parallel --env CartPole-v1 --width 2", "width 2 impala"),
    ("lab mazze", "mazze maze"),
    ("lab maze --episodes many", "many"),
]


@pytest.mark.parametrize(
    "words", ["--net-arch 1000000000000000000", "--algo iqn --iqn-embedding 1000000000000000000"]
)
def test_a_network_that_does_not_fit_is_one_line(words: str, shell: Shell) -> None:
    assert shell("train", "CartPole-v1", *SMALL, "--compile", "off", *words.split()) == 1
    assert shell.err.startswith("qfleet: ")
    assert shell.err.count("\n") == 1
    assert holds(shell.err, "not enough memory")


def test_another_runtime_error_keeps_its_traceback(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: list[str]) -> int:
        raise RuntimeError("a bug")

    monkeypatch.setattr("qfleet.cli.runs.run", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        shell("runs")


def test_a_value_of_two_lines_is_quoted_on_one(shell: Shell) -> None:
    assert shell("train", "CartPole-v1", "--network", "a\nb", "--no-tensorboard") == 2
    assert shell.err.count("\n") == 1
    assert holds(shell.err, "network", "a b")


@pytest.mark.parametrize(("line", "words"), MISTAKES, ids=[line for line, _ in MISTAKES])
def test_a_mistake_is_answered_by_one_line(line: str, words: str, shell: Shell) -> None:
    assert shell(*line.split()) == 2
    assert shell.err.startswith("qfleet: ")
    assert shell.err.count("\n") == 1
    assert holds(shell.err, *words.split())
    assert shell.out == ""
    assert not Path("made").exists()


def test_debug_shows_the_traceback(shell: Shell) -> None:
    from qfleet.core.errors import UnknownNameError

    with pytest.raises(UnknownNameError):
        shell("train", "CartPole-v1", "--algo", "dqnn", "--debug")


# --- train and resume -------------------------------------------------------------------------


def test_json_output_is_the_result(shell: Shell, tmp_path: Path) -> None:
    said = shell.json("train", "CartPole-v1", *SMALL, "--run-dir", "mine")
    assert set(said) == RESULT_KEYS | {"run_dir", "curve"}
    written = json.loads((tmp_path / "mine" / "result.json").read_text())
    assert set(written) == RESULT_KEYS
    assert {key: said[key] for key in RESULT_KEYS} == written
    assert said["env_steps"] == 400
    assert said["updates"] > 50
    assert Path(said["curve"]).read_bytes().startswith(b"\x89PNG")


def test_a_runs_config_json_starts_the_same_run(shell: Shell, run: Path) -> None:
    shell.json("train", "--config", run / "config.json", "--run-dir", "again")
    assert Path("again/config.json").read_bytes() == (run / "config.json").read_bytes()
    shell.json("train", "--config", run / "config.json", "--seed", "7", "--run-dir", "seven")
    ours, theirs = (json.loads(Path(p, "config.json").read_text()) for p in (run, "seven"))
    assert theirs == ours | {"seed": 7}


def test_other_libraries_names_and_underscores_are_understood(shell: Shell) -> None:
    words = (
        "train --env-id CartPole-v1 --total-timesteps 300 --num_envs 2 --learning_rate=0.01 "
        "--train_frequency 8 --target-network-frequency 64 --start-e 0.9 --end_e 0.2 "
        "--exp-name habits --batch_size 16 --algo ddqn --learning-starts 50 --net-arch 16 "
        "--n-eval-episodes 1 --no-tensorboard"
    )
    said = shell.json(*words.split())
    assert Path(said["run_dir"]) == Path("runs/habits")
    config = json.loads(Path("runs/habits/config.json").read_text())
    expected = {
        "steps": 300,
        "envs": 2,
        "learning_rate": 0.01,
        "train_freq": 8,
        "target_update_interval": 64,
        "exploration_initial_eps": 0.9,
        "exploration_final_eps": 0.2,
        "batch_size": 16,
        "algo": "double-dqn",
        "double": True,
    }
    assert {key: config[key] for key in expected} == expected


def test_several_seeds_are_aggregated(shell: Shell) -> None:
    said = shell.json("train", "CartPole-v1", *SMALL, "--seeds", "2", "--run-dir", "two")
    assert said["seeds"] == [0, 1]
    assert len(said["eval_return_mean"]) == 2
    low, high = said["eval_return_iqm_ci95"]
    assert low <= said["eval_return_iqm"] <= high
    assert json.loads(Path("two/aggregate.json").read_text())["seeds"] == [0, 1]
    for seed in (0, 1):
        assert json.loads(Path(f"two/seed-{seed}/result.json").read_text())["seed"] == seed
    assert Path(said["curve"]).exists()
    assert shell("resume", "two") == 2
    assert "complete" in shell.err


@pytest.mark.parametrize("score", [20.0, 10.0])
def test_the_score_of_a_stopped_run_may_not_be_that_of_its_best_policy(
    score: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = qfleet.train(
        config=tiny_config(steps=60, learning_starts=20), run_dir=tmp_path / "run"
    )
    stopped = dataclasses.replace(
        trained.result, eval_return_mean=score, best_eval_return=10.0, env_steps=50
    )
    assert finish(dataclasses.replace(trained, result=stopped), RunArguments()) == 0
    assert ("--which last" in capsys.readouterr().out) == (score > 10)


def test_stop_after_then_resume(shell: Shell) -> None:
    assert shell("train", "CartPole-v1", *SMALL, "--name", "half", "--stop-after", "201") == 0
    assert "go on with: qfleet resume runs/half" in shell.out
    assert json.loads(Path("runs/half/result.json").read_text())["stopped_by"] == "stop_after"
    said = shell.json("resume", "half")
    assert (said["env_steps"], said["stopped_by"]) == (400, "steps")
    assert shell("resume", "half") == 2
    assert "--steps N" in shell.err
    assert shell.json("resume", "half", "--steps", "480")["env_steps"] == 480


def test_max_wall_ends_a_sitting(shell: Shell) -> None:
    endless = [word if word != "400" else "100000000" for word in SMALL]
    limit = f"{deadline(1.0):.1f}"
    words = [*endless, "--run-dir", "wall", "--max-wall", f"{limit}s"]
    said = shell.json("train", "CartPole-v1", *words)
    assert said["stopped_by"] == "max_wall"
    assert said["wall_s"] >= float(limit)
    assert 0 < said["env_steps"] < 100_000_000


def test_progress_goes_to_stderr_and_the_report_to_stdout(shell: Shell) -> None:
    assert shell("train", "CartPole-v1", *SMALL, "--run-dir", "shown") == 0
    assert "shown" in shell.out
    assert shell.err.startswith("preset cartpole for 400 steps: learning_starts 50, target")
    assert shell("train", "CartPole-v1", *SMALL, "--run-dir", "quiet", "--quiet") == 0
    assert shell.err == ""


def test_presets_are_listed(shell: Shell) -> None:
    from qfleet.config.recipes import PRESETS

    assert shell("train", "--preset", "list") == 0
    assert [line.split()[0] for line in shell.out.splitlines()] == list(PRESETS)


# --- the verbs that read ----------------------------------------------------------------------


@pytest.mark.parametrize("which", ["best", "last"])
def test_evaluate(which: str, shell: Shell, run: Path) -> None:
    said = shell.json("evaluate", run, "--episodes", "3", "--which", which)
    assert len(said["returns"]) == said["episodes"] == 3
    assert said["return_mean"] == pytest.approx(sum(said["returns"]) / 3)
    assert shell.json("evaluate", run, "--episodes", "3", "--which", which) == said
    assert shell("evaluate", run, "--episodes", "3", "--which", which) == 0
    assert "over 3 episodes" in shell.out


def test_evaluate_reports_the_limit_of_steps(shell: Shell, run: Path) -> None:
    words = ("evaluate", run, "--episodes", "2", "--eval-max-steps")
    assert shell(*words, "10") == 0
    assert holds(shell.err, "10 steps", "2 of 2 episodes unfinished", "--eval-max-steps")
    cut = shell.json(*words, "10")
    assert (cut["unfinished"], cut["length_mean"]) == (2, 5.0)
    assert shell(*words, "1000") == 0
    assert shell.err == ""
    assert "unfinished" not in shell.json(*words, "1000")
    assert shell(*words, "0") == 2
    assert holds(shell.err, "eval_max_steps", "≥ 1", "0")


def test_evaluate_shows_progress_on_a_terminal_only(
    shell: Shell, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert shell("evaluate", run, "--episodes", "3") == 0
    assert shell.err == ""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert shell("evaluate", run, "--episodes", "3") == 0
    assert "evaluating" in shell.err
    shell.json("evaluate", run, "--episodes", "3")


def test_plot(shell: Shell, run: Path) -> None:
    said = shell.json("plot", run, "--out", "curve.png", "--metric", "train/loss")
    assert said["path"] == "curve.png"
    assert Path("curve.png").read_bytes().startswith(b"\x89PNG")
    assert shell("plot", run, "--metric", "no/metric", "--out", "x.png") == 2
    assert shell.err.count("\n") == 1


def test_runs(shell: Shell, run: Path) -> None:
    assert shell("runs", "--root", run.parent, "--json") == 0
    (row,) = json.loads(shell.out)
    assert (row["name"], row["env"], row["env_steps"]) == ("small", "CartPole-v1", 400)
    assert row["state"] == "finished"
    assert shell("runs", "--root", run.parent) == 0
    assert "CartPole-v1" in shell.out


def test_video(shell: Shell, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pygame")
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    said = shell.json("video", run, "--out", "film.gif", "--max-frames", "8")
    assert 1 <= said["frames"] <= 8
    assert Path("film.gif").read_bytes().startswith(b"GIF8")


def test_doctor(shell: Shell) -> None:
    said = shell.json("doctor", "--envs", "1", "2", "--seconds", "0.02")
    assert said["largest_buffer_size"] > 0
    assert {rate["envs"] for rate in said["rates"]} == {1, 2}
    assert all(rate["env_steps_per_s"] > 0 for rate in said["rates"])
    assert shell("doctor", "--envs", "1", "--seconds", "0.02") == 0
    assert "fastest" in shell.out


def test_doctor_says_which_layout_pays(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {Sizes(): 10.0, Sizes(data=2): 11.0, Sizes(tensor=2): 30.0}

    def measured(config: Config, ranks: int, seconds: float) -> list[Row]:
        assert (config.net_arch, ranks, seconds) == ((8, 4), 2, 2.0)
        rows = [Row(sizes, 2.0, rate, 4_000_000) for sizes, rate in rates.items()]
        return [*rows, Row(Sizes(pipeline=2), refused="too few layers")]

    monkeypatch.setattr("qfleet.training.parallel_advice.measure_layouts", measured)
    words = ("doctor", "--parallel", "--env", "CartPole-v1", "--net-arch", "8", "4")
    assert shell(*words) == 0
    train = "qfleet train CartPole-v1 --net-arch 8 4"
    assert holds(shell.out, "tensor 2", "4.0", "advice", "too few layers", "86 weights")
    assert f"{train} --engine all-reduce --workers 2 --tensor-parallel 2" in shell.out
    rates |= {Sizes(data=2): 9.0, Sizes(tensor=2): 9.0}
    said = shell.json(*words)
    assert (said["advice"], said["command"]) == ("one process", train)
    assert [row["measured"] for row in said["rows"]] == [10.0, 9.0, 9.0, None]
    assert shell(*words) == 0
    assert "none: train without workers" in shell.out


def test_doctor_measures_an_environment_whose_preset_chooses_the_number_of_envs(
    shell: Shell,
) -> None:
    words = ("--env", "MinAtar/Breakout-v1", "--envs", "1", "--seconds", "0.02")
    assert shell.json("doctor", *words)["largest_buffer_size"] > 0


def test_lab_maze(shell: Shell) -> None:
    said = shell.json("lab", "maze", "--episodes", "300", "--out", "maze.png")
    assert said["reached_goal"] is True
    assert Path("maze.png").read_bytes().startswith(b"\x89PNG")


# --- trust ------------------------------------------------------------------------------------


def test_code_that_a_run_names_is_imported_only_with_consent(shell: Shell, tmp_path: Path) -> None:
    source = "from gymnasium.envs.classic_control.cartpole import CartPoleEnv as MyEnv\n"
    (tmp_path / "my_own_envs.py").write_text(source)
    shell.json(
        "train", "my_own_envs:MyEnv", *SMALL, "--run-dir", "own", "--stop-after", "200"
    )  # what the user types is trusted
    canary = tmp_path / "imported"
    (tmp_path / "my_own_envs.py").write_text(f"open({str(canary)!r}, 'w')\n{source}")
    sys.modules.pop("my_own_envs")
    for verb in ("evaluate", "resume", "video"):
        assert shell(verb, "own") == 2
        assert shell.err.count("\n") == 1
        assert "my_own_envs:MyEnv" in shell.err
        assert "--trust" in shell.err
        assert not canary.exists()
    assert shell("evaluate", "own", "--episodes", "1", "--trust") == 0
    assert canary.exists()
    assert shell.json("resume", "own", "--trust")["env_steps"] == 400
