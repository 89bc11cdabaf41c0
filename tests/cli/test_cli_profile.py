"""``qfleet profile``, ``--trace`` and ``qfleet doctor --tune``, in this process."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from qfleet.cli.main import main
from qfleet.cli.profile import ENDLESS, stages_from_timers
from qfleet.config.config import Config
from qfleet.engines.measured_cache import cache_path
from qfleet.engines.tuning import Choice, Tuning
from qfleet.training import api, doctor
from qfleet.training.result import Result
from qfleet.training.run import Run
from qfleet.training.run_state import RunOptions
from support.messages import holds

WORDS = (
    "--net-arch 8 --batch-size 8 --buffer-size 500 --envs 2 --log-interval 50 --no-tensorboard "
    "--max-episode-steps 30 --n-eval-episodes 1"
)
SMALL = WORDS.split()
FIGURES = ("env_only", "inference_only", "learner_only", "end_to_end")


class Shell:
    """Calls the command line as a terminal would; remembers what it printed."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self.out = self.err = ""

    def __call__(self, *argv: object) -> int:
        self._capsys.readouterr()
        code = main([str(word) for word in argv])
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
    return Shell(capsys)


@pytest.fixture(autouse=True)
def briefly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("qfleet.engines.stage_rates.MEASURE_S", 0.02)
    monkeypatch.setattr("qfleet.engines.placement.MEASURE_S", 0.02)


@pytest.fixture
def over_at_200(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time is up after 200 env steps, however long they take."""
    monkeypatch.setattr(Run, "is_out_of_time", lambda run: run.parts.clock.env_steps >= 200)


def assert_traced(folder: Path, lanes: set[str]) -> None:
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    named = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert named == lanes
    assert {"env", "learn"} <= {event["name"] for event in events if event["ph"] == "X"}
    assert (folder / "plots" / "timeline.png").read_bytes().startswith(b"\x89PNG")


# --- profile ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("over_at_200")
@pytest.mark.parametrize(
    ("words", "engine", "lanes"),
    [
        ("--engine auto", "serial", {"learner"}),
        ("--engine pipeline --lockstep --vectorize sync", "pipeline", {"learner", "collector"}),
    ],
    ids=["serial", "pipeline"],
)
def test_profile_gives_rates_and_a_trace(
    words: str, engine: str, lanes: set[str], shell: Shell
) -> None:
    said = shell.json("profile", "CartPole-v1", *SMALL, *words.split(), "--run-dir", "it")
    assert (said["engine"], said["stopped_by"]) == (engine, "max_wall")
    assert said["env_steps"] >= 200
    assert said["updates"] > 0
    assert all(said[figure] > 0 for figure in FIGURES)
    slowest = min(said[figure] for figure in FIGURES[:3])
    assert said["share_of_slowest"] == pytest.approx(said["end_to_end"] / slowest)
    assert said["bottleneck"] in ("env", "inference", "learner", "overhead")
    assert said["sentence"].endswith(".")
    assert said["from_timers"] is (engine == "serial")
    assert (said["run_dir"], said["trace"]) == ("it", "it/trace.json")
    assert said["timeline"] == "it/plots/timeline.png"
    assert_traced(Path("it"), lanes)
    written = json.loads(Path("it/result.json").read_text())
    assert written["eval_return_mean"] is None  # nothing was evaluated
    assert len(list(Path("it/checkpoints").iterdir())) == 1
    if engine == "pipeline":
        assert {figure: written["rates"][figure] for figure in FIGURES} == {
            figure: said[figure] for figure in FIGURES
        }


@pytest.mark.usefixtures("over_at_200")
def test_profile_prints_the_table_the_sentence_and_the_files(shell: Shell) -> None:
    assert shell("profile", "CartPole-v1", *SMALL) == 0
    for name in ("env-only", "inference-only", "learner-only", "end-to-end"):
        assert f"\n{name} " in shell.out
    assert holds(shell.out, "% of the slowest stage", "thread")
    (folder,) = Path("runs").iterdir()
    assert folder.name.startswith("profile-CartPole-v1-")
    assert f"trace      {folder}/trace.json" in shell.out
    assert f"timeline   {folder}/plots/timeline.png" in shell.out
    assert holds(shell.err, "CartPole-v1", "20 s")
    assert shell.err.count("\n") == 1


class CalledOff(Exception):
    """Nothing is trained."""


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What training was asked for; it does not happen."""
    kept: dict[str, Any] = {}

    def train(**said: Any) -> None:
        kept.update(said)
        raise CalledOff

    monkeypatch.setattr(api, "train", train)
    return kept


def test_profile_is_of_the_learning_phase(shell: Shell, asked: dict[str, Any]) -> None:
    with pytest.raises(CalledOff):
        shell("profile", "CartPole-v1", "--seconds", "3.5", "--envs", "5", "--algo", "ddqn")
    assert asked["options"] == RunOptions(max_wall_s=3.5, trace=True, stage_rates=True)
    config: Config = asked["config"]
    assert (config.envs, config.algo, config.double) == (5, "double-dqn", True)
    assert config.batch_size == 256  # of the preset that suits
    assert (config.steps, config.checkpoint_freq) == (ENDLESS, ENDLESS)
    assert (config.learning_starts, config.exploration_fraction, config.eval_freq) == (0, 0, 0)


def test_options_override_the_defaults_of_a_profile(shell: Shell, asked: dict[str, Any]) -> None:
    words = "--learning-starts 70 --exploration-fraction 0.5 --eval-freq 900 --steps 1000"
    with pytest.raises(CalledOff):
        shell("profile", "CartPole-v1", *words.split(), "--preset", "none")
    config: Config = asked["config"]
    assert (config.learning_starts, config.exploration_fraction) == (70, 0.5)
    assert (config.eval_freq, config.steps, config.batch_size) == (900, 1000, 32)


def test_profile_takes_the_configuration_of_a_run(shell: Shell, asked: dict[str, Any]) -> None:
    fields = {"env": "Acrobot-v1", "patience": 3, "eval_freq": 500, "batch_size": 7}
    Path("config.json").write_text(json.dumps(fields))
    with pytest.raises(CalledOff):
        shell("profile", "--config", "config.json")
    config: Config = asked["config"]
    assert (config.env, config.batch_size) == ("Acrobot-v1", 7)
    assert (config.patience, config.eval_freq) == (0, 0)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("profile", "environment qfleet profile CartPole-v1"),
        ("profile CartPole-v1 --seconds 0", "--seconds 0"),
        ("profile CartPole-v1 --seconds inf", "--seconds inf"),
        ("profile CartPole-v1 --seconds nan", "--seconds nan"),
        ("profile CartPole-v1 --max-wall 3s", "--max-wall"),
        ("profile CartPol-v1", "CartPol-v1 CartPole-v1"),
        ("profile CartPole-v1 --algo dqnn", "dqnn dqn"),
    ],
)
def test_a_mistake_is_answered_by_one_line(line: str, words: str, shell: Shell) -> None:
    assert shell(*line.split()) == 2
    complaint = shell.err.splitlines()[-1]
    assert complaint.startswith("qfleet: ")
    assert holds(complaint, *words.split())
    assert shell.out == ""
    assert not list(Path().glob("runs/*"))


