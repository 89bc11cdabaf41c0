"""Tensor parallelism: the layers of a built network are replaced by this rank's parts of them.

Two layers with nothing but an activation between them are a pair: the first is split by outputs,
the second by inputs, and one sum follows it. Any other layer is split alone, by outputs, which are
then gathered, or by inputs if their number allows it only. A layer that cannot be divided evenly
stays whole on every rank. Parameters keep their names and their order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qfleet.networks.fused import Dense
from qfleet.networks.parallel.collectives import (
    TensorRanks,
    add_up,
    enter,
    gather_channels,
    own_channels,
)
from qfleet.networks.torsos import ACTIVATIONS, Residual

Product: TypeAlias = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""A layer's output of its input, weight and bias."""
Layer: TypeAlias = nn.Conv2d | nn.Linear


class Split(NamedTuple):
    """How a layer is split."""

    by_outputs: bool
    """Otherwise by inputs."""
    alone: bool
    """Input and output are whole on every rank; otherwise the split side of a pair stays split."""


def split_layers(network: nn.Module, ranks: TensorRanks) -> dict[str, int]:
    """Replace the layers of a network by this rank's parts.

    Return parameter name → dimension along which it is split, if it is.
    """
    shapes = {name: tuple(parameter.shape) for name, parameter in network.named_parameters()}
    _split_children(network, ranks)
    parts = [(name, tuple(parameter.shape)) for name, parameter in network.named_parameters()]
    dims = {}
    for (name, whole), (same, own) in zip(shapes.items(), parts, strict=True):
        assert name == same, f"parameter {name} became {same}"
        for dim, (size, part) in enumerate(zip(whole, own, strict=True)):
            if size != part:
                dims[name] = dim
    return dims


def _split_children(module: nn.Module, ranks: TensorRanks) -> None:
    if isinstance(module, nn.Sequential):
        for names in _stacks(module):
            _split_stack(module, names, ranks)
    if isinstance(module, Residual):
        _split_stack(module, ["first", "second"], ranks)
    for name, child in list(module.named_children()):
        if isinstance(child, Dense):
            setattr(module, name, SplitDense(child, ranks))
        elif isinstance(child, Layer):
            _split_stack(module, [name], ranks)
        else:
            _split_children(child, ranks)


def _stacks(module: nn.Sequential) -> list[list[str]]:
    """Return the names of layers that follow each other with activations between them only."""
    stacks: list[list[str]] = [[]]
    for name, child in module.named_children():
        if isinstance(child, Layer):
            stacks[-1].append(name)
        elif not isinstance(child, tuple(ACTIVATIONS.values())):
            stacks.append([])
    return [names for names in stacks if names]


def _split_stack(module: nn.Module, names: Sequence[str], ranks: TensorRanks) -> None:
    children = [module.get_submodule(name) for name in names]
    layers = [child for child in children if isinstance(child, Layer)]
    sizes = [(layer.weight.shape[1], layer.weight.shape[0]) for layer in layers]
    for name, layer, split in zip(names, layers, plan(sizes, ranks.size), strict=True):
        if split is not None:
            setattr(module, name, SplitLayer(layer, split, ranks))


def plan(sizes: Sequence[tuple[int, int]], ranks: int) -> list[Split | None]:
    """Return how to split layers of these inputs and outputs, which follow each other."""
    splits: list[Split | None] = []
    while len(splits) < len(sizes):
        inputs, outputs = sizes[len(splits)]
        if outputs % ranks == 0 and len(splits) + 1 < len(sizes):
            splits += [Split(by_outputs=True, alone=False), Split(by_outputs=False, alone=False)]
        elif outputs % ranks == 0:
            splits.append(Split(by_outputs=True, alone=True))
        elif inputs % ranks == 0:
            splits.append(Split(by_outputs=False, alone=True))
        else:
            splits.append(None)
    return splits


def _apply(
    product: Product,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    split: Split | None,
    ranks: TensorRanks,
) -> Tensor:
    """Return the output of a layer of which this rank has ``weight`` and ``bias``."""
    if split is None:
        return product(x, weight, bias)
    if split.by_outputs:
        own = product(enter(x, ranks), weight, bias)
        return gather_channels(own, ranks) if split.alone else own
    own = own_channels(x, ranks) if split.alone else x
    summed = add_up(product(own, weight, None), ranks)
    # Once, not on every rank: it is not split.
    return summed if bias is None else summed + bias.view(-1, *[1] * (summed.dim() - 2))


def _own_part(parameter: Tensor, dim: int, ranks: TensorRanks) -> nn.Parameter:
    return nn.Parameter(parameter.detach().chunk(ranks.size, dim)[ranks.rank].clone())


class SplitLayer(nn.Module):
    """This rank's part of a convolution or a linear layer, whose weight is ``[out, in, …]``."""

    def __init__(self, layer: Layer, split: Split, ranks: TensorRanks) -> None:
        super().__init__()
        self._split, self._ranks = split, ranks
        self._product: Product = F.linear
        if isinstance(layer, nn.Conv2d):
            self._product = functools.partial(F.conv2d, stride=layer.stride, padding=layer.padding)
        self.weight = _own_part(layer.weight, 0 if split.by_outputs else 1, ranks)
        self.bias = layer.bias
        if split.by_outputs and layer.bias is not None:
            self.bias = _own_part(layer.bias, 0, ranks)

    def forward(self, x: Tensor) -> Tensor:
        return _apply(self._product, x, self.weight, self.bias, self._split, self._ranks)


class SplitDense(nn.Module):
    """This rank's part of a ``Dense`` stack, whose weights are ``[in, out]``."""

    def __init__(self, dense: Dense, ranks: TensorRanks) -> None:
        super().__init__()
        self._relu_last, self._ranks = dense.relu_last, ranks
        parameters = list(dense.parameters())
        weights, biases = parameters[::2], parameters[1::2]
        self._splits = plan([tuple(weight.shape) for weight in weights], ranks.size)  # type: ignore[misc]
        for i, (weight, bias, split) in enumerate(zip(weights, biases, self._splits, strict=True)):
            if split is not None:
                weight = _own_part(weight, 1 if split.by_outputs else 0, ranks)
                bias = _own_part(bias, 0, ranks) if split.by_outputs else bias
            self.register_parameter(f"weight_{i}", weight)
            self.register_parameter(f"bias_{i}", bias)

    def forward(self, x: Tensor) -> Tensor:
        for layer in range(len(self._splits)):
            x = self.apply_layer(layer, x)
        return x

    def apply_layer(self, layer: int, x: Tensor) -> Tensor:
        """Return the output of one layer, of which the other ranks may have other channels."""
        weight, bias = (self.get_parameter(f"{name}_{layer}") for name in ("weight", "bias"))
        split, x = self._splits[layer], x.to(weight.dtype)
        x = _apply(_dense_product, x, weight, bias, split, self._ranks)
        return x.relu() if layer < len(self._splits) - 1 or self._relu_last else x


def _dense_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x @ weight if bias is None else torch.addmm(bias, x, weight)
