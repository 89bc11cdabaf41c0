"""Gradient clipping by norm and RAdam on the flat weights ``[K, P]`` of K agents, in Triton."""

from __future__ import annotations

import contextlib
import functools
import math
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

BLOCK = 2048


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which ``device`` is current, because Triton launches kernels there."""
    if device.type != "cuda":
        return contextlib.nullcontext()
    return torch.cuda.device(device)


@functools.cache
def why_no_kernels(device: torch.device) -> str | None:
    """Return why the Triton kernels cannot be used on this device; None if they can.

    Triton may be installed and still fail to compile, so this function runs a kernel once.
    """
    if device.type != "cuda":
        return f"there are no kernels for {device.type}"
    try:
        weights = torch.ones((1, 16), device=device)
        moments, steps = torch.zeros((2, 1, 16), device=device), torch.zeros(1, device=device)
        trial = FusedRAdam(moments[0], moments[1], steps.double(), 1e-8, 1.0)
        trial.step(weights, weights.clone(), torch.ones(1, device=device))
        torch.cuda.synchronize(device)
    except Exception as error:  # compilers raise many types
        lines = str(error).strip().splitlines()
        return f"{type(error).__name__}: {lines[0] if lines else '?'}"
    return None


class FusedRAdam:
    """RAdam as in ``updaters.optimisers.RAdam``, with one norm and one step count per agent."""

    def __init__(self, first: Tensor, second: Tensor, steps: Tensor, eps: float, max_norm: float):
        """Use these moments ``[K, P]`` and steps ``[K]`` (float64); they are updated in place."""
        from qfleet.accelerator.kernels import flat_optimiser

        self._kernels: Any = flat_optimiser
        self._first, self._second, self._steps = first, second, steps
        self._eps, self._max_norm = eps, max_norm
        agents, self._length = first.shape
        self._grid = (agents, math.ceil(self._length / BLOCK))
        device = first.device
        self._sums = torch.zeros(self._grid, device=device)
        self._numbers = torch.zeros((agents, 3), device=device)
        self.norms = torch.zeros(agents, device=device)
        self.skipped = torch.zeros(agents, device=device)

    def step(self, weights: Tensor, grad: Tensor, learning_rate: Tensor) -> None:
        """Make one step with ``learning_rate`` ``[K]``; a non-finite gradient changes nothing."""
        kernels, length, stride = self._kernels, self._length, weights.stride(0)
        betas = {"BETA1": 0.9, "BETA2": 0.999}
        with on(weights.device):
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
