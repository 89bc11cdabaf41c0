from __future__ import annotations

import json

import numpy as np
import pytest

from qfleet.telemetry.formatting import (
    finite,
    format_duration,
    format_rate,
    format_score,
    format_steps,
)


def test_finite_keeps_numbers_and_drops_the_rest() -> None:
    assert finite(3) == 3
    assert isinstance(finite(3), int)
    assert finite(np.float32(0.5)) == 0.5
    assert json.dumps(finite(np.int64(7))) == "7.0"
    bad = (None, float("nan"), float("inf"), -float("inf"), np.float32("nan"), "12", [1.0])
    assert [finite(value) for value in bad] == [None] * 7


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-1, "0 s"),
        (0.00004, "0 s"),
        (0.44, "0.4 s"),
        (0.96, "1 s"),
        (26.6, "27 s"),
        (59.7, "1 m 00 s"),
        (185, "3 m 05 s"),
        (7620, "2 h 07 m"),
        (273600, "3 d 04 h"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_scores_rates_and_steps() -> None:
    assert [format_score(v) for v in (0.734, -9.999, 87.24, 12345.6, 2e8)] == [
        "0.73",
        "-10.00",
        "87.2",
        "12,345.6",
        "2e+08",
    ]
    assert [format_rate(v) for v in (0.52, 1432.4)] == ["0.5", "1,432"]
    assert [format_steps(v) for v in (0, 500, 20_000, 1_500_000, 2e9)] == [
        "0",
        "500",
        "20k",
        "1.5M",
        "2B",
    ]
