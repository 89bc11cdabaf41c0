from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qfleet.core.errors import ConfigError
from qfleet.telemetry.writers import Writers
from support.messages import holds, says


def rows(run_dir: Path) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    text = (run_dir / "metrics.jsonl").read_text()
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def no_fault(kind: str, message: str) -> None:
    raise AssertionError(f"{kind}: {message}")


def plain(run_dir: Path, resume_env_steps: int | None = None) -> Writers:
    return Writers(run_dir, False, "none", {}, resume_env_steps, no_fault)


def test_lines_are_valid_json_and_there_at_once(tmp_path: Path) -> None:
    writers = plain(tmp_path / "new" / "run")
    values = {
        "train/loss": float("nan"),
        "eval/mean_reward": float("inf"),
        "time/fps": None,
        "a": np.float32(0.5),
        "b": 3,
    }
    writers.write(100, values)
    expected = {"train/loss": None, "eval/mean_reward": None, "time/fps": None, "a": 0.5, "b": 3}
    assert rows(tmp_path / "new" / "run") == [{"env_steps": 100} | expected]  # before close()
    writers.close()
    writers.close()


def test_resume_drops_later_and_torn_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        '{"env_steps": 100, "a": 1}\n{"env_steps": 200, "a": 2}\n{"env_steps": 300, "a": 3}\n'
        '{"env_steps": 150, "a'
    )
    writers = plain(tmp_path, 200)
    writers.write(300, {"a": 30.0})
    writers.close()
    assert rows(tmp_path) == [
        {"env_steps": 100, "a": 1},
        {"env_steps": 200, "a": 2},
        {"env_steps": 300, "a": 30.0},
    ]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["metrics.jsonl"]


def test_resume_keeps_a_whole_last_line_without_its_newline(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"env_steps": 100}\n\xff\n[1]\n{"env_steps": 200}')
    plain(tmp_path, 200).close()
    assert rows(tmp_path) == [{"env_steps": 100}, {"env_steps": 200}]


def test_resume_without_a_file_and_a_fresh_start_over_an_old_one(tmp_path: Path) -> None:
    plain(tmp_path, 50).close()
    assert rows(tmp_path) == []
    (tmp_path / "metrics.jsonl").write_text('{"env_steps": 900}\n')
    plain(tmp_path, None).close()
    assert rows(tmp_path) == []


def test_tensorboard_gets_the_same_scalars_and_a_purge_step(tmp_path: Path) -> None:
    event_accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    )

    def scalars() -> list[tuple[int, float]]:
        reader = event_accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
        reader.Reload()
        assert reader.Tags()["scalars"] == ["train/loss"]
        return [(event.step, event.value) for event in reader.Scalars("train/loss")]

    writers = Writers(tmp_path, True, "none", {}, None, no_fault)
    for step, loss in ((100, 1.0), (200, 2.0), (300, 3.0)):
        writers.write(step, {"train/loss": loss, "eval/mean_reward": None})
    writers.close()
    assert scalars() == [(100, 1.0), (200, 2.0), (300, 3.0)]
    # TensorBoard reads files in the order of their names, which carry whole seconds.
    (old,) = (tmp_path / "tensorboard").iterdir()
    old.rename(old.with_name("events.out.tfevents.0000000000.old"))
    writers = Writers(tmp_path, True, "none", {}, 200, no_fault)
    writers.write(300, {"train/loss": 30.0})
    writers.close()
    assert scalars() == [(100, 1.0), (200, 2.0), (300, 30.0)]


def test_missing_packages_are_named_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("wandb", "mlflow", "tensorboard"):
        monkeypatch.setitem(sys.modules, name, None)
    run_dir = tmp_path / "run"
    with pytest.raises(ConfigError, match="pip install wandb"):
        Writers(run_dir, False, "wandb", {}, None, no_fault)
    with pytest.raises(ConfigError, match="pip install mlflow"):
        Writers(run_dir, False, "mlflow", {}, None, no_fault)
    with pytest.raises(ConfigError, match=r"pip install tensorboard.*--no-tensorboard"):
        Writers(run_dir, True, "none", {}, None, no_fault)
    with pytest.raises(ConfigError, match="'neptune'"):
        Writers(run_dir, False, "neptune", {}, None, no_fault)
    assert not run_dir.exists()
    plain(run_dir).close()


