"""Prioritised sampling on the host, with NumPy on the very memory of the tensors.

A draw and an update of 64 samples are some forty operations on small arrays. What an operation of
PyTorch costs to start is several times what it costs to do; NumPy's start costs less.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qfleet.core.types import SKIP
from qfleet.memory.samplers import HOST_BLOCK, PrioritizedSampler


class HostPrioritizedSampler(PrioritizedSampler):
    """A PrioritizedSampler on the CPU: the same draws and leaves, in less time."""

    block = HOST_BLOCK

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._rows_of_leaves = self._blocks().numpy()
        self._flat = self.leaves.numpy()
        self._sums, self._minima = self.block_sums.numpy(), self.block_minima.numpy()
        self._largest = self._max_leaf.numpy()
        self._before = np.zeros(len(self._sums) + 1)
        """Mass before each block, and of all."""

    def _find_leaves(self, fraction: Tensor, beta: float | Tensor) -> tuple[Tensor, Tensor]:
        before = self._before
        np.cumsum(self._sums, out=before[1:])
        mass = np.minimum(fraction.numpy() * before[-1], np.nextafter(before[-1], 0.0))
        block = before[1:].searchsorted(mass, side="right")
        inner = self._rows_of_leaves[block].cumsum(axis=1, dtype=np.float64)
        mass -= before[block]
        rest = np.minimum(mass, np.nextafter(inner[:, -1], 0.0)).clip(min=0.0)
        # These sums never decrease: the first one above a mass belongs to a leaf above 0.
        leaf = (inner > rest[:, None]).argmax(axis=1)
        index = torch.from_numpy(block * self.block + leaf)
        ratio = self._minima.min() / self._flat[index.numpy()]
        return index, torch.from_numpy(ratio).pow_(beta)

    def _set_leaves(self, index: Tensor, priority: Tensor) -> None:
        leaf = self._leaf(priority).numpy()
        slots = index.numpy()
        eligible, finite = self._flat[slots] > 0, np.isfinite(leaf)
        self._largest[...] = leaf.max(where=eligible & finite, initial=float(self._largest))
        leaf = np.where(finite, leaf, self._largest) * eligible
        self._flat[slots] = 0.0
        np.maximum.at(self._flat, slots, leaf)
        if len(slots) < len(self._sums):
            blocks = slots // self.block
            self._sums[blocks], self._minima[blocks] = _summarise(self._rows_of_leaves[blocks])
        else:
            self._refresh(0, len(self._flat))

    def _enter(self, start: int, stop: int) -> None:
        is_start = (self._flags.numpy()[start:stop] & SKIP) == 0
        start, stop = start * self._num_envs, stop * self._num_envs
        np.multiply(is_start.reshape(-1), self._largest, out=self._flat[start:stop])
        self._refresh(start, stop)

    def _refresh(self, start: int, stop: int) -> None:
        blocks = self._blocks_of(start, stop)
        self._sums[blocks], self._minima[blocks] = _summarise(self._rows_of_leaves[blocks])


def _summarise(leaves: NDArray[np.float32]) -> tuple[NDArray[np.float64], NDArray[np.float32]]:
    """Return the sum and the smallest positive leaf of each block."""
    return leaves.sum(axis=1, dtype=np.float64), leaves.min(1, where=leaves > 0, initial=np.inf)
