"""The replay buffer: a time-major ring of rows that takes blocks and returns batches.

Row r holds one step of N envs; the next observation is the one in row r + 1, also at the end of an
episode, where a SKIP row holds the true final observation. n-step returns, bootstrapping at
truncations and frame stacks that share their frames all follow from this rule.

A transition is named by its start: the slot (row × N + env) of its first observation. A start is
eligible if its row is complete (its n-step return is known and nothing of it is overwritten) and it
is not SKIP.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qfleet.accelerator.compiling import Compilable
from qfleet.core.errors import CheckpointError, ConfigError
from qfleet.core.types import FIRST, SKIP, TERMINATED, Batch, Block, EnvSpec, StateDict
from qfleet.memory.columns import allocate, lock_directory
from qfleet.memory.compression import CompressedFrames, Compression, check_compressible
from qfleet.memory.samplers import Sampler, Window, ring_segments
from qfleet.storage.segments import Segments
from qfleet.storage.state_checks import check_like

SEGMENT_BYTES = 64 * 2**20
"""Size of the segments in which frames are checkpointed."""


class PlainFrames:
    """The frames of a ring, uncompressed; ``CompressedFrames`` has the same methods.

    The frame after the last slot is always blank. A frame stack uses it for the positions before an
    episode's start.
    """

    def __init__(self, frames: Tensor, rows: int, num_envs: int) -> None:
        """Use ``frames``, ``[rows * num_envs + 1, *frame_shape]`` with undefined contents."""
        self._frames = frames
        self._rows = frames[:-1].view(rows, num_envs, *frames.shape[1:])
        frames[-1].zero_()

    def write(self, row: int, frames: Tensor) -> None:
        """Write ``frames`` ``[rows, num_envs, *frame_shape]`` into the rows from ``row`` on."""
        self._rows[row : row + frames.shape[0]].copy_(frames)

    def index_select(self, slot: Tensor, out: Tensor | None = None) -> Tensor:
        """Return a copy of the frames at these slots, ``[len(slot), *frame_shape]``."""
        return torch.index_select(self._frames, 0, slot, out=out)

    def pieces(self, cuts: Sequence[tuple[int, int]]) -> Sequence[Tensor]:
        """Return rows start … stop − 1 of each cut; they must be read before the next write."""
        return [self._rows[start:stop] for start, stop in cuts]

    def nbytes(self) -> int:
        """Return the bytes that the frames take at this moment."""
        return self._frames.nbytes


class Ring:
    """A ring buffer of the newest ``capacity // num_envs`` rows, sampled as n-step transitions."""

    def __init__(
        self,
        spec: EnvSpec,
        num_envs: int,
        capacity: int,
        n_steps: int,
        gamma: float,
        sampler: Sampler,
        device: torch.device,
        directory: Path | None = None,
        compression: Compression = "none",
        capturable: bool = False,
    ) -> None:
        """Create an empty ring.

        ``capacity`` counts transitions over all envs. With ``directory`` the columns are
        memory-mapped files in that folder.

        ``capturable``: ``sample`` does not synchronise with the host, so that a CUDA graph can
        record it. The caller must check ``can_sample`` first; the sampler must be capturable too.

        The sampler's generator must be on ``device``.
        """
        self.rows, self.num_envs = capacity // num_envs, num_envs
        self._n_steps, self._stack = n_steps, spec.frame_stack
        self._frame_shape, self._obs_shape = spec.frame_shape, spec.obs_shape
        if spec.frame_stack > 1 and spec.obs_shape[0] != spec.frame_stack:
            raise ValueError(f"obs_shape {spec.obs_shape} is no stack of {spec.frame_stack} frames")
        least = (n_steps + spec.frame_stack) * num_envs
        if capacity < least:
            raise ConfigError(
                f"buffer_size {capacity} is too small for {num_envs} envs, {n_steps}-step returns "
                f"and stacks of {spec.frame_stack}; use at least {least}"
            )
        if compression != "none":
            check_compressible(spec, device, directory)
        self._slots = self.rows * num_envs
        self._row_bytes = num_envs * math.prod(spec.frame_shape) * spec.torch_dtype.itemsize
        self.sampler = sampler
        self._lock = None if directory is None else lock_directory(directory)
        try:
            frames, self._action, self._reward, self._flags = allocate(
                spec, self.rows, num_envs, device, directory, compression
            )
        except BaseException:
            self.close()
            raise
        self._frames: PlainFrames | CompressedFrames = (
            PlainFrames(frames, self.rows, num_envs) if isinstance(frames, Tensor) else frames
        )
        self.device = device
        self._capturable = capturable
        if capturable:
            # Bursts are recorded while the ring is empty; the values they read must be valid
            # indices.
            for column in (self._action, self._reward, self._flags):
                column.zero_()
        self._gather_columns: Callable[..., Any] = self._columns_at
        if capturable:
            self._gather_columns = Compilable(self._columns_at, is_sized=True)
        self._action_rows, self._reward_rows, self._flag_rows = (
            column.view(self.rows, num_envs) for column in (self._action, self._reward, self._flags)
        )
        self._total_rows = 0
        sampler.move(Window(0, 0), self._flag_rows)
        self._eligible_row = -1
        """A row known to hold an eligible start, counted like the rows of a ``Window``."""

        self._gamma_powers = torch.empty(n_steps + 1, device=device)
        # Masks as tensors: wrapping a Python number costs more than the operation on it.
        self._terminated = torch.tensor(TERMINATED, dtype=torch.uint8, device=device)
        self._skip = torch.tensor(SKIP, dtype=torch.uint8, device=device)
        self._discount_by_flags = torch.empty((TERMINATED | SKIP | FIRST) + 1, device=device)
        self.set_gamma(gamma)
        self._return_powers = self._gamma_powers[1:n_steps].unsqueeze(1)
        # Offsets in slots: of the rows that an n-step return sums over, and of the rows of a stack.
        self._return_offsets = (torch.arange(n_steps, device=device) * num_envs).unsqueeze(1)
        self._stack_offsets = torch.arange(1 - spec.frame_stack, 1, device=device) * num_envs

    def set_gamma(self, gamma: float) -> None:
        """Set the discount, in place: recorded kernels read it."""
        powers = [gamma**k for k in range(len(self._gamma_powers))]
        self._gamma_powers.copy_(torch.tensor(powers))
        all_flag_values = range(len(self._discount_by_flags))
        discounts = [0.0 if flags & TERMINATED else gamma for flags in all_flag_values]
        self._discount_by_flags.copy_(torch.tensor(discounts))

    def gamma(self) -> float:
        """Return the discount, from the tensor that kernels read."""
        return float(self._gamma_powers[1])

    def __len__(self) -> int:
        return min(self._total_rows, self.rows) * self.num_envs

    # --- in -----------------------------------------------------------------------------------

    def extend(self, block: Block) -> None:
        """Append rows; once the ring is full they overwrite the oldest ones."""
        count = block.rows
        check_block("ring", block, self.rows, self.num_envs, self._frame_shape)
        start = self._total_rows % self.rows
        head = min(count, self.rows - start)
        self._write(start, block, 0, head)
        if head < count:
            self._write(0, block, head, count)
        if self._total_rows == 0:
            # No row precedes the first one, whatever its flags say.
            self._flag_rows[0].bitwise_or_(FIRST)
        self._total_rows += count
        self.sampler.move(self._window(), self._flag_rows)

    def _write(self, row: int, block: Block, start: int, stop: int) -> None:
        into, source = slice(row, row + stop - start), slice(start, stop)
        self._frames.write(row, block.obs[source])
        self._action_rows[into].copy_(block.action[source])
        self._reward_rows[into].copy_(block.reward[source])
        self._flag_rows[into].copy_(block.flags[source])

    def end_open_episodes(self, envs: slice | None = None) -> None:
        """Mark the newest row SKIP: its observation ends the episode, its action has no result.

        ``envs`` None: of all. A row that is TERMINATED is left as it is: it needs no next one.

        The newest row is in no window yet, and samplers read flags when a row enters a window, so
        they see the new flag without further action.
        """
        if self._total_rows:
            newest = self._flag_rows[(self._total_rows - 1) % self.rows]
            end_episodes(newest if envs is None else newest[envs])

    def frame_bytes(self) -> int:
        """Return the current bytes of the frames; compressed frames vary with their contents."""
        return self._frames.nbytes()

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()

    def _window(self) -> Window:
        """Return the rows that have n rows after them and a whole stack before them.

        The stack is required only once old rows have been overwritten.
        """
        lost = self._total_rows - self.rows
        first = lost + self._stack - 1 if lost > 0 else 0
        return Window(first, max(self._total_rows - self._n_steps, 0))

    # --- out ----------------------------------------------------------------------------------

    def can_sample(self) -> bool:
        """Return whether any start is eligible."""
        window = self._window()
        if self._eligible_row < window.first:
            self._eligible_row = self._find_eligible_row(window)
        return self._eligible_row >= 0

    def _find_eligible_row(self, window: Window) -> int:
        """Return the newest row of the window with an eligible start, or −1.

        The newest row stays in the window until the ring has almost wrapped around, so this scan
        and its host synchronisation are rare.
        """
        stop = window.stop
        for start, end in reversed(list(ring_segments(*window, self.rows))):
            usable = ((self._flag_rows[start:end] & SKIP) == 0).any(1).nonzero()
            if usable.shape[0]:
                return stop - (end - start) + int(usable[-1])
            stop -= end - start
        return -1

    def sample(self, count: int, beta: float | Tensor) -> Batch:
        if not self._capturable and not self.can_sample():
            raise ValueError(f"nothing to sample among {len(self)} transitions; check can_sample()")
        index, weight = self.sampler.draw(count, beta)
        return self._gather(index, weight)

    def gather(self, row: Tensor, env: Tensor) -> Batch:
        """Return the transitions that start in these ring rows and envs, all with weight 1.

        The starts must be eligible; this method does not check it.
        """
        index = row * self.num_envs + env
        return self._gather(index, torch.ones_like(index, dtype=torch.float32))

    def starts(self) -> int:
        """Return the number of transitions that can be sampled, by a scan of the flags."""
        segments = ring_segments(*self._window(), self.rows)
        return sum(int((self._flag_rows[a:b] & SKIP == 0).sum()) for a, b in segments)

    def newest_starts(self, rows: int) -> Tensor:
        """Return the slots ``[rows, N]`` of the newest ``rows`` complete rows, SKIP ones included.

        There are fewer rows if the ring holds fewer.
        """
        first, stop = self._window()
        row = torch.arange(max(first, stop - rows), stop, device=self.device) % self.rows
        env = torch.arange(self.num_envs, device=self.device)
        return row.unsqueeze(1) * self.num_envs + env

    def update_priorities(self, index: Tensor, priority: Tensor) -> None:
        self.sampler.update(index, priority)

    def _gather(self, index: Tensor, weight: Tensor) -> Batch:
        obs, action, reward, discount, next_obs = self._gather_columns(index)
        return Batch(obs, action, reward, discount, next_obs, weight, index)

    def _columns_at(self, index: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        reward, discount, next_index = self._returns(index)
        action = self._action.index_select(0, index)
        return self._observe(index), action, reward, discount, self._observe(next_index)

    def generators(self) -> list[torch.Generator]:
        """Return the random generators that samples are drawn from."""
        return self.sampler.generators()

    def compilables(self) -> list[Compilable]:
        """Return the functions that may be compiled with torch.compile."""
        ours = [self._gather_columns] if isinstance(self._gather_columns, Compilable) else []
        return [*ours, *self.sampler.compilables()]

    def _returns(self, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self._one_step_return(index) if self._n_steps == 1 else self._n_step_return(index)

    def _one_step_return(self, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``_n_step_return`` for n = 1: no row between start and bootstrap row can be SKIP."""
        reward = self._reward.index_select(0, index)
        flags = self._flags.index_select(0, index)
        discount = self._discount_by_flags.index_select(0, flags.int())
        return reward, discount, (index + self.num_envs).remainder_(self._slots)

    def _n_step_return(self, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the n-step reward, the bootstrap discount and the index of the bootstrap row."""
        at = (index + self._return_offsets).remainder_(self._slots)
        flags = self._flags.index_select(0, at.view(-1)).view(at.shape)
        reward = self._reward.index_select(0, at.view(-1)).view(at.shape)
        terminated = flags.bitwise_and(self._terminated).bool()
        # Row k > 0 is not part of the return if a row before it terminated, or if it is SKIP.
        stops = flags[1:].bitwise_and(self._skip).bool().logical_or_(terminated[:-1])
        counted = stops.logical_not_().cumprod(0)
        # The rewards of excluded rows may be NaN, so they are masked, not multiplied by 0. The sum
        # has a fixed order, so that a sample's return does not depend on the rest of its batch.
        discounted = (reward[1:] * self._return_powers).masked_fill_(counted == 0, 0.0)
        total = reward[0] + discounted[0]
        for k in range(1, self._n_steps - 1):
            total += discounted[k]
        steps = counted.sum(0).add_(1)
        over = terminated[1:].logical_and_(counted).any(0).logical_or_(terminated[0])
        discount = self._gamma_powers.index_select(0, steps).masked_fill_(over, 0.0)
        return total, discount, (index + steps * self.num_envs).remainder_(self._slots)

    def _observe(self, index: Tensor) -> Tensor:
        """Return the observations at these slots, stacked from frames if the env stacks them."""
        frames = self._frames.index_select(self._frame_slots(index))
        return frames.view(-1, *self._obs_shape)

    def _frame_slots(self, index: Tensor) -> Tensor:
        """Return the slots of the frames of these observations, flat, oldest first."""
        if self._stack == 1:
            return index
        at = (index.unsqueeze(1) + self._stack_offsets).remainder_(self._slots)
        blank_earlier_episodes(at, self._flags, self._slots)
        return at.view(-1)

    # --- checkpoints --------------------------------------------------------------------------

    def _shape(self) -> dict[str, int]:
        """Return the properties that must be equal for a ring to load another ring's rows."""
        return {
            "rows": self.rows,
            "num_envs": self.num_envs,
            "n_steps": self._n_steps,
            "frame_stack": self._stack,
        }

    def state_dict(self) -> StateDict:
        """Return the filled rows and the sampler's state.

        Tensors are views of the ring: write them out before the next ``extend``.
        """
        filled = len(self)
        return {
            "shape": self._shape(),
            "total_rows": self._total_rows,
            "frames": self._frame_segments(),
            "action": self._action[:filled],
            "reward": self._reward[:filled],
            "flags": self._flags[:filled],
            "sampler": self.sampler.state_dict(),
        }

    def _frame_segments(self) -> Segments:
        """Return the filled frames as segments; the version of a segment is its newest row.

        A million Atari frames are 7 GB, of which a checkpoint interval rewrites a small part.
        """
        rows = max(1, SEGMENT_BYTES // self._row_bytes)
        filled = min(self._total_rows, self.rows)
        cuts = [(start, min(start + rows, filled)) for start in range(0, filled, rows)]
        return Segments(
            # A lazy sequence for compressed frames, so that they are not all decompressed at once.
            tensors=self._frames.pieces(cuts),
            versions=[self._newest_row_in(start, stop) for start, stop in cuts],
        )

    def _newest_row_in(self, start: int, stop: int) -> int:
        """Return the newest row in ring rows start … stop − 1, counted from the first written."""
        newest = self._total_rows - 1
        if start <= newest % self.rows < stop:
            return newest
        return newest - (newest - (stop - 1)) % self.rows

    def write_frames(self, row: int, frames: Tensor) -> None:
        """Write a stored piece of frames back, for callers that restore frames piece by piece."""
        self._frames.write(row, frames)

    def load_state_dict(self, state: StateDict) -> None:
        stored = dict(state["shape"])
        if state["total_rows"] <= min(stored["rows"], self.rows):
            # No row was overwritten yet: every row has the same place in a ring of another size.
            stored["rows"] = self.rows
        check_equal(stored, self._shape(), "replay memory")
        check_like(state, self.state_dict(), "memory", free=state)
        check_like(state["total_rows"], 0, "total_rows")
        self._total_rows = state["total_rows"]
        filled = len(self)
        start = 0
        for piece in state["frames"].tensors:
            self._frames.write(start, piece)
            start += piece.shape[0]
        for name in ("action", "reward", "flags"):
            column = getattr(self, f"_{name}")[:filled]
            check_like(state[name], column, name, finite=False)
            column.copy_(state[name])
        self._eligible_row = -1
        self.sampler.load_state_dict(state["sampler"])
        if state["sampler"].get("window", window := list(self._window())) != window:
            raise CheckpointError(f"sampler/window must be {window}")
        self.sampler.move(self._window(), self._flag_rows)


def check_block(
    memory: str, block: Block, most_rows: int, num_envs: int, frame_shape: tuple[int, ...]
) -> None:
    """Raise ValueError if a block is too long or a column has the wrong shape.

    ``copy_`` would silently broadcast it.
    """
    if block.rows > most_rows:
        raise ValueError(f"a block of {block.rows} rows is longer than the {memory} of {most_rows}")
    per_row = (block.rows, num_envs)
    for name in ("obs", "action", "reward", "flags"):
        shape = tuple(getattr(block, name).shape)
        expected = (*per_row, *frame_shape) if name == "obs" else per_row
        if shape != expected:
            raise ValueError(f"block.{name} has shape {shape}, not {expected}")


def end_episodes(newest: Tensor) -> None:
    """Set SKIP in the flags ``[N]`` of the newest row, except where they are TERMINATED."""
    newest.bitwise_or_(torch.where(newest & TERMINATED != 0, 0, SKIP).to(torch.uint8))


def blank_earlier_episodes(stacks: Tensor, flags: Tensor, blank: int) -> None:
    """Replace the slots of frames from before the episode's start by ``blank``, in place.

    ``stacks`` ``[B, stack]`` are slots, oldest first; ``flags`` is the flat column.
    """
    later = stacks[:, 1:]
    opens = (flags.index_select(0, later.reshape(-1)) & FIRST).view(later.shape)
    # A frame is from before the episode if any later row of the stack starts an episode.
    before = opens.flip(1).cumsum(1).flip(1) != 0
    stacks[:, :-1].masked_fill_(before, blank)


def check_equal(stored: Mapping[str, int], ours: Mapping[str, int], what: str) -> None:
    """Raise CheckpointError if a stored memory has other properties than this one."""
    differing = [name for name in {**ours, **stored} if ours.get(name) != stored.get(name)]
    if differing:
        named = ", ".join(f"{name} {stored.get(name)} (now {ours.get(name)})" for name in differing)
        raise CheckpointError(f"the stored {what} has {named}; resume with equal values")
