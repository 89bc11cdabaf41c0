from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.axes import Axes

from qfleet.core.errors import ConfigError, UnknownNameError
from qfleet.telemetry.figures import MUTED_COLOUR
from qfleet.telemetry.plots import learning_curve
from qfleet.telemetry.runs import RunData, read_run
from support.messages import says
from support.synthetic_runs import EVAL, curve, write_run


def run(path: Path, *values: float, every: int = 100, **config: object) -> RunData:
    return read_run(write_run(path, curve(*values, every=every), **config))


def test_a_single_run_shows_training_and_evaluation(tmp_path: Path, drawn: list[Axes]) -> None:
    out = tmp_path / "plots" / "curve.png"
    assert learning_curve({"x": [run(tmp_path / "a", 1, 2, 30, every=500)]}, EVAL, out) == out
    assert out.read_bytes().startswith(b"\x89PNG")
    (axes,) = drawn
    training, evaluation = axes.lines
    assert list(training.get_ydata()) == [0.5, 1, 15]
    assert list(evaluation.get_ydata()) == [1, 2, 30]
    assert list(evaluation.get_xdata()) == [500, 1000, 1500]
    assert training.get_linewidth() < evaluation.get_linewidth()
    assert axes.get_title("left") == "CartPole-v1 · dqn"
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [
        "while training",
        "evaluation",
    ]
    assert "1k" in [label.get_text() for label in axes.get_xticklabels()]


def test_seeds_become_an_iqm_with_a_band(tmp_path: Path, drawn: list[Axes]) -> None:
    seeds = [run(tmp_path / f"s{i}", *values) for i, values in enumerate([(0, 10), (20, 50)])]
    learning_curve({"x": seeds}, EVAL, tmp_path / "c.png")
    (axes,) = drawn
    (line,) = axes.lines
    assert list(line.get_ydata()) == [10, 30]
    (band,) = axes.collections
    extents = band.get_paths()[0].get_extents()
    assert (extents.y0, extents.y1) == (0, 50)
    assert axes.get_title("left") == "CartPole-v1 · dqn · IQM of 2 runs"
    assert axes.get_legend() is None


def test_groups_are_overlaid_with_a_legend(tmp_path: Path, drawn: list[Axes]) -> None:
    groups = {
        "CartPole-v1 · dqn": [run(tmp_path / "a", 1, 2), run(tmp_path / "b", 2, 3)],
        "CartPole-v1 · rainbow": [run(tmp_path / "c", 5, 6, algo="rainbow")],
    }
    learning_curve(groups, EVAL, tmp_path / "c.svg")
    (axes,) = drawn
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [
        "dqn (2 runs)",
        "rainbow",
    ]
    assert len({line.get_color() for line in axes.lines}) == 2
    assert axes.get_title("left") == "CartPole-v1"


def test_a_crowd_has_a_panel_each_with_the_first_group_in_grey(
    tmp_path: Path, drawn: list[Axes]
) -> None:
    groups = {
        f"CartPole-v1 · {name}": [
            run(tmp_path / f"{name}{seed}", 1 + seed, number, algo=name) for seed in range(2)
        ]
        for number, name in enumerate(("dqn", "c51", "iqn", "pqn", "a3c", "qr-dqn", "rainbow"))
    }
    learning_curve(groups, EVAL, tmp_path / "c.png")
    assert [axes.get_title("left") for axes in drawn] == [
        *("dqn", "c51", "iqn", "pqn", "a3c", "qr-dqn", "rainbow")
    ]
    grey, shown = drawn[6].lines
    assert grey.get_color() == MUTED_COLOUR != shown.get_color()
    assert list(grey.get_ydata()) == [1.5, 0]
    assert list(shown.get_ydata()) == [1.5, 6]
    assert len(drawn[6].collections) == 1  # the band of the group, not of the grey line
    assert len({axes.get_ylim() for axes in drawn}) == 1
    figure = drawn[0].figure
    assert figure.get_suptitle() == "CartPole-v1 · grey: dqn"
    assert (figure.get_supxlabel(), figure.get_supylabel()) == ("env steps", "evaluation return")


def test_seeds_without_a_common_range_are_drawn_one_by_one(
    tmp_path: Path, drawn: list[Axes]
) -> None:
    early, late = run(tmp_path / "a", 1, 2, every=10), run(tmp_path / "b", 7, every=900)
    learning_curve({"x": [early, late]}, EVAL, tmp_path / "c.png")
    assert [list(line.get_ydata()) for line in drawn[0].lines] == [[1, 2], [7]]


def test_another_metric_of_a_single_run(tmp_path: Path, drawn: list[Axes]) -> None:
    learning_curve({"x": [run(tmp_path / "a", 1, 2)]}, "train/loss", tmp_path / "c.png")
    (axes,) = drawn
    assert [list(line.get_ydata()) for line in axes.lines] == [[0.5, 0.5]]
    assert axes.get_ylabel() == "loss"


def test_what_cannot_be_drawn_is_refused(tmp_path: Path) -> None:
    groups = {"x": [run(tmp_path / "a", 1, 2)]}
    with pytest.raises(UnknownNameError, match=says("train/loss")):
        learning_curve(groups, "train/los", tmp_path / "c.png")
    empty = read_run(write_run(tmp_path / "empty"))
    with pytest.raises(ConfigError, match=says("logged")):
        learning_curve({"x": [empty]}, EVAL, tmp_path / "c.png")
    with pytest.raises(ConfigError, match=r"c\.doc.*\.png"):
        learning_curve(groups, EVAL, tmp_path / "c.doc")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=says("plot")):
        learning_curve(groups, EVAL, tmp_path / "file" / "c.png")
    assert not (tmp_path / "c.png").exists()