def test_stages_from_timers_by_hand() -> None:
    result = Result(
        **dict.fromkeys((field.name for field in dataclasses.fields(Result)), None)  # type: ignore[arg-type]
        | {
            "env_steps": 1000,
            "updates": 250,
            "wall_s": 20.0,
            "time_share": {
                "env": 0.1, "act": 0.05, "copy": 0.1, "learn": 0.4, "communicate": None, "idle": 0.3
            },
        }
    )  # fmt: skip
    config = Config(train_freq=4, gradient_steps=1, envs=2)
    rates, diagnosis = stages_from_timers(result, config, 90.0, "cpu")
    # Env steps in 2 s and 1 s; 250 updates, of four env steps each, in 10 s.
    assert rates.env_only == pytest.approx(500)
    assert rates.inference_only == pytest.approx(1000)
    assert rates.learner_only == pytest.approx(100)
    assert (diagnosis.bottleneck, rates.end_to_end) == ("learner", 90.0)
    assert diagnosis.share_of_slowest == pytest.approx(0.9)
    never = dataclasses.replace(result, updates=0)
    assert stages_from_timers(never, config, 90.0, "cpu").rates.learner_only is None


# --- --trace ----------------------------------------------------------------------------------


def test_train_and_resume_leave_a_trace_when_asked(shell: Shell) -> None:
    words = [*SMALL, "--steps", "240", "--learning-starts", "20", "--name", "it"]
    folder = Path("runs/it")
    assert shell("train", "CartPole-v1", *words, "--stop-after", "120", "--trace") == 0
    assert_traced(folder, {"learner"})
    assert "trace      runs/it/trace.json" in shell.out
    assert "timeline   runs/it/plots/timeline.png" in shell.out
    (folder / "trace.json").unlink()
    (folder / "plots" / "timeline.png").unlink()
    assert shell("resume", "it", "--stop-after", "180") == 0
    assert not (folder / "trace.json").exists()
    assert "trace.json" not in shell.out
    assert shell("resume", "it", "--trace") == 0
    assert_traced(folder, {"learner"})


