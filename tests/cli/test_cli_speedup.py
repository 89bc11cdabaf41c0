"""``qfleet lab speedup`` with a function in place of training, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from qfleet.cli import lab, lab_speedup
from qfleet.config.config import Config
from qfleet.config.presets import resolve
from qfleet.config.validation import validate
from qfleet.core.errors import ClusterError, ConfigError, UnknownNameError
from qfleet.memory import sizing
from support.messages import holds, says


class Training:
    """Stands in for ``qfleet.train``: 100 steps/s of each worker, a straggler's 25."""

    def __init__(self, fails_at: int = 0, error: BaseException | None = None) -> None:
        self.calls: list[dict[str, Any]] = []
        self._fails_at, self._error = fails_at, error

    def __call__(self, env: str, **fields: Any) -> Any:
        self.calls.append({"env": env, **fields})
        if len(self.calls) == self._fails_at and self._error is not None:
            raise self._error
        run_dir = fields.pop("run_dir")
        assert run_dir.parent.is_dir()
        assert not run_dir.exists()
        # The fields make a configuration that a worker engine would take.
        config: Config = resolve(env, fields.pop("algo"), fields.pop("preset"), fields=fields)[0]
        validate(config)
        run_dir.mkdir()  # the target is reached half way, and workers went on
        rows = [(config.steps // 4, 50.0), (config.steps // 2, 100.0), (config.steps, 200.0)]
        lines = [json.dumps({"env_steps": n, "eval/mean_reward": mean}) for n, mean in rows]
        (run_dir / "metrics.jsonl").write_text("\n".join(lines))
        slow = config.straggler > 1
        rate = 100.0 * (config.workers - slow) + 25.0 * slow
        return SimpleNamespace(
            interrupted_by=2 if len(self.calls) == self._fails_at else None,
            result=SimpleNamespace(
                stopped_by="steps" if config.target_return is None else "target_return",
                fleet={
                    "env_steps_per_s": rate,
                    "env_steps": config.steps,
                    "shares": dict.fromkeys(("computing", "communicating", "waiting"), 0.25),
                    "staleness": {"mean": None},
                    "processor_s": 1.0,
                },
            ),
        )


def test_the_report_adds_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    training = Training()
    words = ["CartPole-v1", "--updates", "sync,async", "--workers", "1,2", "--json"]
    words += ["--step-latency-s", "0.01", "--straggler", "4", "--steps-per-worker", "300"]
    words += ["--fields", '{"train_freq": 32, "learning_starts": 5}', "--out", str(tmp_path)]
    lab_speedup.run(words, training)
    report = json.loads(capsys.readouterr().out)
    assert report == json.loads((tmp_path / "result.json").read_text())
    assert [(p["update"], p["straggler"], p["workers"]) for p in report["points"]] == [
        ("sync", 1, 1),
        ("sync", 1, 2),
        ("sync", 4, 2),
        ("async", 1, 1),
        ("async", 1, 2),
        ("async", 4, 2),
    ]
    assert [p["speed_up"] for p in report["points"]] == [1, 2, 1.25] * 2
    assert Path(report["picture"]).read_bytes().startswith(b"\x89PNG")
    assert Path(report["csv"]).read_text().count("\n") == 7
    call = training.calls[2]
    expected = {
        "env": "CartPole-v1",
        "engine": "parameter-server",
        "update": "sync",
        "workers": 2,
        "steps": 600,
        "straggler": 4.0,
        "step_latency_s": 0.01,
        "train_freq": 32,
        "learning_starts": 5,  # asked for, instead of 0
        "eval_freq": 0,
    }
    assert {name: call[name] for name in expected} == expected


def test_with_a_target_return_all_runs_have_the_same_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    training = Training()
    words = ["--workers", "1,4", "--target-return", "100", "--steps-per-worker", "1000"]
    lab_speedup.run([*words, "--json", "--out", str(tmp_path)], training)
    asked = [(c["steps"], c["eval_freq"], c["target_return"]) for c in training.calls]
    assert asked == [(4000, 200, 100.0)] * 2
    report = json.loads(capsys.readouterr().out)
    assert [point["return_s"] for point in report["points"]] == [20.0, 5.0]
    assert [point["return_steps"] for point in report["points"]] == [2000, 2000]


def test_workers_without_room_are_left_out_with_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    room = 5 * lab_speedup.LEAST_BYTES_WITH_TORCH  # four workers and a server
    monkeypatch.setattr(sizing, "available_bytes", lambda: room)
    training = Training()
    lab_speedup.run(["--workers", "1,4,8,16", "--out", str(tmp_path)], training)
    assert [call["workers"] for call in training.calls] == [1, 4]
    assert holds(capsys.readouterr().out.splitlines()[0], "8, 16", "memory", "4")


def test_each_update_is_told_what_is_for_it(tmp_path: Path) -> None:
    training = Training()
    words = ["--updates", "sync,ssp", "--workers", "1", "--fields", '{"staleness": 2}']
    lab_speedup.run([*words, "--out", str(tmp_path)], training)
    assert [call.get("staleness") for call in training.calls] == [None, 2]
    with pytest.raises(ConfigError, match=says("staleness", "sync,async")):
        lab_speedup.run(["--updates", "sync,async", *words[-2:]], training)


def test_the_table_is_printed_and_the_runs_are_gone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    training = Training()
    # --update is what qfleet train calls it.
    lab_speedup.run(["--update", "sync", "--workers", "1,2", "--out", str(tmp_path)], training)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:3] == ["update", "straggler", "workers"]
    assert lines[2].split()[:6] == ["sync", "–", "2", "20.00", "200", "2.00"]
    assert lines[-2:] == [
        f"picture    {tmp_path / 'speedup.png'}",
        f"figures    {tmp_path / 'speedup.csv'}",
    ]
    assert not training.calls[0]["run_dir"].parent.exists()


@pytest.mark.parametrize("error", [ClusterError("no room"), KeyboardInterrupt()])
def test_what_was_measured_is_kept_when_a_run_fails(error: BaseException, tmp_path: Path) -> None:
    with pytest.raises(type(error)):
        lab_speedup.run(["--workers", "1,2,4", "--out", str(tmp_path)], Training(3, error))
    assert (tmp_path / "speedup.csv").read_text().count("\n") == 3
    assert len(json.loads((tmp_path / "result.json").read_text())["points"]) == 2


def test_an_interrupted_run_is_no_point(tmp_path: Path) -> None:
    """A run that is told to stop ends well, and early."""
    with pytest.raises(KeyboardInterrupt):
        lab_speedup.run(["--workers", "1,2,4", "--out", str(tmp_path)], Training(2))
    assert (tmp_path / "speedup.csv").read_text().count("\n") == 2


def test_the_verb_leads_here() -> None:
    with pytest.raises(ConfigError, match=says("repeats", "0")):
        lab.run(["speedup", "--repeats", "0"])


def test_nothing_measured_leaves_nothing(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(ClusterError):
        lab_speedup.run(["--out", str(out)], Training(1, ClusterError("no room")))
    assert not out.exists()


@pytest.mark.parametrize(
    ("words", "error", "named"),
    [
        (["--workers", "2,4"], ConfigError, "workers 2,4 1"),
        (["--updates", "asink"], ConfigError, "update asink"),
        (["--straggler", "0.5"], ConfigError, "straggler 0.5"),
        (["--straggler", "4"], ConfigError, "--step-latency-s"),
        (["--fields", "{"], ConfigError, "JSON"),
        (["--fields", "[]"], ConfigError, "JSON object"),
        (["--fields", '{"workers": 3}'], ConfigError, "--workers"),
        (["--fields", '{"steps": 3}'], ConfigError, "--steps-per-worker"),
        (["--fields", '{"seed": 3}'], ConfigError, "--seed"),
        (["--fields", '{"train_frek": 3}'], UnknownNameError, "train_frek train_freq"),
        (["--steps-per-worker", "0"], ConfigError, "steps_per_worker 0"),
        (["--repeats", "0"], ConfigError, "repeats 0"),
        (["--engine", "actors", "--updates", "sync"], ConfigError, "update sync"),
        # Only the last run of this one could not be made.
        (["--engine", "actors", "--updates", "async,sync"], ConfigError, "update sync"),
        (["--algo", "pqn", "--fields", '{"train_freq": 4096}'], ConfigError, "train_freq 4096"),
        (["--fields", '{"batch_size": 0}'], ConfigError, "batch_size 0"),
        (["--preset", "cartpol"], UnknownNameError, "cartpol cartpole"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(
    words: list[str],
    error: type[Exception],
    named: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    training = Training()
    with pytest.raises(error, match=says(*named.split())):
        lab_speedup.run([*words, "--out", str(tmp_path / "out")], training)
    assert not (tmp_path / "out").exists()
    assert training.calls == []
    assert capsys.readouterr().out == ""
