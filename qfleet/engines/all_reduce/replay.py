"""The replay memory of a rank: its own ring, sampled in step with the rings of all other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from qfleet.core.types import BATCH_FIELDS, FIRST, SKIP, Batch, Block, StateDict
from qfleet.engines.all_reduce.mesh import Axis
from qfleet.memory.ring import Ring
from qfleet.memory.samplers import PrioritizedSampler


class SharedReplay(Ring):
    """Part of a replay memory that is divided among ranks.

    All ranks begin to learn together. The importance weight of a prioritised sample is relative to
    the largest weight on any rank, as if one sampler had drawn all samples.

    Ranks that hold parts of one network learn from the same samples: each draws its share of every
    batch, and a batch is what all of them have drawn.
    """

    def __init__(
        self,
        ranks: Axis,
        *given: Any,
        peers: Axis | None = None,
        share: int = 0,
        to: torch.device | None = None,
    ) -> None:
        """``ranks``: all of them. ``peers``: those that hold the parts of a network. ``share``:
        samples per batch that this rank draws for them. ``to``: where they learn."""
        super().__init__(*given)
        self._ranks, self._all_can_sample = ranks, False
        self._peers, self._share, self._to = peers, share, to

    def can_sample(self) -> bool:
        """Return whether every rank can sample; all ranks must ask at the same time."""
        if not self._all_can_sample:
            can = torch.tensor([super().can_sample()], dtype=torch.int32)
            if self._ranks.exchanges:
                self._ranks.least(can)
            self._all_can_sample = bool(can)
        return self._all_can_sample

    def sample(self, count: int, beta: float | Tensor) -> Batch:
        batch = super().sample(count // (self._peers.size if self._peers else 1), beta)
        if self._ranks.exchanges and isinstance(self.sampler, PrioritizedSampler):
            rarest = self.sampler.least_probability()  # of the sample with the largest weight
            of_all = rarest.clone()
            self._ranks.least(of_all)
            batch.weight.mul_((of_all / rarest) ** beta)
        return Batch(*(self._of_peers(getattr(batch, name)) for name in BATCH_FIELDS))

    def _of_peers(self, own: Tensor) -> Tensor:
        """Return a column of the samples of all peers, batch by batch, and by rank in a batch."""
        if self._peers is None:
            return own
        columns = torch.stack(self._peers.gather(own.contiguous()))
        batches = columns.view(self._peers.size, -1, self._share, *own.shape[1:])
        return batches.transpose(0, 1).reshape(-1, *own.shape[1:]).to(self._to)

    def update_priorities(self, index: Tensor, priority: Tensor) -> None:
        if self._peers is not None:  # of a batch, this rank has drawn a part
            own = slice(self._peers.rank * self._share, (self._peers.rank + 1) * self._share)
            index, priority = index[own].cpu(), priority[own].cpu()
        super().update_priorities(index, priority)

    def refill(self, pieces: Sequence[StateDict], stack: int) -> None:
        """Fill the empty ring with pieces of other rings; all transitions get new priorities."""
        for piece in pieces:
            flags = piece["flags"].clone()
            # The rows before a piece belong to another one, so that its first stacks are cut.
            flags[: stack - 1].bitwise_or_(SKIP)
            flags[0].bitwise_or_(FIRST)
            columns = {name: column.to(self.device) for name, column in piece.items()}
            self.extend(Block(**columns | {"flags": flags.to(self.device)}))
            self.end_open_episodes()


def in_order(state: StateDict) -> StateDict:
    """Return the rows of a stored ring as columns ``[T, N, …]``, from the oldest to the newest."""
    shape, total = state["shape"], state["total_rows"]
    filled = min(total, shape["rows"])
    if not filled:
        return {}
    columns = {
        name: state[name].view(filled, shape["num_envs"]) for name in ("action", "reward", "flags")
    }
    columns["obs"] = torch.cat(list(state["frames"].tensors))
    if total == filled:
        return columns
    return {name: column.roll(-(total % filled), 0) for name, column in columns.items()}


def deal(rings: Sequence[StateDict], rank: int, ranks: int) -> list[StateDict]:
    """Return a rank's part of every ring, of which all ranks get an equal one, old and new."""
    pieces = []
    for number, columns in enumerate(rings):
        rows, part = len(columns.get("action", ())), (rank + number) % ranks
        first, stop = rows * part // ranks, rows * (part + 1) // ranks
        if stop > first:
            pieces.append({name: column[first:stop] for name, column in columns.items()})
    return pieces
