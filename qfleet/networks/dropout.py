"""Dropout that is active only where a gradient is computed.

Acting, targets and evaluations run without gradients, often with the very network that is trained,
so torch's switch between training and evaluation would not tell them apart. The masks come from a
counter that is part of the checkpoint: a resumed run draws the same ones.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from qfleet.core.counter_rng import draw_uniform, first_counters, next_counters


class Dropout(nn.Module):
    """Sets a share of the features to 0 and scales the others, so that their mean stays."""

    counter: Tensor

    def __init__(self, share: float) -> None:
        super().__init__()
        self._share = share
        self.first_sample = 0
        """Place of the first sample in its batch, of which an all-reduce rank has a part."""
        seed = torch.randint(2**31, (1,))  # of torch's global generator, like initial weights
        self.register_buffer("counter", first_counters(seed))

    def forward(self, x: Tensor) -> Tensor:
        if not (self.training and torch.is_grad_enabled()):
            return x
        self.counter.copy_(next_counters(self.counter))
        first = self.first_sample * x[0].numel()
        lanes = torch.arange(first, first + x.numel(), device=x.device)
        draws = draw_uniform(self.counter, lanes)
        return x * (draws >= self._share).view_as(x) / (1 - self._share)
