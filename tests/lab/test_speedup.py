"""Speed-ups from made-up runs: what is run, what it is held against, and what is drawn."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
from matplotlib.axes import Axes

from qfleet.core.errors import ConfigError
from qfleet.lab.speedup import (
    HEADER,
    Case,
    Point,
    make_cases,
    modelled,
    parse_updates,
    parse_workers,
    row,
    sweep,
    write_csv,
)
from qfleet.lab.speedup_plot import draw_speedup
from support.messages import says


def fleet(rate: float | None, env_steps: int, staleness: float | None = 1.5) -> dict[str, Any]:
    """What ``result.json`` says of a run's workers."""
    return {
        "env_steps_per_s": rate,
        "env_steps": env_steps,
        "shares": {"computing": 0.5, "communicating": 0.25, "waiting": 0.125, "other": 0.125},
        "staleness": {"mean": staleness},
        "processor_s": 7.0,
    }


class Trainer:
    """Rates by update, straggler and workers; remembers what was asked for."""

    def __init__(self, **rates: float) -> None:
        self.told: list[dict[str, Any]] = []
        self._rates = rates

    def __call__(self, told: dict[str, Any]) -> dict[str, Any]:
        self.told.append(told)
        name = f"{told['update']}_{told['workers']}" + "_slow" * (told["straggler"] > 1)
        return fleet(self._rates[name], told["steps"])


def test_workers_are_numbers_in_order_and_begin_with_1() -> None:
    assert parse_workers("4,1, 2,2") == [1, 2, 4]
    for text in ("2,4", "0,1", "-1,1"):
        with pytest.raises(ConfigError, match=says("workers", text)):
            parse_workers(text)
    for text in ("", "1,two", "1,,2"):
        with pytest.raises(ConfigError, match=says("workers", "numbers")):
            parse_workers(text)


def test_updates_are_known_names() -> None:
    assert parse_updates("sync, async,sync", ["async", "sync"]) == ["sync", "async"]
    with pytest.raises(ConfigError, match=says("update", "asink", "sync,async")):
        parse_updates("sync,asink", ["sync", "async"])


def test_a_straggler_is_run_besides_and_never_alone() -> None:
    assert make_cases(["sync"], [1, 2], 1.0) == [Case("sync", 1.0, 1), Case("sync", 1.0, 2)]
    assert make_cases(["sync", "async"], [1, 2, 4], 4.0) == [
        Case("sync", 1.0, 1),
        Case("sync", 1.0, 2),
        Case("sync", 1.0, 4),
        Case("sync", 4.0, 2),
        Case("sync", 4.0, 4),
        Case("async", 1.0, 1),
        Case("async", 1.0, 2),
        Case("async", 1.0, 4),
        Case("async", 4.0, 2),
        Case("async", 4.0, 4),
    ]
    with pytest.raises(ConfigError, match=says("straggler", "0.5")):
        make_cases(["sync"], [1], 0.5)


def test_rates_are_held_against_one_worker_of_the_same_update() -> None:
    train = Trainer(
        sync_1=100, sync_4=300, sync_4_slow=80, async_1=50, async_4=200, async_4_slow=150
    )
    cases = make_cases(["sync", "async"], [1, 4], 4.0)
    points = list(sweep(cases, 1000, 1, train))
    assert [(p.update, p.straggler, p.workers) for p in points] == [
        ("sync", 1, 1),
        ("sync", 1, 4),
        ("sync", 4, 4),
        ("async", 1, 1),
        ("async", 1, 4),
        ("async", 4, 4),
    ]
    assert [p.speed_up for p in points] == [1, 3, 0.8, 1, 4, 3]
    assert [p.efficiency for p in points] == [1, 0.75, 0.2, 1, 1, 0.75]
    assert [p.env_steps for p in points] == [1000, 4000, 4000, 1000, 4000, 4000]
    assert points[1].wall_s == pytest.approx(4000 / 300)
    assert (points[1].computing, points[1].communicating, points[1].waiting) == (0.5, 0.25, 0.125)
    assert (points[1].staleness, points[1].processor_s) == (1.5, 7.0)
    assert train.told[2] == {"update": "sync", "straggler": 4.0, "workers": 4, "steps": 4000}


