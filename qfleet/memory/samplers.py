"""Which transitions to learn from: uniform and prioritised draws over a ring's eligible starts.

In: the window of rows whose starts are old enough (and not too old) to sample, the flags that rule
some of them out, and, when prioritised, the last error of each sample.
Out: flat indices (row × envs + env) and importance weights.

A ``capturable`` sampler draws without asking the host for a value, so that its draws can be
recorded into a graph; what depends on the window is then kept in tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from qfleet.accelerator.compiling import Compilable
from qfleet.core.seeding import restore_generator
from qfleet.core.types import SKIP, StateDict


class Window(NamedTuple):
    """Rows ``first`` … ``stop`` − 1, counted from the first row ever written.

    Neither end ever moves back. Row r lies in ring row r modulo the ring's length.
    """

    first: int
    stop: int


def ring_segments(first: int, stop: int, rows: int) -> Iterator[tuple[int, int]]:
    """The at most two contiguous stretches of a ring that hold rows ``first`` … ``stop`` − 1."""
    if first >= stop:
        return
    start, count = first % rows, stop - first
    yield start, min(start + count, rows)
    if start + count > rows:
        yield 0, start + count - rows


class Sampler(Protocol):
    """Draws starts from a window of rows."""

    def move(self, window: Window, flags: Tensor, /) -> None:
        """Starts now lie in ``window``; ``flags`` (uint8 ``[rows, N]``) is the ring's own column.

        Flags are read when a row is drawn from or enters the window, not before.
        """
        ...

    def draw(self, count: int, beta: float | Tensor, /) -> tuple[Tensor, Tensor]:
        """``count`` flat indices and their importance weights of exponent ``beta``.

        The window must hold at least one start that is not SKIP.
        """
        ...

    def update(self, index: Tensor, priority: Tensor, /) -> None:
        """Tell the errors that the samples at ``index`` turned out to have."""
        ...

    def generators(self) -> list[torch.Generator]:
        """What draws come from."""
        ...

    def compilables(self) -> list[Compilable]:
        """What torch.compile may be switched on for."""
        ...

    def state_dict(self) -> StateDict: ...

    def load_state_dict(self, state: StateDict) -> None: ...


CANDIDATES = 16
"""Draws per sample that a capturable sampler makes at once, to take the first that is no SKIP."""
LEAST_CANDIDATES = 4096
"""Of all samples together: so many are never all SKIP while anything can be sampled at all."""


class UniformSampler:
    """Every eligible start is equally likely: draw from the window, redraw what is SKIP."""

    def __init__(self, generator: torch.Generator, capturable: bool = False) -> None:
        """``generator`` must live on the device of the ring."""
        self._generator, self._unasked = generator, capturable
        # As a tensor: wrapping a Python number costs more than the operation on it.
        self._skip = torch.tensor(SKIP, dtype=torch.uint8, device=generator.device)
        self._window = Window(0, 0)
        self._flags = torch.empty((1, 1), dtype=torch.uint8)
        self._start = torch.zeros((), dtype=torch.int64, device=generator.device)
        self._size = torch.ones((), dtype=torch.int64, device=generator.device)
        self._choose = Compilable(self._first_usable, is_sized=True)

    def move(self, window: Window, flags: Tensor, /) -> None:
        self._window, self._flags = window, flags
        if self._unasked:
            rows, num_envs = flags.shape
            self._start.fill_(window.first % rows * num_envs)
            self._size.fill_(max(1, (window.stop - window.first) * num_envs))

    def draw(self, count: int, _beta: float | Tensor, /) -> tuple[Tensor, Tensor]:
        if self._unasked:
            index = self._draw_unasked(count)
        else:
            index = self._draw_from_window(count)
            flags = self._flags.view(-1)
            while (refused := flags.index_select(0, index).bitwise_and_(self._skip)).any():
                # Drawing a whole batch for the few that need it beats picking those out.
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

    def _draw_unasked(self, count: int) -> Tensor:
        # 53 bits, so that every slot of the largest ring is as likely as the next.
        uniform = torch.rand(
            (max(CANDIDATES, -(-LEAST_CANDIDATES // count)), count),
            generator=self._generator,
            device=self._flags.device,
            dtype=torch.float64,
        )
        index: Tensor = self._choose(uniform)
        return index

    def _first_usable(self, uniform: Tensor) -> Tensor:
        """The first candidate of each sample that is no SKIP.

        Where all of a sample's are (for one row in two SKIP, once in 65,536), it takes a usable one
        of the others', each of them in turn: still uniform, only perhaps drawn twice.
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
        """Errors do not matter here."""

    def generators(self) -> list[torch.Generator]:
        return [self._generator]

    def compilables(self) -> list[Compilable]:
        return [self._choose]

    def state_dict(self) -> StateDict:
        return {"generator": self._generator.get_state()}

    def load_state_dict(self, state: StateDict) -> None:
        restore_generator(self._generator, state["generator"])


