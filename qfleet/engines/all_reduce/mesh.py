"""Ranks as a mesh: copies of the network, stages of a copy, parts of the layers of a stage.

Ranks are numbered part by part, then stage by stage, then copy by copy, so that those which
exchange most are on one machine if possible.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from qfleet.agent.weights import FlatWeights
from qfleet.config.config import Config
from qfleet.engines.all_reduce.group import Group
from qfleet.networks.parallel.collectives import TensorRanks
from qfleet.networks.parallel.layout import Layout


class Axis:
    """The ranks that differ from this one in one coordinate only.

    Tensors on GPUs are added up and gathered by NCCL if every rank has a GPU of its own. Otherwise,
    and between stages, they go through the host: gloo sends none from a GPU, and two NCCL ranks
    that send to each other at the same time may wait for ever.
    """

    of_all = True
    """Whether all ranks of the run exchange equally often along such an axis."""

    def __init__(self, group: Group, every: Sequence[Sequence[int]]) -> None:
        """Connect the ranks of each list in ``every``, which is the same on all ranks."""
        self._group, self._nccl = group, None
        self._gloo = group.open_channels(every, "gloo")
        if group.has_nccl:
            self._nccl = group.open_channels(every, "nccl")
        (self._ranks,) = [ranks for ranks in every if group.rank in ranks]
        self.rank, self.size = self._ranks.index(group.rank), len(self._ranks)
        self.bytes_sent = self.messages = 0

    @property
    def exchanges(self) -> bool:
        """Whether these ranks exchange anything. The only one of a run with NCCL does, so that one
        GPU records what many would."""
        is_only = self._group.size == 1 and self._nccl is not None
        return not self._group.is_tuning and (self.size > 1 or is_only)

    def _usable(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """Return the tensor, or a copy on the host, and the channel that can send it."""
        if tensor.is_cuda and self._nccl is not None:
            return tensor, self._nccl
        return tensor.cpu(), self._gloo  # itself, if it is there

    def sum(self, tensor: Tensor) -> None:
        """Replace the tensor by its sum over these ranks, the same bits on each."""
        self._reduce(tensor, dist.ReduceOp.SUM)
        # Of a ring: every rank sends each piece of the tensor twice, except its own.
        self._count(2 * (self.size - 1), 2 * tensor.nbytes * (self.size - 1) // self.size)

    def least(self, tensor: Tensor) -> None:
        """Replace the number in this tensor by the smallest that any of these ranks has."""
        self._reduce(tensor, dist.ReduceOp.MIN)

    def _reduce(self, tensor: Tensor, operation: Any) -> None:
        with self._group.exchange(self.of_all):
            usable, channel = self._usable(tensor)
            dist.all_reduce(usable, operation, group=channel)
            if usable is not tensor:
                tensor.copy_(usable)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of these ranks, by rank; they have the same shape."""
        with self._group.exchange(self.of_all):
            usable, channel = self._usable(tensor)
            gathered = [torch.empty_like(usable) for _ in self._ranks]
            dist.all_gather(gathered, usable, group=channel)
        self._count(self.size - 1, tensor.nbytes * (self.size - 1))
        return [one.to(tensor.device) for one in gathered]

    def broadcast(self, tensor: Tensor, rank: int) -> None:
        """Replace the tensor by that of ``rank``."""
        with self._group.exchange(self.of_all):
            usable, channel = self._usable(tensor)
            dist.broadcast(usable, self._ranks[rank], group=channel)
            if usable is not tensor:
                tensor.copy_(usable)
        others = (self.size - 1) * (self.rank == rank)
        self._count(others, tensor.nbytes * others)

    def send(self, tensor: Tensor, rank: int) -> Callable[[], None]:
        """Begin to send a tensor to one of these ranks; return what waits until it has arrived."""
        sent = tensor.cpu().contiguous()  # gloo refuses other layouts
        with self._group.exchange(of_all=False):
            work: Any = dist.isend(sent, self._ranks[rank], group=self._gloo)
        self._count(1, tensor.nbytes)

        def wait(_: Tensor = sent) -> None:  # which must not change or end before it has arrived
            with self._group.exchange(of_all=False):
                work.wait()

        return wait

    def receive(self, tensor: Tensor, rank: int) -> None:
        """Wait for a tensor of one of these ranks."""
        with self._group.exchange(of_all=False):
            on_host = torch.empty(tensor.shape, dtype=tensor.dtype)
            dist.recv(on_host, self._ranks[rank], group=self._gloo)
        tensor.copy_(on_host)

    def _count(self, messages: int, sent_bytes: int) -> None:
        self.messages += messages
        self.bytes_sent += sent_bytes


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
    every: Axis
    """All ranks."""

    @classmethod
    def of(cls, group: Group, config: Config, axis: Callable[..., Axis] = Axis) -> Mesh:
        """Connect the ranks along all axes; all ranks call this together."""
        mesh = cls(*(axis(group, every) for every in axes_of(group.size, config)))
        # Stages have different numbers of layers, and only the first copy evaluates.
        mesh.stages.of_all = mesh.tensor.of_all = False
        return mesh


def axes_of(size: int, config: Config) -> tuple[list[list[int]], ...]:
    """Return the lists of ranks along each axis of ``Mesh``."""
    grid = torch.arange(size).view(-1, config.pipeline_parallel, config.tensor_parallel)
    stages = grid.transpose(1, 2).flatten(0, 1)
    axes = grid.flatten(1).t(), grid.flatten(1), stages, grid.flatten(0, 1), grid.view(1, -1)
    return tuple(axis.tolist() for axis in axes)


def use_whole_norm(weights: FlatWeights, layout: Layout, ranks: TensorRanks) -> None:
    """Let the norm of these weights' gradient be that of all parts, which ``ranks`` hold.

    It is the same on all ranks, and not finite if any part is not. A parameter that every rank
    holds is counted once.
    """
    pieces, sizes = layout.own_pieces(ranks.rank), layout.local_sizes(ranks.rank)
    counted = [ranks.rank in layout.holders(piece) for piece in pieces]

    def norm(grad: Tensor) -> Tensor:
        parts = zip(torch.split(grad, sizes), counted, strict=True)
        norms = [torch.linalg.vector_norm(part).double() for part, counts in parts if counts]
        total = torch.stack([*norms, grad.new_zeros((), dtype=torch.float64)]).square().sum()
        ranks.sum(total)
        return total.sqrt()

    weights.norm_of_all = norm
