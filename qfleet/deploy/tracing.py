"""A policy as a graph of tensors: the environment's own observations in, Q-values and actions out.

Preprocessing, normalisation and action masks are inside the graph, so that it runs without qfleet.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import warnings
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from qfleet.agent.policy import Policy
from qfleet.core.errors import ConfigError, one_line
from qfleet.core.signals import FOREIGN_ERRORS, raise_if_signal

INPUTS = ("observations", "action_masks")
"""Names of the inputs; the second only if the policy was trained with masks."""
OUTPUTS = ("q_values", "actions")
_EXAMPLE_BATCH = 2  # a batch of 1 would make the size of the batch a constant


class DeployedPolicy(nn.Module):
    """A policy's network, and everything that ``Policy.act`` does before and behind it."""

    actions: Tensor

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.network, self.spec = policy.network, policy.spec
        table = torch.from_numpy(policy.action_table).to(policy.device)
        self.register_buffer("actions", table, persistent=False)

    def forward(
        self, observations: Tensor, action_masks: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return values ``[B, A]`` and the environment's own actions ``[B, …]``.

        ``action_masks``: bool ``[B, A]``, required if and only if the policy has masks.
        """
        spec = self.spec
        rows = observations - spec.first_obs_value if spec.num_obs_values else observations
        if action_masks is not None:
            frames = rows.reshape(rows.shape[0], spec.frame_stack, -1)
            legal = action_masks.to(rows.dtype).unsqueeze(1).expand(-1, spec.frame_stack, -1)
            rows = torch.cat((frames, legal), dim=2).reshape(rows.shape[0], *spec.obs_shape)
        values = self.network.q_values(rows).float()
        return values, self.actions[values.argmax(dim=1)]


def trace(policy: Policy) -> ExportedProgram:
    """Return the graph of a policy on the CPU, for batches of any size; ConfigError if it fails."""
    module = DeployedPolicy(policy)
    # A copy: the parameters of a policy are views of one vector, and a file would store all of it
    # for each of them.
    module.network = copy.deepcopy(policy.network).requires_grad_(False)
    for parameter in module.network.parameters():
        parameter.data = parameter.data.clone()
    bare = policy.spec.unmasked
    example = [torch.zeros((_EXAMPLE_BATCH, *bare.obs_shape), dtype=bare.torch_dtype)]
    if policy.spec.is_masked:
        example.append(torch.ones((_EXAMPLE_BATCH, bare.num_actions), dtype=torch.bool))
    shapes = ({0: Dim("batch", min=1)},) * len(example)
    try:
        with quiet(), torch.no_grad():
            program = torch.export.export(module.cpu(), tuple(example), dynamic_shapes=shapes)
    except FOREIGN_ERRORS as error:  # of a network that the user wrote
        raise_if_signal(error)
        raise ConfigError(
            f"network '{policy.config.network}' cannot be exported: {one_line(error)[:300]}; its "
            "forward must be made of tensor operations that hold for batches of any size"
        ) from error
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # a file must not name this machine's folders
    return program


def to_onnx(policy: Policy, metadata: Mapping[str, str]) -> bytes:
    """Return the policy as an ONNX model that holds ``metadata``."""
    try:
        import onnx
        import onnxscript  # noqa: F401 (torch finds it by itself, with a message of many lines)
    except ImportError:
        raise ConfigError("ONNX needs packages: `pip install 'qfleet[export]'`") from None
    program = trace(policy)
    try:
        with quiet():
            exported = torch.onnx.export(
                program,
                dynamo=True,
                input_names=INPUTS[: 1 + policy.spec.is_masked],
                output_names=OUTPUTS,
                verbose=False,
            )
    except torch.onnx.OnnxExporterError as error:
        raise ConfigError(
            f"network '{policy.config.network}' has an operation that ONNX lacks: "
            f"{one_line(error)[:300]}; try --to torch"
        ) from error
    assert exported is not None, "given only when a file is written"
    model = exported.model_proto
    onnx.helper.set_model_props(model, dict(metadata))
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = "batch"
    return bytes(model.SerializeToString())


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence what torch reports about packages and functions that are not qfleet's."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
