"""Samplers: uniform and prioritised sampling of a ring's eligible starts.

In: the window of rows whose starts can be sampled, the flags that exclude some of them, and, for
prioritised sampling, the last error of each sample.
Out: flat indices (row × envs + env) and importance weights.

A ``capturable`` sampler draws without host synchronisation, so that its draws can be recorded into
a graph; the values that depend on the window are then kept in tensors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from qfleet.accelerator.compiling import Compilable
from qfleet.core.errors import CheckpointError
from qfleet.core.seeding import restore_generator
from qfleet.core.types import SKIP, StateDict
from qfleet.storage.state_checks import check_like


class Window(NamedTuple):
    """A range of rows ``first`` … ``stop`` − 1, counted from the first row ever written.

    Neither end ever decreases. Row r is stored in ring row r modulo the ring's length.
    """

    first: int
    stop: int


def ring_segments(first: int, stop: int, rows: int) -> Iterator[tuple[int, int]]:
    """Yield the one or two contiguous ranges of a ring that hold rows ``first`` … ``stop`` − 1."""
    if first >= stop:
        return
    start, count = first % rows, stop - first
    yield start, min(start + count, rows)
    if start + count > rows:
        yield 0, start + count - rows


class Sampler(ABC):
    """The base class of samplers: they draw starts from a window of rows."""

    def __init__(self, generator: torch.Generator, capturable: bool) -> None:
        self._generator, self._capturable = generator, capturable
        self._window = Window(0, 0)
        self._flags = torch.empty((1, 1), dtype=torch.uint8)

    def move(self, window: Window, flags: Tensor, /) -> None:
        """Set the window of starts; ``flags`` (uint8 ``[rows, N]``) is the ring's own column.

        The flags of a row are read when it enters the window or is drawn, not before.
        """
        self._window, self._flags = window, flags

    @abstractmethod
    def draw(self, count: int, beta: float | Tensor, /) -> tuple[Tensor, Tensor]:
        """Return ``count`` flat indices and their importance weights with exponent ``beta``.

        The window must hold at least one start that is not SKIP.
        """

    @abstractmethod
    def update(self, index: Tensor, priority: Tensor, /) -> None:
        """Set the priorities of the samples at ``index`` to their new errors."""

    def generators(self) -> list[torch.Generator]:
        """Return the random generators that are drawn from."""
        return [self._generator]

    @abstractmethod
    def compilables(self) -> list[Compilable]:
        """Return the functions that may be compiled with torch.compile."""

    def state_dict(self) -> StateDict:
        return {"generator": self._generator.get_state()}

    def load_state_dict(self, state: StateDict) -> None:
        restore_generator(self._generator, state["generator"])


CANDIDATES = 16
"""Candidates that a capturable sampler draws per sample; it takes the first that is not SKIP."""
LEAST_CANDIDATES = 4096
"""Minimum number of candidates of all samples together: enough that in practice they are never all
SKIP if any start can be sampled."""


class UniformSampler(Sampler):
    """A sampler that draws every eligible start with equal probability.

    It draws from the window and redraws starts that are SKIP.
    """

    def __init__(self, generator: torch.Generator, capturable: bool = False) -> None:
        """Create a sampler; ``generator`` must be on the device of the ring."""
        super().__init__(generator, capturable)
        # As a tensor: wrapping a Python number costs more than the operation on it.
        self._skip = torch.tensor(SKIP, dtype=torch.uint8, device=generator.device)
        self._start = torch.zeros((), dtype=torch.int64, device=generator.device)
        self._size = torch.ones((), dtype=torch.int64, device=generator.device)
        self._choose = Compilable(self._first_usable, is_sized=True)

    def move(self, window: Window, flags: Tensor, /) -> None:
        super().move(window, flags)
        if self._capturable:
            rows, num_envs = flags.shape
            self._start.fill_(window.first % rows * num_envs)
            self._size.fill_(max(1, (window.stop - window.first) * num_envs))

    def draw(self, count: int, _beta: float | Tensor, /) -> tuple[Tensor, Tensor]:
        if self._capturable:
            index = self._draw_capturable(count)
        else:
            index = self._draw_from_window(count)
            flags = self._flags.view(-1)
            while (refused := flags.index_select(0, index).bitwise_and_(self._skip)).any():
                # Redrawing a whole batch is faster than selecting the few samples that need it.
                index = torch.where(refused.bool(), self._draw_from_window(count), index)
        return index, torch.ones(count, dtype=torch.float32, device=index.device)

    def _draw_from_window(self, count: int) -> Tensor:
        rows, num_envs = self._flags.shape
        first, stop = self._window
        index = torch.randint(
            (stop - first) * num_envs,
            (count,),
            generator=self._generator,
            device=self._flags.device,
        )
        return index.add_(first % rows * num_envs).remainder_(rows * num_envs)

    def _draw_capturable(self, count: int) -> Tensor:
        # float64 has 53 bits, so that all slots of the largest ring are equally likely.
        uniform = torch.rand(
            (max(CANDIDATES, -(-LEAST_CANDIDATES // count)), count),
            generator=self._generator,
            device=self._flags.device,
            dtype=torch.float64,
        )
        index: Tensor = self._choose(uniform)
        return index

    def _first_usable(self, uniform: Tensor) -> Tensor:
        """Return the first candidate of each sample that is not SKIP.

        If all candidates of a sample are SKIP (if every second row is SKIP, this happens once in
        65,536), the sample takes a usable candidate of the other samples, each of them in turn: the
        draw is still uniform, but the same start may be drawn twice.
        """
        slots = self._flags.numel()
        index = (uniform * self._size).long() + self._start
        index = index.clamp(max=2 * slots - 1).remainder(slots)
        usable = (self._flags.view(-1)[index] & self._skip) == 0
        chosen = index.gather(0, usable.to(torch.uint8).argmax(0, keepdim=True)).squeeze(0)
        found = usable.view(-1).cumsum(0)
        turn = torch.arange(uniform.shape[1], device=index.device) % found[-1:].clamp(min=1)
        spare = torch.searchsorted(found, turn + 1).clamp(max=index.numel() - 1)
        return torch.where(usable.any(0), chosen, index.view(-1).gather(0, spare))

    def update(self, _index: Tensor, _priority: Tensor, /) -> None:
        """Do nothing: uniform sampling has no priorities."""

    def compilables(self) -> list[Compilable]:
        return [self._choose]


TINY = torch.finfo(torch.float32).tiny
HOST_BLOCK = 64
"""Leaves per block on a CPU, where the additions count and not the number of operations."""
BLOCK = 256
"""Leaves per block. A draw costs slots/BLOCK + count × BLOCK additions; for a million slots and
batches of a few dozen samples the sum is smallest near this value."""


def prioritized_bytes(slots: int) -> int:
    """Return the bytes of a PrioritizedSampler's leaves, block sums and block minima on a CPU.

    Larger blocks need a thirtieth less, and are rounded up to whole ones.
    """
    return -(-slots // HOST_BLOCK) * (HOST_BLOCK * 4 + 8 + 4)


class PrioritizedSampler(Sampler):
    """A sampler with prioritised experience replay (Schaul et al., arXiv 1511.05952).

    P(i) = leaf(i) / Σ leaf with leaf = (|error| + ε)^α. Leaves are stored in blocks, together with
    the sum and the smallest positive leaf of every block. Both are recomputed from all leaves of a
    changed block, never adjusted incrementally, so rounding errors do not accumulate. A slot that
    is not an eligible start has leaf 0.
    """

    block = BLOCK
    """Leaves per block."""

    def __init__(
        self,
        capacity_rows: int,
        num_envs: int,
        alpha: float,
        eps: float,
        device: torch.device,
        generator: torch.Generator,
        capturable: bool = False,
    ) -> None:
        """Create a sampler; ``generator`` must be on ``device``."""
        super().__init__(generator, capturable)
        # Not the search: torch 2.11 compiles it for GPUs so that it finds other leaves.
        self._reweigh = Compilable(self._set_leaves)
        self._rows, self._num_envs = capacity_rows, num_envs
        self._alpha, self._eps = alpha, eps
        blocks = -(-capacity_rows * num_envs // self.block)
        self.leaves = torch.zeros(blocks * self.block, dtype=torch.float32, device=device)
        self.block_sums = torch.zeros(blocks, dtype=torch.float64, device=device)
        self.block_minima = torch.full((blocks,), torch.inf, device=device, dtype=torch.float32)
        """Smallest positive leaf of each block; infinity if there is none."""
        self._max_leaf = torch.ones((), dtype=torch.float32, device=device)
        self._settled = Window(0, 0)

    def move(self, window: Window, flags: Tensor, /) -> None:
        # _settle updates the leaves later: the largest leaf changes only in update(), which settles
        # first, so a row gets the same priority as if it were entered now, and entering many rows
        # at once costs little more than entering one.
        super().move(window, flags)
        if self._capturable:
            self._settle()

    def draw(self, count: int, beta: float | Tensor, /) -> tuple[Tensor, Tensor]:
        """Draw one start from each of ``count`` equal slices of the total mass, in random order.

        The order matters: a burst drawn at once is split into batches, and with slices in
        ascending order each batch would come from one region of the memory.
        """
        self._settle()
        return self._find_leaves(self._stratified_mass(count), beta)

    def _find_leaves(self, fraction: Tensor, beta: float | Tensor) -> tuple[Tensor, Tensor]:
        """Return index and importance weight of the leaf at each fraction of the total mass."""
        index = self._search(fraction)
        leaf = self.leaves.index_select(0, index)
        # Cumulative sums on parallel devices need not be monotonic in the last bit, so that a draw
        # could return a leaf of 0 at a slice's edge; use the largest leaf of the block with the
        # largest sum instead.
        heaviest = self.block_sums.argmax(0, keepdim=True)
        best = self._blocks().index_select(0, heaviest).argmax(1) + heaviest * self.block
        index = torch.where(leaf > 0, index, best)
        leaf = self.leaves.index_select(0, index)
        # (M·P)^-β over its maximum (M·P_min)^-β: M and the total mass cancel.
        return index, (self.block_minima.amin() / leaf).pow(beta)

    def mass(self) -> tuple[float, float]:
        """Return the sum of all leaves and the smallest positive leaf (infinity if none)."""
        self._settle()
        return float(self.block_sums.sum()), float(self.block_minima.amin())

    def least_probability(self) -> Tensor:
        """Return the probability of the start that is drawn least often, without a host sync."""
        self._settle()
        return self.block_minima.amin() / self.block_sums.sum()

    def _stratified_mass(self, count: int) -> Tensor:
        device = self.leaves.device
        if self._capturable:
            # Not randperm, which synchronises with the host on some devices.
            slices = torch.rand(count, generator=self._generator, device=device).argsort()
        else:
            slices = torch.randperm(count, generator=self._generator, device=device)
        within = torch.rand(count, generator=self._generator, device=device, dtype=torch.float64)
        return within.add_(slices).div_(count)

    def _search(self, fraction: Tensor) -> Tensor:
        """Return the flat index of the leaf at each fraction of the total mass."""
        cumulative = torch.cat((self.block_sums.new_zeros(1), self.block_sums.cumsum(0)))
        mass = _below(fraction * cumulative[-1], cumulative[-1])
        block = torch.searchsorted(cumulative[1:], mass, right=True)
        block.clamp_(max=self.block_sums.shape[0] - 1)
        inner = self._blocks().index_select(0, block).cumsum(1, dtype=torch.float64)
        rest = _below(mass - cumulative.index_select(0, block), inner[:, -1]).clamp_(min=0)
        leaf = torch.searchsorted(inner, rest.unsqueeze(1), right=True).squeeze(1)
        return leaf.clamp_(max=self.block - 1).add_(block, alpha=self.block)

    def update(self, index: Tensor, priority: Tensor, /) -> None:
        """Set leaves from absolute errors; slots that are no longer eligible stay 0.

        If a slot has several errors, the largest one counts. A slot with a non-finite error gets
        the largest leaf so far.
        """
        if index.shape[0] == 0:
            return
        self._settle()
        # The learner may be on another device than the memory.
        device = self.leaves.device
        self._reweigh(index.to(device), priority.detach().to(device=device, dtype=torch.float32))

    def _set_leaves(self, index: Tensor, priority: Tensor) -> None:
        leaf = self._leaf(priority)
        eligible = self.leaves.index_select(0, index) > 0
        finite = leaf.isfinite()
        largest = torch.where(eligible & finite, leaf, 0.0).amax()
        self._max_leaf.copy_(torch.maximum(self._max_leaf, largest))
        leaf = torch.where(finite, leaf, self._max_leaf)
        leaf = torch.where(eligible, leaf, 0.0)
        self.leaves.index_fill_(0, index, 0.0)
        self.leaves.scatter_reduce_(0, index, leaf, "amax")
        if index.shape[0] < self.block_sums.shape[0]:
            blocks = index.div(self.block, rounding_mode="floor")
            sums, minima = _summarise(self._blocks().index_select(0, blocks))
            self.block_sums.index_copy_(0, blocks, sums)
            self.block_minima.index_copy_(0, blocks, minima)
        else:
            self._refresh(0, self.leaves.shape[0])

    def _leaf(self, error: Tensor) -> Tensor:
        # A leaf that underflows would look ineligible.
        return error.abs().add_(self._eps).pow_(self._alpha).clamp_(min=TINY)

    def _settle(self) -> None:
        """Update the leaves to the window: clear rows that left it, enter rows that are new."""
        old, new = self._settled, self._window
        if old == new:
            return
        for start, stop in ring_segments(old.first, min(old.stop, new.first), self._rows):
            self._clear(start, stop)
        for start, stop in ring_segments(max(old.stop, new.first), new.stop, self._rows):
            self._enter(start, stop)
        self._settled = new

    def _clear(self, start: int, stop: int) -> None:
        self.leaves[start * self._num_envs : stop * self._num_envs].zero_()
        self._refresh(start * self._num_envs, stop * self._num_envs)

    def _enter(self, start: int, stop: int) -> None:
        skip = (self._flags[start:stop] & SKIP).view(-1)
        leaf = torch.where(skip == 0, self._max_leaf, 0.0)
        self.leaves[start * self._num_envs : stop * self._num_envs] = leaf
        self._refresh(start * self._num_envs, stop * self._num_envs)

    def _refresh(self, start: int, stop: int) -> None:
        """Recompute the blocks that hold leaves ``start`` … ``stop`` − 1."""
        blocks = self._blocks_of(start, stop)
        self.block_sums[blocks], self.block_minima[blocks] = _summarise(self._blocks()[blocks])

    def _blocks_of(self, start: int, stop: int) -> slice:
        return slice(start // self.block, -(-stop // self.block))

    def _blocks(self) -> Tensor:
        return self.leaves.view(-1, self.block)

    def compilables(self) -> list[Compilable]:
        return [self._reweigh]

    def state_dict(self) -> StateDict:
        self._settle()
        filled = min(self._settled.stop, self._rows) * self._num_envs
        return {
            "leaves": self.leaves[:filled],
            "max_leaf": self._max_leaf,
            "window": list(self._settled),
            **super().state_dict(),
        }

    def load_state_dict(self, state: StateDict) -> None:
        check_like(state["window"], [0, 0], "window")
        self._settled = self._window = Window(*state["window"])
        filled = min(self._window.stop, self._rows) * self._num_envs
        check_like(state["leaves"], self.leaves[:filled], "leaves")
        check_like(state["max_leaf"], self._max_leaf, "max_leaf")
        self.leaves[:filled] = state["leaves"]
        self.leaves[filled:] = 0
        self._max_leaf.copy_(state["max_leaf"])
        if min(self.leaves.min(), self._max_leaf) < 0:
            raise CheckpointError("leaves must be ≥ 0")
        self._refresh(0, len(self.leaves))
        super().load_state_dict(state)


def _below(mass: Tensor, bound: Tensor) -> Tensor:
    """Return ``mass`` clamped strictly below ``bound``, so that a search finds a positive leaf."""
    return torch.minimum(mass, torch.nextafter(bound, torch.zeros_like(bound)))


def _summarise(leaves: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum and the smallest positive leaf of each block."""
    minima = leaves.masked_fill(leaves == 0, torch.inf).amin(1)
    return leaves.sum(1, dtype=torch.float64), minima
