"""Format numbers: scalars to short text for people, or to finite numbers for JSON."""

from __future__ import annotations

import math
import sys
from typing import SupportsFloat


def finite(value: object) -> float | None:
    """Return ``value`` as a Python number; None if it is missing, NaN, infinite or not a number.

    An integer that no float can hold counts as infinite.
    """
    if isinstance(value, int):
        return int(value) if abs(value) <= sys.float_info.max else None
    # None and plain floats are tested first: an isinstance check of a protocol is a hundred times
    # slower.
    if value is None or not isinstance(value, (float, SupportsFloat)):
        return None
    number = float(value)
    return number if math.isfinite(number) else None


def format_score(value: float) -> str:
    """Format a return: two decimals below 10, one above, three significant digits from 1e7."""
    if abs(value) >= 1e7:
        return f"{value:.3g}"
    return f"{value:.2f}" if abs(value) < 10 else f"{value:,.1f}"


def format_rate(per_s: float) -> str:
    return f"{per_s:,.0f}" if per_s >= 10 else f"{per_s:.1f}"


def format_duration(seconds: float) -> str:
    """Format a duration: ``0.4 s``, ``27 s``, ``3 m 05 s``, ``2 h 07 m``, ``3 d 04 h``."""
    if 0.05 <= seconds < 1:
        return f"{seconds:.1g} s"
    whole = max(0, round(seconds))
    for unit_s, unit, part_s, part in ((86400, "d", 3600, "h"), (3600, "h", 60, "m")):
        if whole >= unit_s:
            return f"{whole // unit_s} {unit} {whole % unit_s // part_s:02d} {part}"
    return f"{whole // 60} m {whole % 60:02d} s" if whole >= 60 else f"{whole} s"


def format_steps(steps: float) -> str:
    """Format an axis tick: ``500``, ``20k``, ``1.5M``."""
    for size, suffix in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(steps) >= size:
            return f"{steps / size:.6g}{suffix}"
    return f"{steps:.6g}"
