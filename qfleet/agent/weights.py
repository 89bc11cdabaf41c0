"""All parameters of a network in one contiguous vector, and the channel that publishes it.

A population's networks are as many vectors, ``[K, P]``, a row each.

In: an ordinary ``nn.Module``. Out: the same module, whose parameters are now views into
``FlatWeights.data``. One vector serves every room: the optimiser is a handful of elementwise
kernels, a target update is one copy or lerp, a checkpoint is one tensor, a parameter-server shard
is a slice.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from qfleet.core.types import Lag

ROW_ALIGNMENT = 16
"""Weights of a population's row are filled up to a multiple of this many, so that kernels can load
every row in whole words; what is filled in stays 0."""


class FlatWeights:
    """One vector of weights and one of gradients, seen by the module through views."""

    def __init__(self, module: nn.Module) -> None:
        """A module with ``agents`` holds every parameter that many times, ``[K, …]``."""
        self._module = module
        named = [(name.replace("/", "."), p) for name, p in module.named_parameters()]
        self.parameters: list[nn.Parameter] = [parameter for _, parameter in named]
        self.agents: int | None = getattr(module, "agents", None)
        rows = () if self.agents is None else (self.agents,)
        skip = len(rows)
        self.layout = [(name, tuple(parameter.shape[skip:])) for name, parameter in named]
        self.offsets = [0, *itertools.accumulate(math.prod(shape) for _, shape in self.layout)]
        size = self.offsets.pop()
        if self.agents is not None:
            size = -(-size // ROW_ALIGNMENT) * ROW_ALIGNMENT
        first = self.parameters[0]
        self.data = torch.zeros((*rows, size), dtype=first.dtype, device=first.device)
        self.grad = torch.zeros_like(self.data)
        for parameter, view in zip(self.parameters, self._views(self.data), strict=True):
            view.copy_(parameter.detach())
            parameter.data = view

    def _views(self, flat: Tensor) -> list[Tensor]:
        """A flat tensor, cut into the parameters' shapes."""
        cuts = zip(self.offsets, self.layout, strict=True)
        parts = [(flat.narrow(-1, at, math.prod(shape)), shape) for at, (_, shape) in cuts]
        return [part.view(*part.shape[:-1], *shape) for part, shape in parts]

    def row(self, agent: int) -> Tensor:
        """A copy of one agent's weights, as a network of its own would hold them."""
        if self.agents is None:
            return self.data.clone()
        length = sum(math.prod(shape) for _, shape in self.layout)
        return self.data[agent, :length].clone()

    def grad_views(self) -> list[Tensor]:
        """The flat gradient, cut into the parameters' shapes."""
        return self._views(self.grad)

    def set_grad(self, gradients: Sequence[Tensor]) -> None:
        """Pack per-parameter gradients into the flat vector: one kernel, nothing to zero first."""
        if self.agents is None:
            torch.cat([gradient.reshape(-1) for gradient in gradients], out=self.grad)
        else:
            for view, gradient in zip(self.grad_views(), gradients, strict=True):
                view.copy_(gradient)

    def buffers(self) -> dict[str, Tensor]:
        """Return the module's buffers by name; the running statistics of a torso, for example."""
        return {name.replace("/", "."): buffer for name, buffer in self._module.named_buffers()}

    def describe(self) -> list[list[object]]:
        """Names and shapes, for the checkpoint: ``[["torso.0", [4, 64]], …]``."""
        return [[name, list(shape)] for name, shape in self.layout]


def join(*gradients: Tensor) -> Tensor:
    """Per-parameter gradients as one new flat vector."""
    return torch.cat([gradient.reshape(-1) for gradient in gradients])


class Mailbox:
    """The weights channel to an actor with a network of its own, beside the learner's.

    ``refresh`` is called while the actor is idle (``Ahead`` guarantees it) and takes over what
    was published last.
    """

    def __init__(self, source: FlatWeights, reader: FlatWeights) -> None:
        self._source, self._reader = source, reader
        self._published, self._read = 0, -1
        self.lag = Lag()

    def publish(self, version: int) -> None:
        self._published = version

    def restart(self, version: int) -> None:
        self._published, self._read = version, -1

    def refresh(self) -> int:
        if self._read != self._published:
            self._reader.data.copy_(self._source.data)
            self._read = self._published
        return self._read


class DeviceMailbox:
    """The same where learner and actor work on streams of one accelerator.

    What was published last is still being computed; waiting for it would make collecting wait for
    learning. So ``refresh`` takes the publication before, and never the one after, however fast the
    device is: a run computes the same whatever its timing. Where nothing was published since the
    last time, it takes the newest.
    """

    def __init__(
        self, source: FlatWeights, reader: FlatWeights, reader_stream: torch.Stream
    ) -> None:
        self._source, self._reader, self._stream = source, reader, reader_stream
        self._device = source.data.device
        # Three: the one before, the newest, and the one being filled while the first is read.
        self._letters = [source.data.clone() for _ in range(3)]
        self._versions = [0, 0, 0]
        self._filled = [torch.Event(self._device) for _ in range(3)]
        self._emptied = torch.Event(self._device)
        self._count = self._seen = 0
        self._read = -1
        self.lag = Lag()
        self._filled[0].record(torch.accelerator.current_stream(self._device))

    def restart(self, version: int) -> None:
        for _ in self._letters:
            self.publish(version)
        self._read = -1

    def publish(self, version: int) -> None:
        self._count += 1
        place = self._count % 3
        stream = torch.accelerator.current_stream(self._device)
        stream.wait_event(self._emptied)
        self._letters[place].copy_(self._source.data)
        self._versions[place] = version
        self._filled[place].record(stream)

    def refresh(self) -> int:
        # Nothing new since last time: the newest is complete by now.
        before = 0 if self._count == self._seen else 1
        self._seen = self._count
        place = (self._count - before) % 3
        if self._read != self._versions[place]:
            self._stream.wait_event(self._filled[place])
            with self._stream:
                self._reader.data.copy_(self._letters[place])
            self._emptied.record(self._stream)
            self._read = self._versions[place]
        return self._read
