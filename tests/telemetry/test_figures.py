"""Figures are saved completely or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.figure import Figure

from qfleet.core.errors import ConfigError
from qfleet.telemetry.figures import saved_figure
from support.messages import says


def test_a_figure_is_saved_after_the_block_under_its_name_only(tmp_path: Path) -> None:
    out = tmp_path / "new" / "a.png"
    with saved_figure(out, 2.0, 1.0) as figure:
        figure.add_subplot()
        assert not out.exists()
    assert out.read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in out.parent.iterdir()] == ["a.png"]


def test_an_older_image_stays_if_drawing_or_saving_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "a.png"
    out.write_bytes(b"before")
    with pytest.raises(ZeroDivisionError), saved_figure(out, 2.0, 1.0):
        raise ZeroDivisionError

    def full(_: Figure, path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Figure, "savefig", full)
    with (
        pytest.raises(ConfigError, match=says("write", "a.png", "No space left")),
        saved_figure(out, 2.0, 1.0),
    ):
        pass
    assert out.read_bytes() == b"before"


def test_an_unknown_format_is_refused_before_drawing(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match=says("a.doc", ".png")),
        saved_figure(tmp_path / "a.doc", 2.0, 1.0),
    ):
        raise AssertionError("drawn")
