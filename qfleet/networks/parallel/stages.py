"""Pipeline parallelism: a rank holds some consecutive layers of a network, its stage.

In: a network on the meta device, whose layers may be split already. Out: the same network without
the parameters of other stages. Its forward pass returns the output on every rank, without a
gradient; ``Stage.learn`` computes the gradient of the stage. A batch passes the stages in
micro-batches, so that they work at the same time (``schedule.py``).

``torch.distributed.pipelining`` is not used: its stages need process groups, so that ranks could
not be threads of one process in tests; they exchange pickled shapes; and they add up gradients in
tensors of their own, beside the flat vector.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from qfleet.config.config import PipelineSchedule
from qfleet.core.errors import ConfigError
from qfleet.core.types import EnvSpec
from qfleet.networks.fused import Dense
from qfleet.networks.heads import ActionHead
from qfleet.networks.parallel.schedule import MICRO_BATCHES_PER_STAGE, make_schedule
from qfleet.networks.parallel.tensor import SplitDense
from qfleet.networks.qnetwork import QNetwork
from qfleet.networks.torsos import MLP, ImpalaResNet, NatureCNN, as_image


class StageRanks(Protocol):
    """The ranks that hold the stages of one network."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def send(self, tensor: Tensor, rank: int) -> Callable[[], None]:
        """Begin to send a tensor to one of these ranks; return what waits until it has arrived."""
        ...

    def receive(self, tensor: Tensor, rank: int) -> None:
        """Wait for a tensor of one of these ranks."""
        ...

    def broadcast(self, tensor: Tensor, rank: int) -> None:
        """Replace the tensor by that of ``rank``."""
        ...


class Unit(NamedTuple):
    """A step of the forward pass that stays in one stage."""

    run: Callable[[Tensor], Tensor]
    parameters: list[tuple[nn.Module, str]]

    @property
    def size(self) -> int:
        return sum(module.get_parameter(name).numel() for module, name in self.parameters)


def _wait_for(sent: list[Callable[[], None]], but: int = 0) -> None:
    """Wait until all these tensors, ``but`` the newest, have arrived, and forget them."""
    while len(sent) > but:
        sent.pop(0)()


class Stage:
    """The layers of this rank, between those of its neighbours."""

    def __init__(
        self,
        network: QNetwork,
        units: Sequence[Callable[[Tensor], Tensor]],
        shapes: tuple[tuple[int, ...], ...],
        ranks: StageRanks,
        kind: PipelineSchedule,
        micro_batches: int,
    ) -> None:
        """``shapes``, of one sample: the input of this stage, and the output of the last one."""
        self._network, self._units, self._ranks, self._kind = network, units, ranks, kind
        self._input, self._output = shapes
        self._micro_batches = micro_batches or MICRO_BATCHES_PER_STAGE * ranks.size
        self._is_first, self._is_last = ranks.rank == 0, ranks.rank == ranks.size - 1
        self.idle_s = self.learnt_s = self._waited_s = 0.0
        """Seconds that ``learn`` waited for other stages, all that it took, and all waiting."""
        self.idle_slots = 0.0
        """Share of the slots of the newest call of ``learn`` in which its schedule is idle."""

    @torch.no_grad()
    def forward(self, obs: Tensor, fractions: Tensor | None = None) -> Tensor:
        """Return the output of the whole network for the observations, which all ranks have."""
        assert fractions is None, "iqn is not split into stages"
        outputs, sent = list[Tensor](), list[Callable[[], None]]()
        for part in self._parts(obs):
            outputs.append(self._run(part if self._is_first else self._received(len(part))))
            if not self._is_last:
                _wait_for(sent)  # at most one is under way
                sent.append(self._ranks.send(outputs.pop(), self._ranks.rank + 1))
        _wait_for(sent)
        output = torch.cat(outputs) if self._is_last else self._empty(len(obs), self._output)
        self._ranks.broadcast(output, self._ranks.size - 1)
        return output

    def learn(self, obs: Tensor, loss: Callable[[Tensor, int], Tensor]) -> None:
        """Add the gradient of a batch to that of this stage's parameters.

        ``loss`` is called on the last stage, with the output for a micro-batch and the number of
        its first sample; the losses of all micro-batches add up to that of the batch.
        """
        began_s, waited_s = time.perf_counter(), self._waited_s
        parts, rank, stages = self._parts(obs), self._ranks.rank, self._ranks.size
        firsts = list(itertools.accumulate(map(len, parts), initial=0))
        kept = dict[int, tuple[Tensor, Tensor]]()
        sent, sent_grads = list[Callable[[], None]](), list[Callable[[], None]]()
        for slot in make_schedule(self._kind, rank, stages, len(parts)):
            i, grad = slot.micro_batch, None
            if slot.is_forward:
                x = parts[i] if self._is_first else self._received(len(parts[i])).requires_grad_()
                # With 1F1B, the stage before has received all gradients but the newest before it
                # computed this activation.
                _wait_for(sent_grads, but=1)
                output = self._run(x)
                if self._is_last:
                    output = loss(output, firsts[i])
                else:
                    sent.append(self._ranks.send(output.detach(), rank + 1))
                kept[i] = x, output
            else:
                x, output = kept.pop(i)
                if not self._is_last:
                    grad = self._wait(torch.empty_like(output), rank + 1)
                    sent.pop(0)()  # the output has arrived, since this is the answer
                torch.autograd.backward(output, grad)
                if x.grad is not None:
                    sent_grads.append(self._ranks.send(x.grad, rank - 1))
            del x, output  # which otherwise outlast the next slot
        _wait_for(sent_grads)
        self.idle_slots = (stages - 1) / (len(parts) + stages - 1)
        self.learnt_s += time.perf_counter() - began_s
        self.idle_s += self._waited_s - waited_s

    def report(self) -> dict[str, float]:
        """Return which share of ``learn`` this stage was idle: by its schedule, and measured."""
        return {"idle_slots": self.idle_slots, "idle_share": self.idle_s / (self.learnt_s or 1.0)}

    def share(self, numbers: Tensor | None, count: int) -> Tensor:
        """Return ``count`` numbers on all stages; the last one has them."""
        shared = self._empty(count, ()) if numbers is None else numbers
        self._ranks.broadcast(shared, self._ranks.size - 1)
        return shared

    def _parts(self, obs: Tensor) -> Sequence[Tensor]:
        masked = self._network.masked
        bare = obs if masked is None else masked.unmask(obs)
        return bare.tensor_split(min(len(obs), self._micro_batches))

    def _run(self, x: Tensor) -> Tensor:
        for unit in self._units:
            x = unit(x)
        return x

    def _received(self, samples: int) -> Tensor:
        return self._wait(self._empty(samples, self._input), self._ranks.rank - 1)

    def _wait(self, tensor: Tensor, rank: int) -> Tensor:
        began_s = time.perf_counter()
        self._ranks.receive(tensor, rank)
        self._waited_s += time.perf_counter() - began_s
        return tensor

    def _empty(self, samples: int, shape: tuple[int, ...]) -> Tensor:
        return next(self._network.parameters()).detach().new_empty((samples, *shape))


