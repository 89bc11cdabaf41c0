"""Models that answer: a run's policy, a saved one, or an exported file, behind one interface.

In: validated batches of the environment's own observations. Out: Q-values and actions.

Observations of Dict and Tuple spaces, and images that qfleet rescales, are given to a model as the
one array into which qfleet converts them; ``check_observations`` converts.
"""

from __future__ import annotations

import hashlib
import json
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from qfleet.agent.policy import Policy
from qfleet.core.errors import CheckpointError, ConfigError, one_line
from qfleet.deploy.signature import Signature
from qfleet.deploy.tracing import INPUTS, OUTPUTS, DeployedPolicy, to_onnx
from qfleet.training import api

PT2_METADATA = "qfleet.json"
"""Name of the metadata in a .pt2 file."""


@dataclass(frozen=True)
class Answers:
    """What a model returns for a batch of B observations."""

    q_values: NDArray[np.float32]
    """``[B, actions]``; of an actor-critic, the logits of its policy. Illegal actions: -1e30."""
    actions: NDArray[Any]
    """The environment's own actions ``[B, …]``, greedy among the legal ones."""


class Model(Protocol):
    """A policy that answers; see ``open_model``."""

    signature: Signature
    version: str
    """The first 12 hexadecimal digits of the SHA-256 of the weights."""
    runtime: str
    """``torch`` or ``onnxruntime``."""

    def __call__(
        self, observations: NDArray[Any], action_masks: NDArray[Any] | None = None
    ) -> Answers:
        """Answer a batch that ``check_observations`` and ``check_action_masks`` returned."""
        ...


def signature_of(policy: Policy) -> Signature:
    spec, table = policy.spec.unmasked, policy.action_table
    return Signature(
        policy.config.env, policy.config.algo, spec.obs_shape, spec.obs_dtype, spec.num_actions,
        policy.spec.is_masked, table.tolist(), table.dtype.name, spec.frame_stack,
        spec.first_obs_value, spec.num_obs_values, spec.raw_obs,
    )  # fmt: skip


def version_of(policy: Policy) -> str:
    """Return the first 12 hexadecimal digits of the SHA-256 of weights and buffers."""
    digest = hashlib.sha256()
    buffers = policy.weights.buffers()
    for tensor in (policy.weights.data, *(buffers[name] for name in sorted(buffers))):
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:12]


def metadata_of(policy: Policy) -> dict[str, str]:
    """Return what exported files say about themselves: signature and version."""
    return {
        "signature": signature_of(policy).to_json(),
        "version": version_of(policy),
    }


class TorchModel:
    """A policy, or a program of a .pt2 file, that PyTorch runs."""

    runtime = "torch"

    def __init__(
        self, module: Any, signature: Signature, version: str, device: torch.device
    ) -> None:
        """``module``: called with observations and, if there are masks, with these."""
        self._module, self._device = module, device
        self.signature, self.version = signature, version

    @classmethod
    def of(cls, policy: Policy) -> TorchModel:
        return cls(DeployedPolicy(policy), signature_of(policy), version_of(policy), policy.device)

    @torch.inference_mode()
    def __call__(
        self, observations: NDArray[Any], action_masks: NDArray[Any] | None = None
    ) -> Answers:
        given = _inputs(self.signature, observations, action_masks)
        writable = (np.require(array, requirements="W") for array in given.values())
        tensors = [torch.from_numpy(array).to(self._device) for array in writable]
        values, actions = self._module(*tensors)
        return Answers(values.cpu().numpy(), actions.cpu().numpy())