BLOCK = 256
"""Leaves per block. A draw costs slots/BLOCK + count × BLOCK additions; for a million slots and
batches of some dozens the sum is smallest near here."""


def num_blocks(slots: int) -> int:
    return -(-slots // BLOCK)


def prioritized_bytes(slots: int) -> int:
    """Bytes of the leaves, block sums and block minima of a PrioritizedSampler."""
    return num_blocks(slots) * (BLOCK * 4 + 8 + 4)


class PrioritizedSampler:
    """P(i) = leaf(i) / Σ leaf with leaf = (|error| + ε)^α (Schaul et al., arXiv 1511.05952).

    Leaves lie in blocks, with the sum and the smallest positive leaf of every block beside them.
    Both are recomputed from the leaves of a touched block, never adjusted, so they cannot drift. A
    slot that is no eligible start has leaf 0.
    """

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
        """``generator`` must live on ``device``."""
        self._unasked = capturable
        self._find = Compilable(self._find_leaves, is_sized=True)
        self._reweigh = Compilable(self._set_leaves)
        self._rows, self._num_envs = capacity_rows, num_envs
        self._alpha, self._eps = alpha, eps
        self._generator = generator
        blocks = num_blocks(capacity_rows * num_envs)
        self.leaves = torch.zeros(blocks * BLOCK, dtype=torch.float32, device=device)
        self.block_sums = torch.zeros(blocks, dtype=torch.float64, device=device)
        self.block_minima = torch.full((blocks,), torch.inf, device=device, dtype=torch.float32)
        """Smallest positive leaf; infinity where there is none."""
        self._max_leaf = torch.ones((), dtype=torch.float32, device=device)
        self._window = Window(0, 0)
        self._settled = Window(0, 0)
        self._flags = torch.empty((1, 1), dtype=torch.uint8)

    def move(self, window: Window, flags: Tensor, /) -> None:
        # Leaves follow in _settle: the largest leaf changes only in update(), which settles first,
        # so a late entry gets the same priority as a prompt one, and many cost little more.
        self._window, self._flags = window, flags
        if self._unasked:
            self._settle()

    def draw(self, count: int, beta: float | Tensor, /) -> tuple[Tensor, Tensor]:
        """One draw from each of ``count`` equal slices of the total mass, in random order.

        The order matters: a burst drawn at once is cut into batches, and slices in rising order
        would fill each batch from one stretch of the memory.
        """
        self._settle()
        drawn: tuple[Tensor, Tensor] = self._find(self._stratified_mass(count), beta)
        return drawn

    def _find_leaves(self, fraction: Tensor, beta: float | Tensor) -> tuple[Tensor, Tensor]:
        """Index and importance weight of the leaf at each fraction of the total mass."""
        index = self._search(fraction)
        leaf = self.leaves.index_select(0, index)
        # Cumulative sums on parallel devices need not rise monotonically in the last bit, which
        # could let a draw land on a leaf of 0 at a slice's edge; put it on the heaviest block.
        heaviest = self.block_sums.argmax(0, keepdim=True)
        best = self._blocks().index_select(0, heaviest).argmax(1) + heaviest * BLOCK
        index = torch.where(leaf > 0, index, best)
        leaf = self.leaves.index_select(0, index)
        # (M·P)^-β over its maximum (M·P_min)^-β: M and the total mass cancel.
        return index, (self.block_minima.amin() / leaf).pow(beta)

    def mass(self) -> tuple[float, float]:
        """Sum of all leaves, and the smallest positive one (infinity where there is none)."""
        self._settle()
        return float(self.block_sums.sum()), float(self.block_minima.amin())

    def _stratified_mass(self, count: int) -> Tensor:
        device = self.leaves.device
        if self._unasked:
            # Not randperm, which asks the host on some devices.
            slices = torch.rand(count, generator=self._generator, device=device).argsort()
        else:
            slices = torch.randperm(count, generator=self._generator, device=device)
        within = torch.rand(count, generator=self._generator, device=device, dtype=torch.float64)
        return within.add_(slices).div_(count)

    def _search(self, fraction: Tensor) -> Tensor:
        """Flat index of the leaf at each fraction of the total mass."""
        cumulative = torch.cat((self.block_sums.new_zeros(1), self.block_sums.cumsum(0)))
        mass = _below(fraction * cumulative[-1], cumulative[-1])
        block = torch.searchsorted(cumulative[1:], mass, right=True)
        block.clamp_(max=self.block_sums.shape[0] - 1)
        inner = self._blocks().index_select(0, block).cumsum(1, dtype=torch.float64)
        rest = _below(mass - cumulative.index_select(0, block), inner[:, -1]).clamp_(min=0)
        leaf = torch.searchsorted(inner, rest.unsqueeze(1), right=True).squeeze(1)
        return leaf.clamp_(max=BLOCK - 1).add_(block, alpha=BLOCK)

    def update(self, index: Tensor, priority: Tensor, /) -> None:
        """Set leaves from absolute errors; slots that are no longer eligible stay 0.

        Of several errors for one slot the largest counts. A non-finite one counts as the largest
        seen so far.
        """
        if index.shape[0] == 0:
            return
        self._settle()
        # Samples may have been learnt from on another device than the one they are kept on.
        device = self.leaves.device
        self._reweigh(index.to(device), priority.detach().to(device=device, dtype=torch.float32))

    def _set_leaves(self, index: Tensor, priority: Tensor) -> None:
        error = priority.abs()
        leaf = error.add_(self._eps).pow_(self._alpha)
        # A leaf that underflows would look ineligible.
        leaf.clamp_(min=torch.finfo(torch.float32).tiny)
        alive = self.leaves.index_select(0, index) > 0
        finite = leaf.isfinite()
        largest = torch.where(alive & finite, leaf, 0.0).amax()
        self._max_leaf.copy_(torch.maximum(self._max_leaf, largest))
        leaf = torch.where(finite, leaf, self._max_leaf)
        leaf = torch.where(alive, leaf, 0.0)
        self.leaves.index_fill_(0, index, 0.0)
        self.leaves.scatter_reduce_(0, index, leaf, "amax")
        if index.shape[0] < self.block_sums.shape[0]:
            blocks = index.div(BLOCK, rounding_mode="floor")
            sums, minima = _summarise(self._blocks().index_select(0, blocks))
            self.block_sums.index_copy_(0, blocks, sums)
            self.block_minima.index_copy_(0, blocks, minima)
        else:
            self._refresh(0, self.leaves.shape[0])

    def _settle(self) -> None:
        """Bring the leaves up to the window: drop rows that left it, admit rows that entered."""
        old, new = self._settled, self._window
        if old == new:
            return
        for start, stop in ring_segments(old.first, min(old.stop, new.first), self._rows):
            self._put(start, stop, None)
        for start, stop in ring_segments(max(old.stop, new.first), new.stop, self._rows):
            skip = (self._flags[start:stop] & SKIP).view(-1)
            self._put(start, stop, torch.where(skip == 0, self._max_leaf, 0.0))
        self._settled = new

    def _put(self, start_row: int, stop_row: int, leaf: Tensor | None) -> None:
        start, stop = start_row * self._num_envs, stop_row * self._num_envs
        if leaf is None:
            self.leaves[start:stop].zero_()
        else:
            self.leaves[start:stop] = leaf
        self._refresh(start, stop)

    def _refresh(self, start: int, stop: int) -> None:
        """Recompute the blocks that hold leaves ``start`` … ``stop`` − 1."""
        blocks = slice(start // BLOCK, num_blocks(stop))
        self.block_sums[blocks], self.block_minima[blocks] = _summarise(self._blocks()[blocks])

    def _blocks(self) -> Tensor:
        return self.leaves.view(-1, BLOCK)

    def generators(self) -> list[torch.Generator]:
        return [self._generator]

    def compilables(self) -> list[Compilable]:
        return [self._find, self._reweigh]

    def state_dict(self) -> StateDict:
        self._settle()
        filled = min(self._settled.stop, self._rows) * self._num_envs
        return {
            "leaves": self.leaves[:filled],
            "block_sums": self.block_sums,
            "block_minima": self.block_minima,
            "max_leaf": self._max_leaf,
            "window": list(self._settled),
            "generator": self._generator.get_state(),
        }

    def load_state_dict(self, state: StateDict) -> None:
        filled = state["leaves"].shape[0]
        self.leaves[:filled] = state["leaves"]
        self.leaves[filled:] = 0
        self.block_sums.copy_(state["block_sums"])
        self.block_minima.copy_(state["block_minima"])
        self._max_leaf.copy_(state["max_leaf"])
        self._settled = self._window = Window(*state["window"])
        restore_generator(self._generator, state["generator"])


def _below(mass: Tensor, bound: Tensor) -> Tensor:
    """``mass``, kept strictly below ``bound``: a search for it then ends on a positive leaf."""
    return torch.minimum(mass, torch.nextafter(bound, torch.zeros_like(bound)))


def _summarise(leaves: Tensor) -> tuple[Tensor, Tensor]:
    """Sum and smallest positive leaf of each block."""
    minima = leaves.masked_fill(leaves == 0, torch.inf).amin(1)
    return leaves.sum(1, dtype=torch.float64), minima