class FakeWandbRun:
    def __init__(self, run_id: str) -> None:
        self.id = run_id
        self.logged: list[dict[str, float]] = []
        self.finished = False
        self.step_metric = ""
        self.broken = False
        self.artefacts: list[FakeArtifact] = []

    def define_metric(self, pattern: str, step_metric: str) -> None:
        assert pattern == "*"
        self.step_metric = step_metric

    def log(self, values: dict[str, float]) -> None:
        if self.broken:
            raise ConnectionError("no route")
        self.logged.append(values)

    def log_artifact(self, artefact: FakeArtifact) -> None:
        if self.broken:
            raise ConnectionError("no route")
        assert not self.finished
        self.artefacts.append(artefact)

    def finish(self) -> None:
        self.finished = True


class FakeArtifact:
    def __init__(self, name: str, type: str) -> None:
        self.name, self.type, self.files = name, type, dict[str, Path]()

    def add_dir(self, path: str, name: str) -> None:
        assert Path(path).is_dir()
        self.files[name] = Path(path)

    def add_file(self, path: str, name: str) -> None:
        assert Path(path).is_file()
        self.files[name] = Path(path)


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Any:
    module: Any = types.ModuleType("wandb")
    module.inits, module.runs = [], []

    def init(**kwargs: Any) -> FakeWandbRun:
        module.inits.append(kwargs)
        module.runs.append(FakeWandbRun(kwargs["id"] or f"id{len(module.runs)}"))
        return module.runs[-1]

    module.init, module.Artifact = init, FakeArtifact
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_wandb_gets_config_and_scalars_and_resumes_the_same_run(tmp_path: Path, wandb: Any) -> None:
    run_dir = tmp_path / "exp" / "seed-3"
    writers = Writers(run_dir, False, "wandb", {"algo": "dqn"}, None, no_fault)
    writers.write(100, {"train/loss": 0.5, "eval/mean_reward": None})
    writers.close()
    (run,) = wandb.runs
    assert wandb.inits[0]["config"] == {"algo": "dqn"}
    assert wandb.inits[0]["name"] == "exp/seed-3"
    assert run.logged == [{"env_steps": 100, "train/loss": 0.5}]
    assert run.step_metric == "env_steps"
    assert run.finished
    Writers(run_dir, False, "wandb", {}, 100, no_fault).close()
    assert wandb.inits[1]["id"] == run.id
    Writers(run_dir, False, "wandb", {}, None, no_fault).close()
    assert wandb.inits[2]["id"] is None


def test_a_broken_tracker_is_a_fault_and_does_not_end_the_run(tmp_path: Path, wandb: Any) -> None:
    faults: list[tuple[str, str]] = []
    writers = Writers(tmp_path, False, "wandb", {}, None, lambda *fault: faults.append(fault))
    wandb.runs[0].broken = True
    writers.write(100, {"a": 1.0})
    writers.write(200, {"a": 2.0})
    ((kind, message),) = faults
    assert kind == "tracker"
    assert holds(message, "100", "no route")
    writers.close()
    assert [row["env_steps"] for row in rows(tmp_path)] == [100, 200]


def test_a_tracker_that_cannot_close_costs_a_warning(tmp_path: Path, wandb: Any) -> None:
    def fail() -> None:
        raise ConnectionError("no route")

    writers = Writers(tmp_path, False, "wandb", {}, None, no_fault)
    wandb.runs[0].finish = fail
    with pytest.warns(UserWarning, match=says("close", "no route")):
        writers.close()


