"""All parameters of a network in one contiguous vector, and the channels that publish it.

In: an ordinary ``nn.Module``. Out: the same module, whose parameters are now views into
``FlatWeights.data``: one vector, or one row per agent of a population, ``[K, P]``. The optimiser is
then a few elementwise kernels, a target update is one copy or lerp, a checkpoint is one tensor, and
a shard of a parameter server is a slice.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from qfleet.config.config import Config
from qfleet.core.errors import ConfigError
from qfleet.core.types import Lag
from qfleet.networks.noisy import NOISE

ROW_ALIGNMENT = 16
"""A population's rows are padded with zeros to a multiple of this many weights, so that kernels can
load every row in whole words."""


class SavedWeights(Protocol):
    """The weights of a policy, as they are saved."""

    def row(self, agent: int) -> Any:
        """Return one agent's weights, in the layout of a single network: a tensor or Streamed."""
        ...

    def row_buffers(self, agent: int) -> dict[str, Tensor]: ...

    def describe(self) -> list[list[object]]: ...

    def copy_from(self, other: FlatWeights) -> None: ...


class FlatWeights:
    """One vector of weights and one of gradients; the module's parameters are views into them."""

    def __init__(self, module: nn.Module) -> None:
        """Parameters of a module with K ``agents`` have shapes ``[K, …]``."""
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
        self.norm_of_all: Callable[[Tensor], Tensor] | None = None
        """Of a part of a network: returns the norm of the gradients of all parts together."""
        for parameter, view in zip(self.parameters, self._views(self.data), strict=True):
            view.copy_(parameter.detach())
            parameter.data = view

    def _views(self, flat: Tensor) -> list[Tensor]:
        """Return views of a flat tensor in the parameters' shapes."""
        cuts = zip(self.offsets, self.layout, strict=True)
        parts = [(flat.narrow(-1, at, math.prod(shape)), shape) for at, (_, shape) in cuts]
        return [part.view(*part.shape[:-1], *shape) for part, shape in parts]

    def row(self, agent: int) -> Tensor:
        """Return a copy of one agent's weights, in the layout of a single network."""
        if self.agents is None:
            return self.data.clone()
        length = sum(math.prod(shape) for _, shape in self.layout)
        return self.data[agent, :length].clone()

    def row_buffers(self, agent: int) -> dict[str, Tensor]:
        """Return one agent's buffers, as a single network has them."""
        return self.buffers() if self.agents is None else buffers_of(self.buffers(), agent)

    def rate_factors(self, config: Config) -> Tensor | None:
        """Return each weight's learning rate relative to the run's; None: all are alike."""
        if not config.value_learning_rate:
            return None
        factors = torch.ones_like(self.data)
        for view, (name, _) in zip(self._views(factors), self.layout, strict=True):
            if name.startswith("critic."):
                view.fill_(config.value_learning_rate / config.learning_rate)
        return factors

    def grad_views(self) -> list[Tensor]:
        """Return views of the flat gradient in the parameters' shapes."""
        return self._views(self.grad)

    def set_grad(self, gradients: Sequence[Tensor]) -> None:
        """Pack per-parameter gradients into the flat vector: one kernel, nothing to zero first."""
        if self.agents is None:
            torch.cat([gradient.reshape(-1) for gradient in gradients], out=self.grad)
        else:
            for view, gradient in zip(self.grad_views(), gradients, strict=True):
                view.copy_(gradient)

    def copy_from(self, other: FlatWeights) -> None:
        """Copy the weights of another network, to every agent; raise where shapes differ."""
        check_same_layout(self.layout, other.layout)
        ours, theirs = self._torso_buffers(), other._torso_buffers()
        if ours.keys() != theirs.keys():
            name = min(ours.keys() ^ theirs.keys())
            raise ConfigError(
                f"init_from has another network: {name} is in one of them only; use the same "
                "network and options, such as normalize_observations"
            )
        self.data[..., : other.data.numel()].copy_(other.data)
        for name, buffer in theirs.items():
            ours[name].copy_(buffer)

    def _torso_buffers(self) -> dict[str, Tensor]:
        """Return the buffers that training changes: those of heads are constants."""
        of_torso = ("torso.", "critic.torso.")
        return {name: b for name, b in self.buffers().items() if name.startswith(of_torso)}

    def mirror(self, other: FlatWeights) -> None:
        """Copy the weights and buffers of a network of the same shape, agent by agent."""
        self.data.copy_(other.data)
        ours = self.buffers()
        for name, buffer in other.buffers().items():
            ours[name].copy_(buffer)

    def buffers(self) -> dict[str, Tensor]:
        """Return the module's buffers by name, such as the running statistics of a torso."""
        return {name.replace("/", "."): buffer for name, buffer in self._module.named_buffers()}

    def describe(self) -> list[list[object]]:
        """Return names and shapes, for the checkpoint: ``[["torso.0", [4, 64]], …]``."""
        return [[name, list(shape)] for name, shape in self.layout]


