from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex

from qfleet.core.errors import ConfigError
from qfleet.telemetry.fleet_plots import TAIL, draw_fleet
from qfleet.telemetry.timeline import KIND_COLOURS
from qfleet.telemetry.timers import KINDS
from support.fleets import SLOW, fleet, server, worker
from support.messages import says


def test_shares_are_a_stacked_bar_per_worker(tmp_path: Path, drawn: list[Axes]) -> None:
    made = draw_fleet(fleet(), tmp_path / "plots")
    assert made == [tmp_path / "plots" / "shares.png", tmp_path / "plots" / "staleness.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in made)
    axes, _ = drawn
    bars = [[(bar.get_x(), bar.get_width()) for bar in kind] for kind in axes.containers]
    assert bars == [
        [pytest.approx((0, 80)), pytest.approx((0, 40)), pytest.approx((0, 40))],
        [pytest.approx((80, 10)), pytest.approx((40, 10)), pytest.approx((40, 10))],
        [pytest.approx((90, 0)), pytest.approx((50, 50)), pytest.approx((50, 50))],
    ]
    colours = [to_hex(kind[0].get_facecolor()).upper() for kind in axes.containers]
    assert colours == [KIND_COLOURS[kind] for kind in KINDS]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == list(KINDS)
    assert axes.get_xlim() == pytest.approx((0, 100))
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == ["worker 0", "worker 1", "worker 2"]


def test_staleness_is_a_histogram_with_its_mean(tmp_path: Path, drawn: list[Axes]) -> None:
    draw_fleet(fleet(servers=(server(0, {0: 3, 2: 1}),)), tmp_path)
    _, axes = drawn
    (bars,) = axes.containers
    heights = {round(bar.get_x() + bar.get_width() / 2): bar.get_height() for bar in bars}
    assert heights == {0: 75.0, 2: 25.0}
    assert axes.get_legend().get_texts()[0].get_text() == "mean 0.50"
    assert "95 % up to 2" in axes.get_title(loc="left")


def test_a_long_tail_goes_into_the_last_bar(tmp_path: Path, drawn: list[Axes]) -> None:
    draw_fleet(fleet(servers=(server(0, {0: 2, TAIL: 1, 10_000: 1}),)), tmp_path)
    _, axes = drawn
    (bars,) = axes.containers
    heights = {round(bar.get_x() + bar.get_width() / 2): bar.get_height() for bar in bars}
    assert heights == {0: 50.0, TAIL: 50.0}
    assert "or older" in axes.get_xlabel()


def test_many_updates_between_two_blocks_make_wide_bars(tmp_path: Path, drawn: list[Axes]) -> None:
    ages = {0: 1, 64: 2, 65: 1, 66: 2, 200: 1, 999: 1}
    of_blocks = worker(0, 100, SLOW, staleness=ages)
    draw_fleet(fleet(workers=(of_blocks,), servers=(), update=None), tmp_path)
    _, axes = drawn
    (bars,) = axes.containers
    heights = {bar.get_x() + bar.get_width() / 2: bar.get_height() for bar in bars}
    # 65 is the median, so that a bar is four updates wide; 160 is the last.
    assert heights == pytest.approx({1.5: 12.5, 65.5: 62.5, 161.5: 25.0})
    assert axes.get_xlabel() == "age of a block's weights, in updates (160: 160 or older)"
    assert axes.get_ylabel() == "% of blocks"


def test_actors_and_their_learner_are_named(tmp_path: Path, drawn: list[Axes]) -> None:
    shares = dict.fromkeys((*KINDS, "other"), 0.25)
    draw_fleet(fleet(update=None, learner=shares), tmp_path)
    axes, _ = drawn
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == ["actor 0", "actor 1", "actor 2", "learner"]
    assert axes.get_title(loc="left") == "actors: where the time went"


def test_what_there_is_nothing_of_is_not_drawn(tmp_path: Path) -> None:
    assert draw_fleet(fleet(servers=()), tmp_path) == [tmp_path / "shares.png"]
    assert draw_fleet(fleet(workers=(), servers=()), tmp_path) == []
    one = fleet(workers=(worker(0, 100, SLOW),), servers=(server(0, {0: 0}),))
    assert draw_fleet(one, tmp_path) == [tmp_path / "shares.png"]


def test_a_folder_that_cannot_be_made_is_a_typed_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=says("shares.png")):
        draw_fleet(fleet(), tmp_path / "file" / "plots")
