"""A stack of dense layers as one autograd node: ``[B, in]`` → ``[B, out]``.

A small MLP on a CPU spends more time in autograd's bookkeeping than in arithmetic, so the whole
stack is one node with a backward pass written by hand. Weights are stored ``[in, out]``, not
``[out, in]`` as in nn.Linear: the product then reads both operands along their rows, which is
about a third faster at these sizes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from qfleet.networks.plainly import is_plain

_masked = torch.ops.aten.threshold_backward.default  # the overload itself saves a dispatch


def fused_mlp(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], relu_last: bool
) -> Tensor:
    """Apply dense layers with ReLU between them, and after the last one if ``relu_last``.

    ``weights[i]`` is ``[in_i, out_i]`` and ``biases[i]`` ``[out_i]``.
    """
    assert x.dim() == 2, f"x must be [B, in], not {x.shape}"
    assert len(weights) == len(biases) > 0, f"{len(weights)} weights, {len(biases)} biases"
    if not torch.is_grad_enabled():
        return dense_forward(x, weights, biases, relu_last)[-1]
    if not x.is_cpu or is_plain():
        # Plain operations: the compiler and vmap can handle them, and autograd's overhead does not
        # matter there.
        last = len(weights) - 1
        for i, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
            x = torch.addmm(bias, x, weight)
            x = x.relu() if i < last or relu_last else x
        return x
    result: Tensor = _FusedMLP.apply(relu_last, x, *weights, *biases)  # type: ignore[no-untyped-call]
    return result


def _mixed_mlp(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], relu_last: bool
) -> Tensor:
    """Do the same in autocast's precision, except for a last layer without ReLU.

    That one, whose outputs are values, has the precision of its weights: bf16 has three digits, and
    the values of two actions often differ in the fourth.
    """
    *hidden, (weight, bias) = zip(weights, biases, strict=True)
    for weight_i, bias_i in hidden:
        x = torch.addmm(bias_i, x, weight_i).relu()
    if relu_last:
        return torch.addmm(bias, x, weight).relu()
    with torch.autocast(x.device.type, enabled=False):
        return torch.addmm(bias, x.to(weight.dtype), weight)


def dense_forward(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], relu_last: bool
) -> list[Tensor]:
    """Return ``x`` and the output of every layer."""
    outputs = [x]
    last = len(weights) - 1
    for i, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        x = torch.addmm(bias, x, weight)
        if i < last or relu_last:
            x = x.relu_()
        outputs.append(x)
    return outputs


def dense_backward(
    outputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    grad: Tensor,
    grad_weights: Sequence[Tensor],
    grad_biases: Sequence[Tensor],
) -> Tensor:
    """Fill the gradients of a stack, given ``dense_forward``'s outputs and the last one's gradient.

    Returns the gradient of the first layer's output before its ReLU.
    """
    for i in range(len(weights) - 1, -1, -1):
        torch.mm(outputs[i].t(), grad, out=grad_weights[i])
        torch.sum(grad, 0, out=grad_biases[i])
        if i > 0:
            # A ReLU's output is positive exactly where its input was, so the output is the mask.
            grad = _masked(grad.mm(weights[i].t()), outputs[i], 0)
    return grad


class _FusedMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, relu_last: bool, x: Tensor, *parameters: Tensor) -> Tensor:
        depth = len(parameters) // 2
        weights, biases = parameters[:depth], parameters[depth:]
        outputs = dense_forward(x, weights, biases, relu_last)
        ctx.relu_last = relu_last
        ctx.save_for_backward(*outputs, *weights)
        return outputs[-1]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        depth = len(saved) // 2
        outputs, weights = saved[: depth + 1], saved[depth + 1 :]
        if ctx.relu_last:
            grad = _masked(grad, outputs[-1], 0)
        grad_weights = [torch.empty_like(weight) for weight in weights]
        grad_biases = [grad.new_empty(weight.shape[1]) for weight in weights]
        below = dense_backward(outputs, weights, grad, grad_weights, grad_biases)
        needs_x = ctx.needs_input_grad[1]
        grad_x = below.mm(weights[0].t()) if needs_x else None
        return None, grad_x, *grad_weights, *grad_biases


class Dense(nn.Module):
    """The parameters of a fused stack of sizes ``(in, hidden …, out)``, and its forward pass.

    They are initialised as nn.Linear does: Kaiming-uniform with a = √5, which is U(±1/√in) for
    weights and biases alike.
    """

    def __init__(self, sizes: Sequence[int], relu_last: bool) -> None:
        super().__init__()
        self.relu_last = relu_last
        for i, (fan_in, fan_out) in enumerate(itertools.pairwise(sizes)):
            # Drawn as [out, in], so that a seed gives the same weights as nn.Linear.
            weight = nn.init.kaiming_uniform_(torch.empty(fan_out, fan_in), a=math.sqrt(5))
            self.register_parameter(f"weight_{i}", nn.Parameter(weight.t().contiguous()))
            bound = 1 / math.sqrt(fan_in)
            bias = torch.empty(fan_out).uniform_(-bound, bound)
            self.register_parameter(f"bias_{i}", nn.Parameter(bias))

    def forward(self, x: Tensor) -> Tensor:
        parameters: list[Any] = list(self._parameters.values())
        weights, biases = parameters[::2], parameters[1::2]
        if not x.is_meta and torch.is_autocast_enabled(x.device.type):
            return _mixed_mlp(x, weights, biases, self.relu_last)
        return fused_mlp(x, weights, biases, self.relu_last)

    def apply_layer(self, layer: int, x: Tensor) -> Tensor:
        """Return the output of one layer."""
        weight, bias = (self.get_parameter(f"{name}_{layer}") for name in ("weight", "bias"))
        x = torch.addmm(bias, x.to(weight.dtype), weight)
        return x.relu() if 2 * layer + 2 < len(self._parameters) or self.relu_last else x
