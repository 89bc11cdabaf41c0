"""Export with proof: a policy in; out a file of another runtime that was shown to act like it."""

from __future__ import annotations

import contextlib
import json
import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from qfleet.agent.actor import draw_actions, legal_actions
from qfleet.agent.evaluation import evaluation_config
from qfleet.agent.policy import Policy
from qfleet.core import files
from qfleet.core.errors import (
    ConfigError,
    EnvironmentFault,
    ExportError,
    UnknownNameError,
    one_line,
    require,
)
from qfleet.core.types import EnvSpec
from qfleet.deploy.models import PT2_METADATA, Model, metadata_of, open_model
from qfleet.deploy.tracing import quiet, to_onnx, trace
from qfleet.envs.factory import make_envs
from qfleet.telemetry.faults import FaultLog

Format: TypeAlias = Literal["onnx", "torch", "safetensors"]
SUFFIXES: dict[Format, str] = {"onnx": ".onnx", "torch": ".pt2", "safetensors": ".safetensors"}
FOLDER = "exports"
"""Folder of a run for exported files."""
BATCHES = (1, 3, 64)
"""Sizes of the batches that are compared, three batches of each."""
ROWS = 3 * max(BATCHES)
RECORDING_ENVS = 4


@dataclass(frozen=True)
class Exported:
    """A file that was written, and what was compared."""

    path: str
    size_bytes: int
    version: str
    largest_difference: float
    """Of a Q-value."""
    observations: dict[str, int]
    """Number of observations that were compared, by their source: random, recorded."""
    not_recorded: str | None
    """Why the environment could not be played in; None: it was."""


def export_policy(
    policy: Policy, out: Path, to: Format, tolerance: float = 1e-4, compiled: bool = False
) -> Exported:
    """Write the policy to ``out`` and compare the file with it.

    ``compiled``: to machine code of this computer, by AOTInductor; for the format torch only.
    Raise ExportError, and leave no file, if a Q-value differs by more than ``tolerance``, or
    an action where the two best Q-values differ by more.
    """
    require(0 < tolerance < math.inf, "tolerance", tolerance, "> 0")
    if compiled and to != "torch":
        raise ConfigError(f"--compile is for --to torch, got --to {to}")
    if out.suffix != SUFFIXES[to]:
        raise ConfigError(f"--out must end in {SUFFIXES[to]} with --to {to}, got '{out}'")
    rows = {"random": random_rows(policy.spec)}
    why = None
    try:
        policy.check_trust()
    except ConfigError as error:  # no consent
        why = str(error)
    else:
        try:
            rows["recorded"] = record_rows(policy)
        except (ConfigError, UnknownNameError, ImportError) as error:
            if not isinstance(error.__cause__ or error, (ImportError, UnknownNameError)):
                raise
            why = str(error)  # no package
        except EnvironmentFault as error:
            why = str(error)  # it cannot start here
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        # Beside the final file, so that it can be renamed; the folder goes with all it holds.
        with tempfile.TemporaryDirectory(prefix=".export-", dir=out.parent) as folder:
            tmp = Path(folder) / out.name
            _WRITERS["compiled" if compiled else to](policy, tmp)
            model = open_model(tmp, device="cpu", trust=True)
            worst = max(verify(policy, model, rows[kind], tolerance, kind) for kind in rows)
            with tmp.open("rb+") as file:
                files.sync(file, out.name)
            size = tmp.stat().st_size
            files.rename(tmp, out)
        files.sync_folder(out.parent)
    except OSError as error:
        raise ConfigError(f"cannot write '{out}': {error.strerror or error}") from None
    counts = {kind: sum(map(len, _batches(rows[kind]))) for kind in rows}
    return Exported(str(out), size, model.version, worst, counts, why)


def _write_onnx(policy: Policy, path: Path) -> None:
    path.write_bytes(to_onnx(policy, metadata_of(policy)))


def _write_program(policy: Policy, path: Path) -> None:
    with quiet():
        extra = {PT2_METADATA: json.dumps(metadata_of(policy))}
        torch.export.save(trace(policy), path, extra_files=extra)


