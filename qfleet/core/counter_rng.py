"""A counter-based random number generator for a batch of environments.

Every environment has its own 64-bit counter, which grows by a constant each step. A random number
is a hash (splitmix64, Steele et al. 2014) of that counter and of the number of the draw within the
step, its *lane*. What an environment draws therefore depends on its own seed alone: not on the
number of other environments, not on the device, and not on whether another environment needed a
draw. torch's generators have none of these properties.
"""

from __future__ import annotations

import torch
from torch import Tensor

_STEP = 0x9E3779B97F4A7C15
_LANE = 0xD1342543DE82EF95
_MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def _signed(value: int) -> int:
    """Return the int64 with the same bits."""
    value &= 0xFFFFFFFFFFFFFFFF
    return value - (1 << 64) if value >= 1 << 63 else value


def _shifted(bits: Tensor, by: int) -> Tensor:
    """Return ``bits`` shifted right, filled with zeros; torch's ``>>`` on int64 fills the sign."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


def first_counters(seeds: Tensor) -> Tensor:
    """Return one counter per int64 seed ``[N]``; neighbouring seeds start far apart."""
    return _mixed(seeds * _signed(_STEP))


def next_counters(counters: Tensor, steps: int | Tensor = 1) -> Tensor:
    """Return the counters ``steps`` steps later; int64 ``steps`` are broadcast over them."""
    return counters + steps * _signed(_STEP)


def _mixed(bits: Tensor) -> Tensor:
    bits = (bits ^ _shifted(bits, 30)) * _signed(_MIX[0])
    bits = (bits ^ _shifted(bits, 27)) * _signed(_MIX[1])
    return bits ^ _shifted(bits, 31)


def draw_bits(counters: Tensor, lane: int | Tensor) -> Tensor:
    """Return 32 random bits as int64 ``[N]``; the same counter and lane give the same bits.

    Several draws at once are ``counters`` ``[N, 1]`` and ``lane`` ``[L]``.
    """
    offset = _signed(_LANE * (lane + 1)) if isinstance(lane, int) else (lane + 1) * _signed(_LANE)
    return _shifted(_mixed(counters + offset), 32)


def draw_uniform(counters: Tensor, lane: int | Tensor) -> Tensor:
    """Return float32 ``[N]``, uniform in [0, 1), multiples of 2⁻²⁴."""
    return (draw_bits(counters, lane) >> 8).to(torch.float32) * 2.0**-24


def draw_below(counters: Tensor, lane: int | Tensor, bound: int | Tensor) -> Tensor:
    """Return int64 ``[N]`` in [0, bound); the bias is less than bound / 2³²."""
    return (draw_bits(counters, lane) * bound) >> 32
