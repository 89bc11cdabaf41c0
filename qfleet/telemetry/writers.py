"""Writers of scalars: metrics.jsonl, TensorBoard and experiment trackers.

Plots and reports read ``metrics.jsonl``; the other writers receive the same numbers.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from qfleet.core.errors import ConfigError, one_line
from qfleet.core.files import append_bytes, atomic_write_text, read_text
from qfleet.telemetry.event_file import EventFile
from qfleet.telemetry.formatting import finite
from qfleet.telemetry.runs import read_metrics, run_name

METRICS_FILE = "metrics.jsonl"
TRACKER_FILE = "tracker.json"
"""File with the tracker's id of this run, so that a resumed run continues its curves."""


class Writers:
    """All writers that a configuration selects; each receives the same scalars.

    What cannot be written, for example to a full disk, is a fault: the run goes on.
    """

    def __init__(
        self,
        run_dir: Path,
        tensorboard: bool,
        track: str,
        config: dict[str, Any],
        resume_env_steps: int | None,
        on_fault: Callable[[str, str], None],
    ) -> None:
        # All imports come before the first side effect, so that a missing package leaves no files.
        module = None
        if tensorboard:
            _import("tensorboard", "tensorboard True", "tensorboard")
        if track != "none":
            module = _import(track, f"track {track!r}", track)
        run_dir.mkdir(parents=True, exist_ok=True)
        self._path = run_dir / METRICS_FILE
        if resume_env_steps is None:
            self._path.write_text("", encoding="utf-8")
        else:
            drop_metrics_beyond(self._path, resume_env_steps)
            self._path.touch()
        self._config, self._on_fault = config, on_fault
        self._events: EventFile | None = None
        if tensorboard:
            # TensorBoard hides what an earlier process wrote at or after this step.
            first_step = 0 if resume_env_steps is None else resume_env_steps + 1
            self._events = EventFile(run_dir / "tensorboard", first_step)
        self._tracker: _Wandb | _Mlflow | None = None
        if module is not None:
            tracker = _Wandb if track == "wandb" else _Mlflow
            self._tracker = tracker(module, run_dir, config, resume_env_steps is not None)

    def write(self, env_steps: int, scalars: Mapping[str, float | None]) -> None:
        numbers = {name: finite(value) for name, value in scalars.items()}
        line = json.dumps({"env_steps": env_steps, **numbers}, allow_nan=False) + "\n"
        present = {name: number for name, number in numbers.items() if number is not None}
        with self._reporting("metrics", f"metrics of env step {env_steps} were not written"):
            append_bytes(self._path, line.encode())
        if self._events is not None:
            lost = f"TensorBoard lacks the metrics of env step {env_steps}"
            with self._reporting("tensorboard", lost):
                self._events.write(env_steps, present)
        tracker, self._tracker = self._tracker, None
        if tracker is not None:
            with self._reporting("tracker", f"tracking stopped at env step {env_steps}"):
                tracker.log(env_steps, present)
                self._tracker = tracker

    @property
    def is_tracking(self) -> bool:
        return self._tracker is not None

    def finish(
        self,
        env_steps: int,
        metrics: Mapping[str, float | None],
        artefacts: Sequence[Path],
    ) -> None:
        """Write hyper-parameters beside final metrics, and upload files and folders of the run."""
        numbers = {f"hparam/{name}": finite(value) for name, value in metrics.items()}
        final = {name: number for name, number in numbers.items() if number is not None}
        plain = {
            name: value if isinstance(value, (bool, int, float, str)) else str(value)
            for name, value in self._config.items()
        }
        with self._reporting("tensorboard", "hyper-parameters were not written"):
            if self._events is not None:
                self._events.write_hyperparameters(env_steps, plain, final)
        with self._reporting("tracker", "policy and configuration were not uploaded"):
            if self._tracker is not None:
                self._tracker.upload(artefacts)

    def close(self) -> None:
        tracker, self._tracker = self._tracker, None
        try:
            if tracker is not None:
                tracker.close()
        except Exception as error:  # not a fault: the result of the run is written already
            warnings.warn(f"the tracker did not close: {error}", stacklevel=2)

    @contextlib.contextmanager
    def _reporting(self, kind: str, what: str) -> Iterator[None]:
        """Turn any error into a fault: a failing writer must never stop a run."""
        try:
            yield
        except Exception as error:
            self._on_fault(kind, f"{what}: {one_line(error)}")


def drop_metrics_beyond(path: Path, env_steps: int) -> None:
    """Drop incomplete lines and lines past ``env_steps``, which a resumed run writes again."""
    if not path.exists():
        return
    kept = [row for row in read_metrics(path) if row["env_steps"] <= env_steps]
    atomic_write_text(path, "".join(json.dumps(row) + "\n" for row in kept))


def _import(module: str, option: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ConfigError(
            f"{option} needs a package that is not installed: `pip install {package}`, or turn it "
            "off with --no-tensorboard or --track none"
        ) from None


def _saved_id(run_dir: Path, track: str) -> str | None:
    try:
        saved = json.loads(read_text(run_dir / TRACKER_FILE))
        return str(saved[track])
    except (OSError, ValueError, KeyError, TypeError):
        return None  # not tracked, or by another tracker: start a new tracker run


def _save_id(run_dir: Path, track: str, run_id: str) -> None:
    (run_dir / TRACKER_FILE).write_text(json.dumps({track: run_id}), encoding="utf-8")


class _Wandb:
    def __init__(self, wandb: Any, run_dir: Path, config: dict[str, Any], resumed: bool) -> None:
        self._wandb = wandb
        self._run = wandb.init(
            project="qfleet",
            name=run_name(run_dir.resolve()),
            dir=str(run_dir),
            config=config,
            id=_saved_id(run_dir, "wandb") if resumed else None,
            resume="allow",
        )
        _save_id(run_dir, "wandb", self._run.id)
        # wandb's own step must not decrease, as it would after a resume; a step metric may.
        self._run.define_metric("*", step_metric="env_steps")

    def log(self, env_steps: int, scalars: Mapping[str, float]) -> None:
        self._run.log({"env_steps": env_steps, **scalars})

    def upload(self, paths: Sequence[Path]) -> None:
        artefact = self._wandb.Artifact(f"policy-{self._run.id}", type="model")
        for path in paths:
            if path.is_dir():
                artefact.add_dir(str(path), name=path.name)
            else:
                artefact.add_file(str(path), name=path.name)
        self._run.log_artifact(artefact)

    def close(self) -> None:
        self._run.finish()


class _Mlflow:
    def __init__(self, mlflow: Any, run_dir: Path, config: dict[str, Any], resumed: bool) -> None:
        self._mlflow = mlflow
        run_id = _saved_id(run_dir, "mlflow") if resumed else None
        mlflow.set_experiment("qfleet")
        run = mlflow.start_run(run_id=run_id, run_name=run_name(run_dir.resolve()))
        _save_id(run_dir, "mlflow", run.info.run_id)
        if run_id is None:  # parameters of an mlflow run cannot be set twice
            mlflow.log_params(config)

    def log(self, env_steps: int, scalars: Mapping[str, float]) -> None:
        self._mlflow.log_metrics(dict(scalars), step=env_steps)

    def upload(self, paths: Sequence[Path]) -> None:
        for path in paths:
            if path.is_dir():
                self._mlflow.log_artifacts(str(path), artifact_path=path.name)
            else:
                self._mlflow.log_artifact(str(path))

    def close(self) -> None:
        self._mlflow.end_run()