def test_the_median_run_stands_for_all() -> None:
    rates = iter([30.0, 10.0, 20.0, 90.0, 40.0, 60.0, 50.0])
    cases = make_cases(["sync"], [1, 2], 1.0)
    one, two = sweep(cases, 10, 3, lambda told: fleet(next(rates), told["steps"]))
    assert (one.env_steps_per_s, two.env_steps_per_s) == (20.0, 60.0)
    rates = iter([1.0, 4.0, 3.0, 2.0])
    (even,) = sweep(cases[:1], 10, 4, lambda told: fleet(next(rates), told["steps"]))
    assert even.env_steps_per_s == 2.0


@pytest.mark.parametrize(
    ("steps", "reported"),
    [([3000, 1000, 2000], 20.0), ([None, 1000, 2000], 20.0), ([None] * 3, None)],
)
def test_the_median_time_to_a_return_stands_for_all(
    steps: list[int | None], reported: float | None
) -> None:
    """The rates of all runs are equal; None: a run that does not reach the return."""
    left = iter(steps)

    def train(_: dict[str, Any]) -> dict[str, Any]:
        needed = next(left)
        return {**fleet(100.0, 9000), "steps_to_return": needed}  # the workers went on to 9,000

    (point,) = sweep([Case("sync", 1.0, 1)], 10, 3, train)
    assert point.return_s == reported


def test_points_come_as_they_are_measured() -> None:
    train = Trainer(sync_1=1, sync_2=2)
    points = sweep(make_cases(["sync"], [1, 2], 1.0), 10, 1, train)
    next(points)
    assert len(train.told) == 1


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (None, "workers"),
        (fleet(None, 0), "2 workers step"),
        (fleet(0.0, 0), "step"),
    ],
)
def test_a_run_without_a_rate_is_refused(found: dict[str, Any] | None, words: str) -> None:
    with pytest.raises(ConfigError, match=says(*words.split())):
        next(sweep([Case("sync", 1.0, 2)], 10, 1, lambda _: found))


def test_bad_numbers_are_refused() -> None:
    for steps, repeats, words in ((0, 1, "steps_per_worker 0"), (1, 0, "repeats 0")):
        with pytest.raises(ConfigError, match=says(*words.split())):
            next(sweep([Case("sync", 1.0, 1)], steps, repeats, Trainer(sync_1=1)))


# --- table, CSV, picture ------------------------------------------------------------------------


def points() -> list[Point]:
    train = Trainer(
        sync_1=100, sync_4=300, sync_4_slow=80, async_1=50, async_4=200, async_4_slow=150
    )
    return list(sweep(make_cases(["sync", "async"], [1, 4], 4.0), 1000, 1, train))


def test_the_rows_of_the_table() -> None:
    found = points()
    assert [len(row(point)) for point in found] == [len(HEADER)] * 6
    assert row(found[1]).split() == [
        *("sync", "–", "4", "13.33", "300", "3.00", "75%", "50%", "25%", "12%", "1.50"),
        *("4,000", "–"),
    ]
    assert row(found[2]).split()[1] == "4×"
    (unknown,) = sweep([Case("sync", 1.0, 1)], 10, 1, lambda _: fleet(5.0, 10, staleness=None))
    assert row(unknown).split()[-3] == "–"


def test_the_file_holds_every_figure(tmp_path: Path) -> None:
    path = write_csv(points(), tmp_path / "new" / "speedup.csv")
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 6
    assert rows[2]["update"] == "sync"
    assert float(rows[2]["straggler"]) == 4.0
    assert float(rows[2]["speed_up"]) == 0.8
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=says("write")):
        write_csv(points(), tmp_path / "file" / "speedup.csv")


