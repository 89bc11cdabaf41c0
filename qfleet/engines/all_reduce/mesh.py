"""Ranks as a mesh: those of the tensor axis hold parts of a network, those of the data axis copies.

Rank r has the coordinates r // tensor_parallel on the data axis and r % tensor_parallel on the
tensor axis, so that the parts of a network are on one machine if its ranks allow it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from qfleet.agent.weights import FlatWeights
from qfleet.core.types import StateDict
from qfleet.engines.all_reduce.group import Group
from qfleet.networks.parallel.collectives import TensorRanks
from qfleet.networks.parallel.layout import Layout


class Axis:
    """The ranks that differ from this one in one coordinate only."""

    def __init__(self, group: Group, every: Sequence[Sequence[int]]) -> None:
        """Connect the ranks of each list in ``every``, which is the same on all ranks."""
        self._group, self._channel = group, group.open_channels(every)
        (own,) = [ranks for ranks in every if group.rank in ranks]
        self.rank, self.size = own.index(group.rank), len(own)
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


class Mesh(NamedTuple):
    data: Axis
    tensor: Axis

    @classmethod
    def of(cls, group: Group, tensor_parallel: int) -> Mesh:
        """Connect the ranks along both axes; all ranks call this together."""
        copies, ranks = group.size // tensor_parallel, range(group.size)
        return cls(
            data=Axis(group, [ranks[part::tensor_parallel] for part in range(tensor_parallel)]),
            tensor=Axis(
                group, [ranks[i * tensor_parallel :][:tensor_parallel] for i in range(copies)]
            ),
        )


def use_whole_norm(weights: FlatWeights, layout: Layout, ranks: TensorRanks) -> None:
    """Let the norm of these weights' gradient be that of all parts together.

    It is the same on all ranks, and not finite if any part is not. A parameter that every rank
    holds is counted once.
    """
    counted = [piece.dim is not None or ranks.rank == 0 for piece in layout.pieces]
    sizes = layout.local_sizes()

    def norm(grad: Tensor) -> Tensor:
        parts = zip(torch.split(grad, sizes), counted, strict=True)
        norms = torch.stack([torch.linalg.vector_norm(part) for part, counts in parts if counts])
        total = norms.double().square().sum().view(1)
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