def _write_compiled(policy: Policy, path: Path) -> None:
    program, metadata = trace(policy), {"aot_inductor.metadata": metadata_of(policy)}
    try:
        with quiet():
            torch._inductor.aoti_compile_and_package(
                program, package_path=str(path), inductor_configs=metadata
            )
    except RuntimeError as error:  # no C++ compiler, or one that fails
        raise ConfigError(
            f"the policy cannot be compiled: {one_line(error)[:300]}; leave out --compile"
        ) from error


_WRITERS: dict[str, Callable[[Policy, Path], Any]] = {
    "onnx": _write_onnx,
    "torch": _write_program,
    "compiled": _write_compiled,
    "safetensors": Policy.save,
}


def verify(policy: Policy, model: Model, rows: NDArray[Any], tolerance: float, kind: str) -> float:
    """Return the largest difference of a Q-value, or raise ExportError.

    ``rows``: observations as inside qfleet, numbered from 0 and with masks; ``kind`` names them.
    """
    worst = 0.0
    for batch in _batches(rows):
        with torch.inference_mode():
            tensor = torch.from_numpy(batch).to(policy.device)
            values = policy.network.q_values(tensor).cpu().numpy()
        actions = policy.action_table[policy.greedy(batch)]
        answers = model(*_client_inputs(policy.spec, batch))
        difference = float(np.abs(answers.q_values - values).max())
        where = f"of {kind} observations in batches of {len(batch)}"
        if not difference <= tolerance:  # also NaN
            raise ExportError(
                f"no file was written: Q-values {where} differ from the policy's by "
                f"{difference:.2g}, more than the tolerance {tolerance:g}; raise --tolerance if "
                "that is enough"
            )
        best = np.sort(values, axis=1)[:, -2:]
        is_clear = best[:, -1] - best[:, 0] > tolerance
        differs = (answers.actions != actions).reshape(len(batch), -1).any(axis=1)
        if (differs & is_clear).any():
            raise ExportError(f"no file was written: actions {where} differ from the policy's")
        worst = max(worst, difference)
    return worst


def _batches(rows: NDArray[Any]) -> list[NDArray[Any]]:
    return [rows[start : start + n] for n in BATCHES for start in range(0, 3 * n, n)]


def _client_inputs(spec: EnvSpec, rows: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any] | None]:
    """Return observations and masks as a client gives them."""
    if not spec.is_masked:
        return rows + np.asarray(spec.first_obs_value, rows.dtype), None
    bare: NDArray[Any] = spec.unmask(rows)
    return bare + np.asarray(spec.first_obs_value, rows.dtype), spec.legal(rows)


def random_rows(spec: EnvSpec) -> NDArray[Any]:
    """Return random observations as inside qfleet: numbered from 0, and with masks."""
    random, shape = np.random.default_rng(0), (ROWS, *spec.obs_shape)
    rows: NDArray[Any]
    if spec.obs_dtype == "float32":
        sizes = random.choice([0.1, 1.0, 10.0], (ROWS,) + (1,) * len(spec.obs_shape))
        rows = random.normal(size=shape) * sizes
    else:
        rows = random.integers(spec.num_obs_values or 256, size=shape)
    if spec.is_masked:
        legal = random.random((ROWS, spec.num_actions)) < 0.5
        legal[np.arange(ROWS), random.integers(spec.num_actions, size=ROWS)] = True
        rows[..., -spec.num_actions :] = legal[:, None] if spec.frame_stack > 1 else legal
    return rows.astype(spec.obs_dtype)


def record_rows(policy: Policy) -> NDArray[Any]:
    """Return observations of the policy's own environment; half of the actions are random."""
    config, random = evaluation_config(policy.env_config), np.random.default_rng(0)
    envs = make_envs(config, RECORDING_ENVS, 0, training=False, on_fault=FaultLog())
    with contextlib.closing(envs):
        policy.check_spec(envs.spec)
        rows = [np.array(envs.reset())]
        while len(rows) * RECORDING_ENVS < ROWS:
            drawn = draw_actions(policy.spec, random, RECORDING_ENVS)
            others = legal_actions(policy.spec, rows[-1], drawn)
            explores = random.random(RECORDING_ENVS) < 0.5
            actions = np.where(explores, others, policy.greedy(rows[-1]))
            rows.append(np.array(envs.step(actions).obs))
    return np.concatenate(rows)