def check_same_layout(
    ours: Sequence[tuple[str, tuple[int, ...]]], theirs: Sequence[tuple[str, tuple[int, ...]]]
) -> None:
    """Raise ConfigError where names or shapes of the parameters of two networks differ."""
    for mine, other in itertools.zip_longest(ours, theirs):
        if mine != other:
            found, needed = (one and f"{one[0]} {one[1]}" for one in (other, mine))
            raise ConfigError(
                f"init_from has another network: {found} where this run has {needed}; use the "
                "same network and options, and an environment with the same spaces"
            )


def buffers_of(buffers: Mapping[str, Tensor], rows: int | list[int]) -> dict[str, Tensor]:
    """Return a population's buffers for these agents; they differ in the noise of layers alone."""
    is_own = {name: name.rpartition(".")[2] in NOISE for name in buffers}
    return {name: b[rows] if is_own[name] else b for name, b in buffers.items()}


def join(*gradients: Tensor) -> Tensor:
    """Return per-parameter gradients as one new flat vector."""
    return torch.cat([gradient.reshape(-1) for gradient in gradients])


class Mailbox:
    """The weights channel to an actor that has its own network.

    ``refresh`` copies the newest weights; ``Ahead`` calls it only while the actor is idle.
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
    """A mailbox for a learner and an actor on two streams of one accelerator.

    The newest published version may still be in computation, and waiting for it would make
    collecting wait for learning. ``refresh`` therefore takes the version before, never the newest,
    however fast the device is: results do not depend on timing. If nothing was published since the
    last ``refresh``, it takes the newest.
    """

    def __init__(
        self, source: FlatWeights, reader: FlatWeights, reader_stream: torch.Stream
    ) -> None:
        self._source, self._reader, self._stream = source, reader, reader_stream
        self._device = source.data.device
        # Three: the version before, the newest, and one to fill while the first is read.
        self._copies = [source.data.clone() for _ in range(3)]
        self._versions = [0, 0, 0]
        self._filled = [torch.Event(self._device) for _ in range(3)]
        self._emptied = torch.Event(self._device)
        self._count = self._seen = 0
        self._read = -1
        self.lag = Lag()
        self._filled[0].record(torch.accelerator.current_stream(self._device))

    def restart(self, version: int) -> None:
        for _ in self._copies:
            self.publish(version)
        self._read = -1

    def publish(self, version: int) -> None:
        self._count += 1
        place = self._count % 3
        stream = torch.accelerator.current_stream(self._device)
        stream.wait_event(self._emptied)
        self._copies[place].copy_(self._source.data)
        self._versions[place] = version
        self._filled[place].record(stream)

    def refresh(self) -> int:
        # If nothing was published since the last call, the newest version is complete by now.
        before = 0 if self._count == self._seen else 1
        self._seen = self._count
        place = (self._count - before) % 3
        if self._read != self._versions[place]:
            self._stream.wait_event(self._filled[place])
            with self._stream:
                self._reader.data.copy_(self._copies[place])
            self._emptied.record(self._stream)
            self._read = self._versions[place]
        return self._read
