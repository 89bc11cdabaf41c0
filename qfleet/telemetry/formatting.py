"""Numbers as people and JSON want them. In: any scalar; out: short text, or a finite number."""

from __future__ import annotations

import math
from typing import SupportsFloat


def finite(value: object) -> float | None:
    """``value`` as a plain Python number; None where it is missing, NaN, infinite or no number."""
    if isinstance(value, int):
        return int(value)
    # None and plain floats go first: asking a protocol is a hundred times dearer.
    if value is None or not isinstance(value, (float, SupportsFloat)):
        return None
    number = float(value)
    return number if math.isfinite(number) else None


def format_score(value: float) -> str:
    """A return: two decimals where they still matter, one above that."""
    if abs(value) >= 1e7:
        return f"{value:.3g}"
    return f"{value:.2f}" if abs(value) < 10 else f"{value:,.1f}"


def format_rate(per_s: float) -> str:
    return f"{per_s:,.0f}" if per_s >= 10 else f"{per_s:.1f}"


def format_duration(seconds: float) -> str:
    """``27 s``, ``3 m 05 s``, ``2 h 07 m``, ``3 d 04 h``."""
    whole = max(0, round(seconds))
    for unit_s, unit, part_s, part in ((86400, "d", 3600, "h"), (3600, "h", 60, "m")):
        if whole >= unit_s:
            return f"{whole // unit_s} {unit} {whole % unit_s // part_s:02d} {part}"
    return f"{whole // 60} m {whole % 60:02d} s" if whole >= 60 else f"{whole} s"


def format_steps(steps: float) -> str:
    """An axis tick: ``500``, ``20k``, ``1.5M``."""
    for size, suffix in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(steps) >= size:
            return f"{steps / size:.6g}{suffix}"
    return f"{steps:.6g}"
