"""A network whose parts are on several ranks, as a run evaluates and saves it.

Rank 0 never holds the whole network. It saves one parameter after the other, for which it asks the
ranks of the first copy; evaluations are played by all ranks together. A checkpoint is the same as
that of a plain network, so it loads under any other layout. Only a run that resumes, or that begins
with another policy, reads whole vectors on rank 0, and keeps them until all ranks have their parts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from qfleet.agent.evaluation import Evaluation, GiveUp
from qfleet.agent.learner import Learner
from qfleet.agent.weights import FlatWeights, SavedWeights, check_same_layout
from qfleet.core.types import EnvSpec, StateDict
from qfleet.engines.all_reduce.group import Group, Order
from qfleet.engines.all_reduce.mesh import Axis
from qfleet.engines.parts import Model, PolicyEvaluator
from qfleet.networks.parallel.layout import Layout, Piece
from qfleet.storage.segments import Streamed


class SplitModel(Model):
    """The model of a rank, whose learner holds a part of the network."""

    def __init__(
        self, learner: Learner, layout: Layout, group: Group, ranks: Axis, spec: EnvSpec
    ) -> None:
        """``ranks``: all of the group."""
        self.online, self.layout = learner.online, layout
        self._learner, self._group, self._ranks, self._spec = learner, group, ranks, spec
        self._loaded: StateDict = {}
        """What the other ranks do not have yet, in whole vectors (rank 0)."""

    @property
    def weights(self) -> SavedWeights:
        """The weights of the policy, which this model itself fetches."""
        return self

    @property
    def lr_scale(self) -> float:
        return self._learner.lr_scale

    @lr_scale.setter
    def lr_scale(self, scale: float) -> None:
        self._learner.lr_scale = scale

    def read_metrics(self) -> dict[str, float]:
        return self._learner.read_metrics()

    # --- states: whole on rank 0, parts on the others -----------------------------------------

    def state_dict(self) -> StateDict:
        """Return the state of a plain network, whose vectors are fetched while they are saved."""
        return map_vectors(self._learner.state_dict(), self._stream)

    def load_state_dict(self, state: StateDict) -> None:
        """Take this rank's part of a whole state, and keep those of the others (rank 0)."""
        self._learner.load_state_dict(self.cut(state, 0))
        self._loaded = state

    def cut(self, state: StateDict, rank: int) -> StateDict:
        """Return a rank's part of a whole state."""
        part = rank % self.layout.ranks
        return map_vectors(state, lambda _, whole: self.layout.cut(whole, part))

    def take_part(self, rank: int) -> StateDict:
        """Return what a rank has to load before it begins, if it has to."""
        return self.cut(self._loaded, rank)

    def forget_loaded(self) -> None:
        self._loaded = {}

    def _stream(self, number: int, own: Tensor) -> Streamed:
        return Streamed(
            torch.empty(self.layout.whole_size, dtype=own.dtype, device="meta"),
            lambda: self._fetch(number, own),
        )

    def _fetch(self, number: int, own: Tensor) -> Iterator[Tensor]:
        """Yield the whole parameters in vector ``number`` of the state, one by one (rank 0)."""
        held, pieces = self.layout.split_vector(own, 0), self.layout.pieces

        def part_of(rank: int, piece: Piece) -> Tensor:
            if rank == 0:
                return held[piece.name].cpu()
            if rank == max(1, self.layout.holders(piece).start):
                # One order each: ranks wait for orders as long as a slow disk takes.
                order = number * len(pieces) + pieces.index(piece)
                self._group.give_order(Order.SEND_PIECE, order)
            part: Tensor = self._group.receive_state(rank)
            return part

        return self.layout.join_each(part_of)

    def send_piece(self, order: int) -> None:
        """Send this rank's part of a parameter in a vector of the state, if rank 0 needs it."""
        number, index = divmod(order, len(self.layout.pieces))
        piece, rank = self.layout.pieces[index], self._group.rank
        if rank in self.layout.holders(piece):  # in the first copy
            vectors: list[Tensor] = []
            map_vectors(self._learner.state_dict(), lambda _, own: vectors.append(own))
            self._group.send_state(self.layout.split_vector(vectors[number], rank)[piece.name], 0)

    # --- the weights of the policy, as they are saved -----------------------------------------

    def row(self, agent: int) -> Streamed:
        """Return the weights, in the layout of a plain network."""
        del agent
        return self._stream(0, self._learner.weights.data)

    def row_buffers(self, agent: int) -> dict[str, Tensor]:
        return self._learner.weights.row_buffers(agent)

    def describe(self) -> list[list[object]]:
        return [[piece.name, list(piece.shape)] for piece in self.layout.pieces]

    def copy_from(self, other: FlatWeights) -> None:
        """Begin with the weights of a plain network (rank 0)."""
        check_same_layout([(p.name, p.shape) for p in self.layout.pieces], other.layout)
        self._loaded = {"weights": other.data, "target_weights": other.data}
        self._learner.weights.data.copy_(self.layout.cut(other.data, 0))

    # --- evaluations --------------------------------------------------------------------------

    def lead(self, _: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Let all ranks take part in a forward pass of rank 0, which begins with this call."""
        self._group.give_order(Order.FORWARD, len(inputs[0]))
        self._ranks.broadcast(inputs[0].cpu().contiguous(), 0)

    @torch.no_grad()
    def follow(self, count: int) -> None:
        """Take part in a forward pass of ``count`` observations that rank 0 leads."""
        obs = torch.empty((count, *self._spec.obs_shape), dtype=self._spec.torch_dtype)
        self._ranks.broadcast(obs, 0)
        if self._group.rank < self.layout.ranks:  # the first copy suffices
            self.online(obs.to(self._learner.weights.data.device))


class LeadingEvaluator:
    """Plays evaluations on rank 0; all ranks compute the values."""

    def __init__(self, model: SplitModel, player: PolicyEvaluator) -> None:
        """``player`` plays with this rank's part of the network."""
        self._model, self._player = model, player

    def play(self, give_up: GiveUp) -> Evaluation | None:
        hook = self._model.online.register_forward_pre_hook(self._model.lead)
        try:
            return self._player.play(give_up)
        finally:
            hook.remove()


def map_vectors(state: StateDict, change: Callable[[int, Tensor], Any]) -> StateDict:
    """Return a learner's state with other weights, target weights and moments, in this order.

    ``change`` is called with the number of a vector, from 0, and the vector.
    """
    numbers, changed = itertools.count(), dict(state)
    for name in ("weights", "target_weights"):
        if name in state:
            changed[name] = change(next(numbers), state[name])
    if "optimiser" in state:
        changed["optimiser"] = {
            # They have an entry per weight; the number of steps has no dimension.
            name: change(next(numbers), value) if value.dim() else value
            for name, value in state["optimiser"].items()
        }
    return changed