def split_stages(
    network: QNetwork, spec: EnvSpec, ranks: StageRanks, kind: PipelineSchedule, micro_batches: int
) -> dict[str, int]:
    """Keep this rank's stage of the network; return parameter name → stage."""
    units = _units(network)
    stages = assign_stages([unit.size for unit in units], ranks.size)
    owners = {
        id(module.get_parameter(name)): stage
        for unit, stage in zip(units, stages, strict=True)
        for module, name in unit.parameters
    }
    named = {name: owners[id(parameter)] for name, parameter in network.named_parameters()}
    bare = spec.unmasked
    x = torch.empty((1, *bare.obs_shape), dtype=bare.torch_dtype, device="meta")
    own, shape = list[Callable[[Tensor], Tensor]](), tuple[int, ...]()
    for unit, stage in zip(units, stages, strict=True):
        if stage == ranks.rank:
            shape = shape if own else tuple(x.shape[1:])
            own.append(unit.run)
        with torch.no_grad():
            x = unit.run(x)
        if stage != ranks.rank:
            for module, name in unit.parameters:
                setattr(module, name, None)
    shapes = shape, tuple(x.shape[1:])
    network.stage = stage_here = Stage(network, own, shapes, ranks, kind, micro_batches)
    network.allows_shortcuts = False
    network.forward = stage_here.forward  # type: ignore[method-assign]
    return named


def assign_stages(sizes: Sequence[int], stages: int) -> list[int]:
    """Return the stage of each unit: the largest stage is as small as it can be."""
    heavy = [i for i, size in enumerate(sizes) if size]
    if len(heavy) < stages:
        raise ConfigError(
            f"pipeline_parallel {stages} is more than the {len(heavy)} layers of the network that "
            "can be in different stages; lower it or use a deeper network"
        )

    @functools.cache
    def best(first: int, count: int) -> tuple[int, tuple[int, ...]]:
        """Return the size of the largest of ``count`` stages from a unit on, and their cuts."""
        if count == 1:
            return sum(sizes[first:]), ()
        options = []
        for i, cut in enumerate(heavy):
            if cut > max(first, heavy[0]) and len(heavy) - i >= count - 1:
                largest, cuts = best(cut, count - 1)
                options.append((max(sum(sizes[first:cut]), largest), (cut, *cuts)))
        return min(options)

    cuts = best(0, stages)[1]
    return [sum(cut <= i for cut in cuts) for i in range(len(sizes))]


def _units(network: QNetwork) -> list[Unit]:
    torso, head = network.torso, network.head
    units: list[Unit] = []
    if isinstance(torso, NatureCNN | ImpalaResNet):
        layers = torso.convolutions if isinstance(torso, NatureCNN) else torso.stages
        units += [Unit(partial(as_image, layout=torso.layout), []), *_layers(layers)]
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
    if isinstance(module, Dense | SplitDense):
        layers = range(len(list(module.parameters())) // 2)
        return [
            Unit(partial(module.apply_layer, i), [(module, f"weight_{i}"), (module, f"bias_{i}")])
            for i in layers
        ]
    owned = [(m, name) for m in module.modules() for name, _ in m.named_parameters(recurse=False)]
    return [Unit(module, owned)]
