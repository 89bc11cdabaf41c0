"""Clipping by norm and RAdam on K agents' flat weights ``[K, P]``: three kernels of our own."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

BLOCK = 2048


class FusedRAdam:
    """The formula of ``updaters.optimisers.RAdam``, with a norm and a step count per agent."""

    def __init__(self, first: Tensor, second: Tensor, steps: Tensor, eps: float, max_norm: float):
        """Works on the moments ``[K, P]`` and steps ``[K]`` (float64) that it is given."""
        from qfleet.accelerator.kernels import flat_optimiser

        self._kernels: Any = flat_optimiser
        self._first, self._second, self._steps = first, second, steps
        self._eps, self._max_norm = eps, max_norm
        agents, self._length = first.shape
        self._grid = (agents, math.ceil(self._length / BLOCK))
        device = first.device
        self._sums = torch.zeros(self._grid, device=device)
        self._numbers = torch.zeros((agents, 4), device=device)
        self.norms = torch.zeros(agents, device=device)
        self.skipped = torch.zeros(agents, device=device)

    def step(self, weights: Tensor, grad: Tensor, learning_rate: Tensor) -> None:
        """``learning_rate`` is ``[K]``. A gradient that is not finite only counts."""
        kernels, length, stride = self._kernels, self._length, weights.stride(0)
        betas = {"BETA1": 0.9, "BETA2": 0.999}
        kernels.squares[self._grid](grad, self._sums, length, stride, BLOCK=BLOCK, num_warps=4)
        kernels.radam_numbers[(self._grid[0],)](
            self._sums, self._steps, learning_rate, self._numbers, self.norms, self.skipped,
            self._grid[1], self._max_norm, **betas, TRUSTED=5.0,
            BLOCKS=2 ** math.ceil(math.log2(max(self._grid[1], 2))), num_warps=1,
        )  # fmt: skip
        kernels.radam[self._grid](
            weights, grad, self._first, self._second, self._numbers, length, stride, self._eps,
            **betas, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
