"""What a descent is accounted for, and its picture; made by hand, without a cluster."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from qfleet.core.errors import ConfigError
from qfleet.lab.mapreduce import make_problem
from qfleet.lab.mapreduce_plot import draw_descent
from qfleet.lab.mapreduce_ray import Descent, Mode, Span
from qfleet.telemetry.timeline import KIND_COLOURS
from qfleet.telemetry.timers import COMMUNICATING, COMPUTING, WAITING
from support.descents import descend
from support.messages import says

PROBLEM = make_problem(60, 3, noise=0.1, seed=0)


def by_hand(mode: Mode, rounds: int = 4, rate: float = 0.2) -> Descent:
    """Each round lasts 10 s: worker 0 is quick and waits, worker 1 computes for 6 s."""
    descent = Descent(2, mode, local_reduction=True)
    descent.weights = list(descend(PROBLEM, 2, rounds, rate, local_reduction=True))
    descent.times_s = [10.0 * k for k in range(rounds + 1)]
    descent.spans = [[], []]
    for begin in descent.times_s[:-1]:
        for k, computed in enumerate((2.0, 6.0)):
            ends = [begin, begin + 1, begin + 1 + computed, begin + 2 + computed, begin + 10]
            kinds = (COMMUNICATING, COMPUTING, COMMUNICATING, WAITING)
            descent.spans[k] += [Span(kind, ends[i], ends[i + 1]) for i, kind in enumerate(kinds)]
    return descent


def test_time_is_accounted_for() -> None:
    descent = by_hand("sync")
    assert descent.wall_s == 40.0
    assert descent.time_share(0) == {COMPUTING: 0.2, COMMUNICATING: 0.2, WAITING: 0.6}
    assert descent.time_share(1) == {COMPUTING: 0.6, COMMUNICATING: 0.2, WAITING: 0.2}
    assert descent.straggler_ratio == 24 / 16


def pixels_of(path: Path) -> np.ndarray:
    from PIL import Image

    with Image.open(path) as image:
        return np.asarray(np.asarray(image.convert("RGB")).astype(np.uint32) @ [65536, 256, 1])


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_the_picture_has_bars_and_the_loss(mode: Mode, tmp_path: Path) -> None:
    descents = {"two": by_hand(mode), "one": by_hand("sync", rate=0.1)}
    pixels = pixels_of(draw_descent(PROBLEM, descents, tmp_path / "deep" / "picture.png"))
    above, below = np.array_split(pixels, 2)
    area = {
        kind: int((above == int(colour[1:], 16)).sum()) for kind, colour in KIND_COLOURS.items()
    }
    # 8, 4 and 8 of 20 s; lines hide a little, the legend adds a little.
    assert area[COMPUTING] / area[COMMUNICATING] == pytest.approx(2.0, rel=0.1)
    assert area[WAITING] / area[COMMUNICATING] == pytest.approx(2.0, rel=0.1)
    for colour in (0x0072B2, 0xD55E00):
        assert colour in below


def test_a_single_round_is_drawn(tmp_path: Path) -> None:
    path = draw_descent(PROBLEM, {"short": by_hand("sync", rounds=1)}, tmp_path / "picture.svg")
    assert "</svg>" in path.read_text()


def test_a_picture_of_no_known_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says(".png")):
        draw_descent(PROBLEM, {"sync": by_hand("sync")}, tmp_path / "picture.doc")
