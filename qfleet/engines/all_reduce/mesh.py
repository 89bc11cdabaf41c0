"""Ranks as a mesh: copies of the network, stages of a copy, parts of the layers of a stage.

Ranks are numbered part by part, then stage by stage, then copy by copy, so that those which
exchange most are on one machine if possible.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from qfleet.agent.weights import FlatWeights
from qfleet.config.config import Config
from qfleet.core.types import StateDict
from qfleet.engines.all_reduce.group import Group
from qfleet.networks.parallel.collectives import TensorRanks
from qfleet.networks.parallel.layout import Layout

MOST_DIMENSIONS = 5
"""Of a tensor that ranks send each other."""


class Axis:
    """The ranks that differ from this one in one coordinate only."""

    def __init__(self, group: Group, every: Sequence[Sequence[int]]) -> None:
        """Connect the ranks of each list in ``every``, which is the same on all ranks."""
        self._group, self._channel = group, group.open_channels(every)
        (self._ranks,) = [ranks for ranks in every if group.rank in ranks]
        self.rank, self.size = self._ranks.index(group.rank), len(self._ranks)
        self.bytes_sent = self.messages = 0

    @property
    def exchanges(self) -> bool:
        return self.size > 1

    def sum(self, tensor: Tensor) -> None:
        """Replace the tensor by its sum over these ranks, the same bits on each."""
        self._group.sum_within(self._channel, tensor)
        self.messages += 2 * (self.size - 1)
        self.bytes_sent += 2 * tensor.nbytes * (self.size - 1) // self.size

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of these ranks, by rank; they have the same shape."""
        self.messages += self.size - 1
        self.bytes_sent += tensor.nbytes * (self.size - 1)
        return self._group.gather_within(self._channel, tensor, self.size)

    def send(self, tensor: Tensor, rank: int) -> None:
        """Send a tensor of any shape to one of these ranks."""
        self._count(tensor)
        self._group.send_within(self._channel, _shape(tensor), self._ranks[rank])
        self._group.send_within(self._channel, tensor.contiguous(), self._ranks[rank])

    def receive(self, dtype: torch.dtype, rank: int) -> Tensor:
        """Return the tensor that one of these ranks sends."""
        shape = torch.zeros(MOST_DIMENSIONS + 1, dtype=torch.int64)
        self._group.receive_within(self._channel, shape, self._ranks[rank])
        tensor = _of_shape(shape, dtype)
        self._group.receive_within(self._channel, tensor, self._ranks[rank])
        return tensor

    def broadcast(self, tensor: Tensor | None, dtype: torch.dtype, rank: int) -> Tensor:
        """Return the tensor of ``rank``, which alone gives one."""
        shape = torch.zeros(MOST_DIMENSIONS + 1, dtype=torch.int64)
        shape = shape if tensor is None else _shape(tensor)
        self._group.broadcast_within(self._channel, shape, self._ranks[rank])
        sent = _of_shape(shape, dtype) if tensor is None else tensor.contiguous()
        self._group.broadcast_within(self._channel, sent, self._ranks[rank])
        if tensor is not None:
            self._count(sent)
        return sent

    def _count(self, tensor: Tensor) -> None:
        self.messages += 2
        self.bytes_sent += tensor.nbytes


def _shape(tensor: Tensor) -> Tensor:
    """Return the number of dimensions and their sizes, as a tensor of fixed length."""
    padded = [tensor.dim(), *tensor.shape, *[0] * (MOST_DIMENSIONS - tensor.dim())]
    return torch.tensor(padded)


def _of_shape(shape: Tensor, dtype: torch.dtype) -> Tensor:
    dimensions, *sizes = shape.tolist()
    return torch.empty(sizes[:dimensions], dtype=dtype)


class Mesh(NamedTuple):
    """The ranks along each axis."""

    data: Axis
    """Those that hold the same part of other copies."""
    copy: Axis
    """Those that hold the parts of the same copy."""
    stages: Axis
    """Those that hold the other stages of the same copy, for the same part of layers."""
    tensor: Axis
    """Those that hold the other parts of the same layers."""

    @classmethod
    def of(cls, group: Group, config: Config) -> Mesh:
        """Connect the ranks along all axes; all ranks call this together."""
        tensor, stages = config.tensor_parallel, config.pipeline_parallel
        grid = torch.arange(group.size).view(-1, stages, tensor)
        return cls(
            data=Axis(group, grid.flatten(1).t().tolist()),
            copy=Axis(group, grid.flatten(1).tolist()),
            stages=Axis(group, grid.transpose(1, 2).flatten(0, 1).tolist()),
            tensor=Axis(group, grid.flatten(0, 1).tolist()),
        )


def use_whole_norm(weights: FlatWeights, layout: Layout, ranks: TensorRanks) -> None:
    """Let the norm of these weights' gradient be that of all parts, which ``ranks`` hold.

    It is the same on all ranks, and not finite if any part is not. A parameter that every rank
    holds is counted once.
    """
    is_first = ranks.rank % layout.tensor == 0
    counted = [piece.dim is not None or is_first for piece in layout.own_pieces(ranks.rank)]
    sizes = layout.local_sizes(ranks.rank)

    def norm(grad: Tensor) -> Tensor:
        parts = zip(torch.split(grad, sizes), counted, strict=True)
        norms = [torch.linalg.vector_norm(part).double() for part, counts in parts if counts]
        total = torch.stack([norm.square() for norm in norms]).sum() if norms else torch.zeros(())
        total = total.double().view(1)
        ranks.sum(total)
        return total.sqrt()

    weights.grad_norm = norm


def cut_state(state: StateDict, layout: Layout, rank: int) -> StateDict:
    """Return a learner's state with a rank's part of every flat vector."""
    return _with_vectors([state], lambda vectors: layout.cut(vectors[0], rank))


def join_states(states: Sequence[StateDict], layout: Layout) -> StateDict:
    """Return the first learner's state with whole flat vectors, of the parts of all learners."""
    return _with_vectors(states, layout.join)


def _with_vectors(
    states: Sequence[StateDict], change: Callable[[list[Tensor]], Tensor]
) -> StateDict:
    """Return the first state with other weights, target weights and moments.

    ``change`` returns a vector, given that of every state.
    """
    first = states[0]
    vectors: StateDict = {
        name: change([state[name] for state in states])
        for name in ("weights", "target_weights")
        if name in first
    }
    moments = {
        # They have an entry per weight; the number of steps has no dimension.
        name: change([state["optimiser"][name] for state in states]) if value.dim() else value
        for name, value in first["optimiser"].items()
    }
    return {**first, **vectors, "optimiser": moments}
