"""Writers of scalars: metrics.jsonl, TensorBoard and experiment trackers.

Plots and reports read ``metrics.jsonl``; the other writers receive the same numbers.
"""

from __future__ import annotations

import importlib
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from qfleet.core.errors import ConfigError, one_line
from qfleet.core.files import atomic_write_text
from qfleet.telemetry.formatting import finite
from qfleet.telemetry.runs import read_metrics, run_name

METRICS_FILE = "metrics.jsonl"
TRACKER_FILE = "tracker.json"
"""File with the tracker's id of this run, so that a resumed run continues its curves."""


class Writers:
    """All writers that a configuration selects; each receives the same scalars."""

    def __init__(
        self,
        run_dir: Path,
        tensorboard: bool,
        track: str,
        config: dict[str, Any],
        resume_env_steps: int | None,
    ) -> None:
        # All imports come before the first side effect, so that a missing package leaves no files.
        board = module = None
        if tensorboard:
            board = _import("torch.utils.tensorboard", "tensorboard True", "tensorboard")
        if track != "none":
            module = _import(track, f"track {track!r}", track)
        run_dir.mkdir(parents=True, exist_ok=True)
        path = run_dir / METRICS_FILE
        if resume_env_steps is None:
            path.write_text("", encoding="utf-8")
        else:
            drop_metrics_beyond(path, resume_env_steps)
        self._config = config
        self._file = path.open("a", encoding="utf-8", newline="\n")
        self._tensorboard: Any = None
        if board is not None:
            # TensorBoard hides what an earlier process wrote at or after the purge step.
            purge_step = 0 if resume_env_steps is None else resume_env_steps + 1
            folder = str(run_dir / "tensorboard")
            self._tensorboard = board.SummaryWriter(folder, purge_step=purge_step)
        self._tracker: _Wandb | _Mlflow | None = None
        if module is not None:
            tracker = _Wandb if track == "wandb" else _Mlflow
            self._tracker = tracker(module, run_dir, config, resume_env_steps is not None)

    def write(self, env_steps: int, scalars: Mapping[str, float | None]) -> None:
        numbers = {name: finite(value) for name, value in scalars.items()}
        self._file.write(json.dumps({"env_steps": env_steps, **numbers}, allow_nan=False) + "\n")
        self._file.flush()
        present = {name: number for name, number in numbers.items() if number is not None}
        if self._tensorboard is not None:
            for name, number in present.items():
                self._tensorboard.add_scalar(name, number, env_steps)
        if self._tracker is not None:
            try:
                self._tracker.log(env_steps, present)
            except Exception as error:  # a failing tracker must never stop a run
                self._tracker = None
                warnings.warn(f"tracking stopped at env step {env_steps}: {error}", stacklevel=2)

    @property
    def is_tracking(self) -> bool:
        return self._tracker is not None

    def finish(
        self,
        env_steps: int,
        metrics: Mapping[str, float | None],
        artefacts: Sequence[Path],
        on_fault: Callable[[str, str], None],
    ) -> None:
        """Write hyper-parameters beside the final metrics, and upload files and folders of the run.

        A failure is a fault, not an error: the run is complete.
        """
        numbers = {f"hparam/{name}": finite(value) for name, value in metrics.items()}
        final = {name: number for name, number in numbers.items() if number is not None}
        plain = {
            name: value if isinstance(value, (bool, int, float, str)) else str(value)
            for name, value in self._config.items()
        }
        try:
            if self._tensorboard is not None:
                # In the folder of the scalars, not in one of its own.
                self._tensorboard.add_hparams(plain, final, run_name=".", global_step=env_steps)
        except Exception as error:
            on_fault("tensorboard", f"hyper-parameters were not written: {one_line(error)}")
        try:
            if self._tracker is not None:
                self._tracker.upload(artefacts)
        except Exception as error:
            on_fault("tracker", f"policy and configuration were not uploaded: {one_line(error)}")

    def close(self) -> None:
        self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
            self._tensorboard = None
        if self._tracker is not None:
            tracker, self._tracker = self._tracker, None
            try:
                tracker.close()
            except Exception as error:
                warnings.warn(f"the tracker did not close: {error}", stacklevel=2)


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
        saved = json.loads((run_dir / TRACKER_FILE).read_text(encoding="utf-8"))
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