class OnnxModel:
    """An ONNX model that onnxruntime runs."""

    runtime = "onnxruntime"

    def __init__(self, contents: bytes, name: str, device: str | None = None) -> None:
        """``name``: of the file, for errors. ``device``: ``cpu`` (None), ``cuda`` or ``cuda:N``."""
        try:
            import onnxruntime
        except ImportError:
            raise ConfigError(
                "onnxruntime is not installed: `pip install 'qfleet[export]'`"
            ) from None
        kind, _, number = (device or "cpu").partition(":")
        provider = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}.get(kind)
        if provider not in onnxruntime.get_available_providers():
            raise ConfigError(
                f"this onnxruntime has no device '{device}'; use cpu, or for cuda "
                "`pip install onnxruntime-gpu`"
            )
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3  # errors only
        options.intra_op_num_threads = torch.get_num_threads()
        # Its waiting threads would spin on cores that receive requests.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        chosen = (provider, {"device_id": number} if number and kind == "cuda" else {})
        try:
            self._session = onnxruntime.InferenceSession(contents, options, [chosen])
        except Exception as error:  # its errors have no base class of their own
            raise CheckpointError(f"'{name}' is no ONNX model: {one_line(error)[:200]}") from None
        metadata = self._session.get_modelmeta().custom_metadata_map
        self.signature, self.version = _read_metadata(metadata, name)
        expected = list(INPUTS[: 1 + self.signature.takes_masks])
        inputs, outputs = self._session.get_inputs(), self._session.get_outputs()
        names = [[one.name for one in inputs], [one.name for one in outputs]]
        shape = tuple(inputs[0].shape[1:]) if inputs else None
        if names != [expected, list(OUTPUTS)] or shape != self.signature.obs_shape:
            raise CheckpointError(f"'{name}' takes {names} of {shape}, unlike its signature")

    def __call__(
        self, observations: NDArray[Any], action_masks: NDArray[Any] | None = None
    ) -> Answers:
        given = _inputs(self.signature, observations, action_masks)
        values, actions = self._session.run(None, given)
        return Answers(values, actions)


def open_model(
    path: Path,
    runtime: Literal["auto", "torch", "onnxruntime"] = "auto",
    device: str | None = None,
    trust: bool = False,
) -> Model:
    """Open a run (its best policy), a saved policy (.safetensors), or an exported .onnx or .pt2.

    ``auto``: onnxruntime for .onnx, else torch. A run or saved policy also runs on onnxruntime: it
    is converted in memory. ``trust`` accepts code: that a stored configuration imports, and that
    a .pt2 file holds.
    """
    if path.suffix not in (".onnx", ".pt2"):
        policy = api.load(path, None, trust, "cpu" if runtime == "onnxruntime" else device)
        if runtime == "onnxruntime":
            return OnnxModel(to_onnx(policy, metadata_of(policy)), str(path), device)
        return TorchModel.of(policy)
    own = "onnxruntime" if path.suffix == ".onnx" else "torch"
    if runtime not in ("auto", own):
        raise ConfigError(f"'{path}' runs on {own} only, got runtime '{runtime}'")
    if not path.is_file():
        raise CheckpointError(f"no file '{path}'")
    if own == "torch":
        return open_pt2(path, device, trust)
    return OnnxModel(path.read_bytes(), str(path), device)


def open_pt2(path: Path, device: str | None, trust: bool) -> TorchModel:
    """Open a program that ``torch.export`` saved, or one that AOTInductor compiled, on the CPU."""
    if not trust:
        raise ConfigError(
            f"'{path}' can run code of its author when it is opened; accept it with --trust "
            "(library: trust=True), or use an .onnx or .safetensors file, which is only data"
        )
    if device not in (None, "cpu"):
        raise ConfigError(f"'{path}' was exported for the CPU, got device '{device}'")
    try:
        with zipfile.ZipFile(path) as archive:
            is_compiled = any("/data/aotinductor/" in name for name in archive.namelist())
        if is_compiled:
            module: Any = torch._inductor.aoti_load_package(str(path))
            metadata = module.get_metadata()
        else:
            extra = {PT2_METADATA: ""}
            module = torch.export.load(path, extra_files=extra).module()
            metadata = json.loads(extra[PT2_METADATA] or "{}")
    except (OSError, RuntimeError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"'{path}' is no .pt2 file: {one_line(error)[:200]}") from None
    return TorchModel(module, *_read_metadata(metadata, str(path)), torch.device("cpu"))


def _inputs(
    signature: Signature, observations: NDArray[Any], action_masks: NDArray[Any] | None
) -> dict[str, NDArray[Any]]:
    """Return the inputs of a graph by name; without masks, all actions are legal."""
    if not signature.takes_masks:
        return {INPUTS[0]: observations}
    if action_masks is None:
        action_masks = np.ones((len(observations), signature.num_actions), np.bool_)
    return dict(zip(INPUTS, (observations, action_masks), strict=True))


def _read_metadata(metadata: Mapping[str, str], name: str) -> tuple[Signature, str]:
    if not {"signature", "version"} <= metadata.keys():
        raise CheckpointError(f"'{name}' was not written by qfleet export")
    version = str(metadata["version"])
    if not re.fullmatch("[0-9a-f]{12}", version):
        raise CheckpointError(f"'{name}' has a malformed version: {version[:100]!r}")
    return Signature.from_json(metadata["signature"]), version
