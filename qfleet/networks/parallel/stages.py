"""Pipeline parallelism: a rank holds some consecutive layers of a built network, its stage.

In: a network, whose layers may be split already. Out: the same network without the parameters of
other stages, whose forward pass returns the output on every rank. A batch passes the stages in
micro-batches: while a stage computes one, the stage before it computes the next (GPipe,
1811.06965). Autograd runs the backward pass through the stages in the opposite order.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from qfleet.core.errors import ConfigError
from qfleet.networks.fused import Dense
from qfleet.networks.heads import ActionHead
from qfleet.networks.qnetwork import QNetwork
from qfleet.networks.torsos import MLP, ImpalaResNet, NatureCNN, as_image

MICRO_BATCHES = 4
"""Per stage: all stages are busy for 4 P of 5 P − 1 micro-batches (1811.06965, section 2.3)."""


class StageRanks(Protocol):
    """The ranks that hold the stages of one network."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def send(self, tensor: Tensor, rank: int) -> None:
        """Send a tensor of any shape to one of these ranks."""
        ...

    def receive(self, dtype: torch.dtype, rank: int) -> Tensor: ...

    def broadcast(self, tensor: Tensor | None, dtype: torch.dtype, rank: int) -> Tensor:
        """Return the tensor of ``rank``, which alone gives one."""
        ...


class Unit(NamedTuple):
    """A step of the forward pass that stays in one stage."""

    run: Callable[[Tensor], Tensor]
    parameters: list[tuple[nn.Module, str]]

    @property
    def size(self) -> int:
        return sum(module.get_parameter(name).numel() for module, name in self.parameters)


def split_stages(network: QNetwork, ranks: StageRanks) -> dict[str, int]:
    """Keep this rank's stage of the network; return parameter name → stage."""
    units = _units(network)
    stages = assign_stages([unit.size for unit in units], ranks.size)
    owners = {
        id(module.get_parameter(name)): stage
        for unit, stage in zip(units, stages, strict=True)
        for module, name in unit.parameters
    }
    named = {name: owners[id(parameter)] for name, parameter in network.named_parameters()}
    own = []
    for unit, stage in zip(units, stages, strict=True):
        if stage == ranks.rank:
            own.append(unit.run)
            continue
        for module, name in unit.parameters:
            setattr(module, name, None)
    if ranks.rank > 0:
        # Autograd computes only what leads to a parameter: this one, without entries, makes it
        # return the gradient of what a stage receives.
        network.register_parameter("received", nn.Parameter(torch.zeros(0)))
    network.allows_shortcuts = False
    network.forward = functools.partial(_forward, network, own, ranks)  # type: ignore[method-assign]
    return named


def assign_stages(sizes: Sequence[int], stages: int) -> list[int]:
    """Return the stage of each unit: the largest stage is as small as it can be."""
    heavy = [i for i, size in enumerate(sizes) if size]
    if len(heavy) < stages:
        raise ConfigError(
            f"pipeline_parallel {stages} is more than the {len(heavy)} layers of the network that "
            "can be in different stages; lower it or use a deeper network"
        )
    cuts = min(
        itertools.combinations(heavy[1:], stages - 1),
        key=lambda cuts: max(
            sum(sizes[a:b]) for a, b in itertools.pairwise((0, *cuts, len(sizes)))
        ),
    )
    return [sum(cut <= i for cut in cuts) for i in range(len(sizes))]


def _units(network: QNetwork) -> list[Unit]:
    torso, head = network.torso, network.head
    units: list[Unit] = []
    if isinstance(torso, NatureCNN | ImpalaResNet):
        layers = torso.convolutions if isinstance(torso, NatureCNN) else torso.stages
        units += [Unit(functools.partial(as_image, layout=torso.layout), []), *_layers(layers)]
        units += [] if torso.dense is None else _layers(torso.dense)
    elif isinstance(torso, MLP):
        units.append(Unit(torso.encode, []))
        units += [] if torso.layers is None else _layers(torso.layers)
    else:
        units += _layers(torso)
    if isinstance(head, ActionHead) and head.value is None:
        return [*units, *_layers(head.advantage), Unit(head.by_action, [])]
    return [*units, *_layers(head)]


def _layers(module: nn.Module) -> list[Unit]:
    if isinstance(module, nn.Sequential):
        return [unit for child in module for unit in _layers(child)]
    if isinstance(module, Dense):
        count = len(list(module.parameters())) // 2
        return [
            Unit(
                functools.partial(_dense_layer, module, i, i < count - 1 or module.relu_last),
                [(module, f"weight_{i}"), (module, f"bias_{i}")],
            )
            for i in range(count)
        ]
    owned = [(m, name) for m in module.modules() for name, _ in m.named_parameters(recurse=False)]
    return [Unit(module, owned)]


def _dense_layer(dense: Dense, layer: int, relu: bool, x: Tensor) -> Tensor:
    weight = dense.get_parameter(f"weight_{layer}")
    x = torch.addmm(dense.get_parameter(f"bias_{layer}"), x.to(weight.dtype), weight)
    return x.relu() if relu else x


def _forward(
    network: QNetwork,
    own: Sequence[Callable[[Tensor], Tensor]],
    ranks: StageRanks,
    obs: Tensor,
    fractions: Tensor | None = None,
) -> Tensor:
    """Return the output of the whole network for the observations, which all ranks have."""
    assert fractions is None, "iqn is not split into stages"
    received, last = next(network.parameters()), ranks.size - 1  # the first is that of the network
    bare = obs if network.masked is None else network.masked.unmask(obs)
    results = []
    for part in bare.chunk(min(len(bare), MICRO_BATCHES * ranks.size)):
        x = part if ranks.rank == 0 else _Receive.apply(received, ranks)  # type: ignore[no-untyped-call]
        for run in own:
            x = run(x)
        results.append(x if ranks.rank == last else _Send.apply(x, ranks))  # type: ignore[no-untyped-call]
    output: Tensor = _Share.apply(ranks, received.dtype, *results)  # type: ignore[no-untyped-call]
    return output


class _Receive(torch.autograd.Function):
    """The output of the stage before; its gradient is sent back there."""

    @staticmethod
    def forward(ctx: Any, received: Tensor, ranks: StageRanks) -> Tensor:
        ctx.ranks = ranks
        return ranks.receive(received.dtype, ranks.rank - 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.ranks.send(grad, ctx.ranks.rank - 1)
        return grad.new_zeros(0), None


class _Send(torch.autograd.Function):
    """A placeholder for what the next stage gets; the gradient comes from there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: StageRanks) -> Tensor:
        ctx.ranks = ranks
        ranks.send(x, ranks.rank + 1)
        return x.new_zeros(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.ranks.receive(grad.dtype, ctx.ranks.rank + 1), None


class _Share(torch.autograd.Function):
    """The output of the last stage, on all of them."""

    @staticmethod
    def forward(ctx: Any, ranks: StageRanks, dtype: torch.dtype, *results: Tensor) -> Tensor:
        last = ranks.size - 1
        ctx.sizes = [len(result) for result in results] if ranks.rank == last else None
        ctx.count = len(results)
        own = torch.cat(results) if ranks.rank == last else None
        return ranks.broadcast(own, dtype, last)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.sizes is None:
            return None, None, *[grad.new_zeros(())] * ctx.count
        return None, None, *torch.split(grad, ctx.sizes)