def test_all_curves_are_in_one_figure_beside_the_ideal(tmp_path: Path, drawn: list[Axes]) -> None:
    alike = [point for point in points() if point.straggler == 1]
    out = draw_speedup(alike, "a title", tmp_path / "new" / "speedup.png")
    assert out.read_bytes().startswith(b"\x89PNG")
    speed_up, efficiency = drawn
    lines = {
        str(line.get_label()): (line.get_xdata().tolist(), line.get_ydata().tolist())
        for line in speed_up.lines
    }
    counts = [1, 2, 4, 8, 16, 32]
    # One worker spends a quarter of its time on messages.
    model = [1 / (0.75 / count + 0.25) for count in counts]
    assert lines == {
        "ideal": (counts, counts),
        "sync, model": (counts, pytest.approx(model)),
        "async, model": (counts, pytest.approx(model)),
        "sync": ([1, 4], [1.0, 3.0]),
        "async": ([1, 4], [1.0, 4.0]),
    }
    ideal, *curves = efficiency.lines
    assert ideal.get_ydata().tolist() == [100.0] * 6
    assert [line.get_ydata().tolist() for line in curves] == [[100, 75], [100, 100]]
    assert len({line.get_color() for line in curves}) == 2
    legend = [text.get_text() for text in efficiency.get_legend().get_texts()]
    assert legend == list(lines)
    assert [tick.get_text() for tick in speed_up.get_xticklabels()] == list(map(str, counts))
    assert speed_up.get_title(loc="left") == "a title"


def test_the_time_to_a_return_is_a_panel_of_its_own(tmp_path: Path, drawn: list[Axes]) -> None:
    def train(told: dict[str, Any]) -> dict[str, Any]:
        found = fleet(100.0 * told["workers"], 2500)
        return {**found, "steps_to_return": 2000 if told["update"] == "async" else None}

    found = list(sweep(make_cases(["sync", "async"], [1, 4], 1.0), 1000, 1, train))
    assert [point.return_s for point in found] == [None, None, 20.0, 5.0]
    assert row(found[3]).split()[-2:] == ["2,000", "5.00"]
    draw_speedup(found, "a title", tmp_path / "speedup.png")
    _, times, _ = drawn
    (curve,) = times.lines
    assert (curve.get_xdata().tolist(), curve.get_ydata().tolist()) == ([1, 4], [20.0, 5.0])


@pytest.mark.parametrize(
    ("workers", "rounds", "expected"),
    [(1, False, 1.0), (4, False, 10 / (2 + 2)), (4, True, 10 / (2 + 8)), (32, True, 10 / 64.25)],
)
def test_the_model_divides_computing_and_not_messages(
    workers: int, rounds: bool, expected: float
) -> None:
    assert modelled(workers, 8.0, 2.0, rounds) == pytest.approx(expected)


def test_without_messages_the_model_is_the_ideal() -> None:
    assert modelled(32, 8.0, 0.0) == modelled(32, 8.0, 0.0, rounds=True) == 32.0


def test_a_straggler_is_a_second_bar_of_each_update_rule(tmp_path: Path, drawn: list[Axes]) -> None:
    out = draw_speedup(points(), "a title", tmp_path / "new" / "speedup.png")
    assert out.read_bytes().startswith(b"\x89PNG")
    (axes,) = drawn  # a panel for four workers, none for the single worker
    heights = {
        str(bars.get_label()): [bar.get_height() for bar in bars] for bars in axes.containers
    }
    assert heights == {"all workers alike": [3.0, 4.0], "straggler 4×": [0.8, 3.0]}
    # Three workers and a quarter of one.
    assert [line.get_ydata()[0] for line in axes.lines] == [4.0, 3.25]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["sync", "async"]
    assert axes.get_xlabel() == "4 workers"
    assert axes.get_title(loc="left") == "a title"


def test_what_cannot_be_drawn_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says(".png")):
        draw_speedup(points(), "", tmp_path / "speedup.doc")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=says("write")):
        draw_speedup(points(), "", tmp_path / "file" / "speedup.png")
