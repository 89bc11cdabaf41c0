"""Random numbers of many environments at once: a counter in, bits out, nothing to remember.

Every environment has a 64-bit counter of its own, which moves on by a constant each step. What it
draws in a step is a hash (splitmix64, Steele et al. 2014) of that counter and of the draw's number,
its *lane*. So an environment's fate depends on its own seed alone: not on how many others run
beside it, not on the device, and not on whether a draw elsewhere was needed. torch's generators
have none of these properties.
"""

from __future__ import annotations

import torch
from torch import Tensor

_STEP = 0x9E3779B97F4A7C15
_LANE = 0xD1342543DE82EF95
_MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def _signed(value: int) -> int:
    """The int64 with the same bits."""
    value &= 0xFFFFFFFFFFFFFFFF
    return value - (1 << 64) if value >= 1 << 63 else value


def _shifted(bits: Tensor, by: int) -> Tensor:
    """A shift to the right that brings in zeros, which torch's on int64 does not."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


def first_counters(seeds: Tensor) -> Tensor:
    """One counter per int64 seed ``[N]``; neighbouring seeds start far apart."""
    return _mixed(seeds * _signed(_STEP))


def next_counters(counters: Tensor) -> Tensor:
    """The counters of the next step."""
    return counters + _signed(_STEP)


def later_counters(counters: Tensor, steps: Tensor) -> Tensor:
    """The counters so many steps on; int64 ``steps`` broadcast over them."""
    return counters + steps * _signed(_STEP)


def _mixed(bits: Tensor) -> Tensor:
    bits = (bits ^ _shifted(bits, 30)) * _signed(_MIX[0])
    bits = (bits ^ _shifted(bits, 27)) * _signed(_MIX[1])
    return bits ^ _shifted(bits, 31)


def draw_bits(counters: Tensor, lane: int) -> Tensor:
    """32 random bits as int64 ``[N]``; the same lane of the same step gives the same ones."""
    return _shifted(_mixed(counters + _signed(_LANE * (lane + 1))), 32)


def draw_uniform(counters: Tensor, lane: int) -> Tensor:
    """float32 ``[N]`` in [0, 1), a multiple of 2⁻²⁴."""
    return (draw_bits(counters, lane) >> 8).to(torch.float32) * 2.0**-24


def draw_below(counters: Tensor, lane: int, bound: int | Tensor) -> Tensor:
    """int64 ``[N]`` in [0, bound); off evenness by less than bound / 2³²."""
    return (draw_bits(counters, lane) * bound) >> 32