@pytest.mark.usefixtures("over_at_200")
def test_overwrite_profiles_into_the_same_folder(shell: Shell) -> None:
    words = ["profile", "CartPole-v1", *SMALL, "--run-dir", "it"]
    assert shell(*words) == 0
    assert shell(*words) == 2
    assert "--overwrite" in shell.err
    assert shell(*words, "--overwrite") == 0


# --- doctor --tune ----------------------------------------------------------------------------


def pretend(
    monkeypatch: pytest.MonkeyPatch, device: str, tuning: Tuning | None
) -> tuple[list[Config], list[str]]:
    """An accelerator, and a pipeline that was built on it; what was built and closed."""
    built: list[Config] = []
    closed: list[str] = []

    def build(config: Config, _faults: object, *, thorough: bool) -> SimpleNamespace:
        assert thorough
        built.append(config)
        return SimpleNamespace(
            device=torch.device(device),
            find=lambda kind: None if tuning is None else kind(tuning),
            notes=["inference on cuda (measured: cpu 10/s, cuda 20/s)"],
            close=lambda: closed.append("parts"),
        )

    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda *_, **__: torch.device("cuda")
    )
    monkeypatch.setattr(doctor, "settle", lambda config: (config, None))
    monkeypatch.setattr(doctor, "build", build)
    monkeypatch.setattr("qfleet.cli.doctor.MEASURED_ENV", "not measured")
    return built, closed


FOUND = Tuning(
    Choice("bf16", compiled=True),
    {"fp32": 300e-6, "bf16": 150e-6, "bf16, compiled": 1e-4},
    {"tf32": "RuntimeError: no such unit"},
    from_cache=False,
)


def test_without_an_accelerator_there_is_nothing_to_tune(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)
    assert shell("doctor", "--tune") == 0
    assert holds(shell.out, "torch", "no accelerator")
    assert shell.out.count("\n") == 1
    said = shell.json("doctor", "--tune")
    assert (said["env"], said["device"], said["choice"]) == ("ALE/Pong-v5", "cpu", None)
    assert "no accelerator" in said["why_nothing"]


def test_the_tuning_is_shown_with_what_failed_and_where_it_is_kept(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    built, closed = pretend(monkeypatch, "cuda", FOUND)
    assert shell("doctor", "--tune", "--env", "ALE/Breakout-v5") == 0
    assert [(config.env, config.engine) for config in built] == [("ALE/Breakout-v5", "pipeline")]
    assert closed == ["parts"]
    rows = [line.split("  ") for line in shell.out.splitlines()]
    cells = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    assert cells[0] == ["µs per update, ALE/Breakout-v5, cuda:"]
    assert cells[1:5] == [
        ["fp32", "300.0"],
        ["bf16", "150.0"],
        ["bf16, compiled", "100.0", "◄ chosen"],
        ["tf32", "failed", "RuntimeError: no such unit"],
    ]
    assert holds(shell.out, "inference", "cpu 10/s", "cuda 20/s", str(cache_path()))
    pretend(monkeypatch, "cuda", dataclasses.replace(FOUND, from_cache=True))
    shell("doctor", "--tune")
    assert holds(shell.out, "remove", str(cache_path()))


def test_the_tuning_as_json(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "cuda", FOUND)
    said = shell.json("doctor", "--tune")
    assert said == {
        "env": "ALE/Pong-v5",
        "device": "cuda",
        "why_nothing": None,
        "choice": "bf16, compiled",
        "update_s": FOUND.update_s,
        "failed": FOUND.failed,
        "from_cache": False,
        "notes": ["inference on cuda (measured: cpu 10/s, cuda 20/s)"],
        "cache": str(cache_path()),
    }


@pytest.mark.parametrize(
    ("device", "words"),
    [("cpu", "'CartPole-v1' learns on the cpu"), ("cuda", "are not recorded")],
)
def test_a_task_that_is_not_tuned_is_told_why(
    device: str, words: str, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, device, None)
    assert shell("doctor", "--tune", "--env", "CartPole-v1") == 0
    assert shell.out.startswith("nothing to tune: ")
    assert words in shell.out
