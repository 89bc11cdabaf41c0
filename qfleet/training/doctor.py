"""``qfleet doctor``: facts about the machine, rates of environments, tuning of an accelerator."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import platform
import time
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from qfleet.agent.actor import draw_actions, legal_actions
from qfleet.config.config import Config
from qfleet.config.presets import resolve
from qfleet.config.validation import validate
from qfleet.core.cores import usable_cores
from qfleet.engines.auto import settle
from qfleet.engines.measured_cache import cache_path
from qfleet.engines.pipeline import TuningHook
from qfleet.engines.registry import build
from qfleet.engines.torch_settings import TorchSettings
from qfleet.engines.tuning import Tuning
from qfleet.envs.device.names import is_tensor_env
from qfleet.envs.factory import make_envs
from qfleet.envs.registry import ale_game, has_vector_entry_point
from qfleet.memory.sizing import available_bytes, largest_capacity
from qfleet.telemetry.faults import FaultLog
from qfleet.telemetry.usage import hardware

LIBRARIES = [
    "torch", "gymnasium", "ale-py", "numpy", "tyro", "rich", "safetensors", "tensorboard",
    "matplotlib", "fsspec", "s3fs", "ray", "pyarrow", "optuna", "onnxruntime", "wandb", "mlflow",
]  # fmt: skip


def machine() -> dict[str, Any]:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return {
        "qfleet": importlib.metadata.version("qfleet"),
        "python": platform.python_version(),
        **hardware(accelerator or torch.device("cpu")),
        "libraries": {name: _installed(name) for name in LIBRARIES},
        "compiled_files": describe_compiled_files(torch),
    }


def describe_compiled_files(package: ModuleType) -> str:
    """Say whether Python has kept the package's compiled files; without them it starts slowly."""
    path = Path(package.__file__ or "")
    if Path(importlib.util.cache_from_source(str(path))).exists():
        return "yes"
    return (
        f"no: every start compiles {package.__name__} again, which takes seconds; "
        f"python -m compileall -q {path.parent}"
    )


def _installed(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "–"


def measure_vectorisers(
    env: str, counts: tuple[int, ...], seconds: float
) -> list[tuple[str, int, float]]:
    """Return (vectorize, envs, env steps per second) for every mode of this environment."""
    base, _ = resolve(env)
    if is_tensor_env(base.env) or ale_game(base.env):
        modes = ["auto"]
    else:
        modes = [*["native"] * has_vector_entry_point(base.env), "sync", "async"]
    cores = usable_cores()
    rates = []
    for mode in modes:
        for count in counts:
            if mode == "async" and count > 4 * cores:
                continue  # a process per env: many more than cores only measure the scheduler
            config = base.replace(vectorize=mode, envs=count)
            rates.append((mode, count, _rate(config, seconds)))
    return rates


def _rate(config: Config, seconds: float) -> float:
    made = make_envs(config, config.envs, seed=0, training=True, on_fault=FaultLog())
    with contextlib.closing(made) as envs:
        actions = draw_actions(envs.spec, np.random.default_rng(0), (64, config.envs))
        obs = envs.step(legal_actions(envs.spec, envs.reset(), actions[0])).obs
        steps, start = 0, time.perf_counter()
        while time.perf_counter() - start < seconds:
            obs = envs.step(legal_actions(envs.spec, obs, actions[steps % 64])).obs
            steps += 1
        return steps * config.envs / (time.perf_counter() - start)


def replay_capacity(env: str) -> dict[str, int]:
    config, _ = resolve(env)
    made = make_envs(config, 1, seed=0, training=True, on_fault=FaultLog())
    with contextlib.closing(made) as envs:
        free = available_bytes()
        # envs 0: a run would choose their number.
        largest = largest_capacity(envs.spec, max(1, config.envs), False, free)
    return {"available_bytes": free, "largest_buffer_size": largest}


@dataclass(frozen=True)
class TuningReport:
    """Measured choices on the accelerator for one environment."""

    device: str
    tuning: Tuning | None
    why_nothing: str | None
    """Why there is nothing to tune; None if something was tuned."""
    notes: tuple[str, ...] = ()
    """Choices and their reasons: replay, updates, inference with its rates by device."""

    def as_dict(self) -> dict[str, Any]:
        tuning = self.tuning
        return {
            "device": self.device,
            "why_nothing": self.why_nothing,
            "choice": str(tuning.choice) if tuning else None,
            "update_s": tuning.update_s if tuning else None,
            "failed": tuning.failed if tuning else None,
            "from_cache": tuning.from_cache if tuning else None,
            "notes": list(self.notes),
            "cache": str(cache_path()),
        }


def tune_pipeline(env: str) -> TuningReport:
    """Build the pipeline of a run of this environment, which tunes it for its device."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        why = f"torch {torch.__version__} finds no accelerator, and a CPU has no choices"
        return TuningReport("cpu", None, why)
    base, _ = resolve(env)
    config, _ = settle(validate(base.replace(engine="pipeline")))
    settings = TorchSettings()
    try:
        parts = build(config, FaultLog(), thorough=True)
        parts.close()
    finally:
        settings.restore()
    notes, device = tuple(parts.notes), str(parts.device)
    if (hook := parts.find(TuningHook)) is not None:
        return TuningReport(device, hook.tuning, None, notes)
    why = f"'{env}' learns on the {device}, where small networks are faster"
    if parts.device.type != "cpu":
        why = "updates on this device are not recorded"
    return TuningReport(device, None, why, notes)