def test_mlflow_gets_parameters_once_and_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, Any]] = []
    module: Any = types.ModuleType("mlflow")
    module.set_experiment = lambda name: calls.append(("experiment", name))

    def start_run(run_id: str | None, run_name: str) -> Any:
        calls.append(("start", (run_id, run_name)))
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id="abc"))

    module.start_run = start_run
    module.log_params = lambda params: calls.append(("params", params))
    module.log_metrics = lambda metrics, step: calls.append(("metrics", (metrics, step)))
    module.end_run = lambda: calls.append(("end", None))
    monkeypatch.setitem(sys.modules, "mlflow", module)
    run_dir = tmp_path / "exp"
    writers = Writers(run_dir, False, "mlflow", {"algo": "dqn"}, None, no_fault)
    writers.write(100, {"a": 1.0, "b": None})
    writers.close()
    Writers(run_dir, False, "mlflow", {"algo": "dqn"}, 100, no_fault).close()
    assert calls == [
        ("experiment", "qfleet"),
        ("start", (None, "exp")),
        ("params", {"algo": "dqn"}),
        ("metrics", ({"a": 1.0}, 100)),
        ("end", None),
        ("experiment", "qfleet"),
        ("start", ("abc", "exp")),
        ("end", None),
    ]


def make_artefacts(run_dir: Path) -> list[Path]:
    (run_dir / "best").mkdir(parents=True)
    (run_dir / "config.json").write_text("{}")
    return [run_dir / "best", run_dir / "config.json"]


def test_wandb_gets_policy_and_configuration(tmp_path: Path, wandb: Any) -> None:
    writers = Writers(tmp_path, False, "wandb", {}, None, no_fault)
    paths = make_artefacts(tmp_path)
    writers.finish(100, {}, paths)
    (artefact,) = wandb.runs[0].artefacts
    assert (artefact.name, artefact.type) == ("policy-id0", "model")
    assert artefact.files == {"best": paths[0], "config.json": paths[1]}
    writers.close()


def test_mlflow_gets_policy_and_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module: Any = types.ModuleType("mlflow")
    run = types.SimpleNamespace(info=types.SimpleNamespace(run_id="abc"))
    calls: list[tuple[str, ...]] = []
    module.set_experiment = module.log_params = lambda _: None
    module.start_run = lambda **_: run
    module.log_artifacts = lambda path, artifact_path: calls.append((path, artifact_path))
    module.log_artifact = lambda path: calls.append((path,))
    monkeypatch.setitem(sys.modules, "mlflow", module)
    folder, file = make_artefacts(tmp_path)
    Writers(tmp_path, False, "mlflow", {}, None, no_fault).finish(100, {}, [folder, file])
    assert calls == [(str(folder), "best"), (str(file),)]


def test_an_upload_that_fails_is_a_fault(tmp_path: Path, wandb: Any) -> None:
    faults: list[tuple[str, str]] = []
    writers = Writers(tmp_path, False, "wandb", {}, None, lambda *fault: faults.append(fault))
    wandb.runs[0].broken = True
    writers.finish(100, {}, make_artefacts(tmp_path))
    ((kind, message),) = faults
    assert kind == "tracker"
    assert "no route" in message


def test_tensorboard_shows_hyperparameters_beside_final_metrics(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams import plugin_data_pb2

    config = {"algo": "dqn", "steps": 100, "net_arch": (8, 8), "double": True, "lr": 0.5, "x": None}
    writers = Writers(tmp_path, True, "none", config, None, no_fault)
    writers.write(100, {"train/loss": 1.0})
    writers.finish(100, {"best_eval_return": 7.0, "wall_s": float("nan")}, [])
    writers.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {"train/loss", "hparam/best_eval_return"}
    assert [(e.step, e.value) for e in events.Scalars("hparam/best_eval_return")] == [(100, 7.0)]
    content = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    stored = plugin_data_pb2.HParamsPluginData.FromString(content).session_start_info.hparams
    assert stored["algo"].string_value == "dqn"
    assert stored["steps"].number_value == 100
    assert stored["double"].number_value == 1  # as PyTorch writes it
    assert stored["net_arch"].string_value == "(8, 8)"
    assert not [path for path in (tmp_path / "tensorboard").iterdir() if path.is_dir()]
