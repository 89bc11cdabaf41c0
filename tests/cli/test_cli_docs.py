"""``qfleet docs``: opens what was built, and says how to build it."""

from __future__ import annotations

import webbrowser
from pathlib import Path

import pytest

from qfleet.cli import docs
from qfleet.cli.main import main


def place(monkeypatch: pytest.MonkeyPatch, folder: Path) -> list[str]:
    """Pretend that qfleet's sources are in this folder; return what will be opened."""
    opened = list[str]()
    monkeypatch.setattr(docs, "__file__", str(folder / "qfleet" / "cli" / "docs.py"))
    monkeypatch.setattr(webbrowser, "open", opened.append)
    return opened


def test_the_built_documentation_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened, site = place(monkeypatch, tmp_path), tmp_path / "site"
    site.mkdir()
    for name in ("index.html", "serve.html"):
        (site / name).write_text("")
    assert main(["docs"]) == main(["docs", "serve"]) == 0
    assert opened == [(site / name).as_uri() for name in ("index.html", "serve.html")]
    assert str(site / "serve.html") in capsys.readouterr().out
    assert main(["docs", "serv"]) == 2
    assert "serve" in capsys.readouterr().err


@pytest.mark.parametrize(("has_sources", "advice"), [(True, "make docs"), (False, "installed")])
def test_documentation_that_is_not_there_is_explained(
    has_sources: bool,
    advice: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    opened = place(monkeypatch, tmp_path)
    if has_sources:
        (tmp_path / "mkdocs.yml").write_text("")
    assert main(["docs"]) == 2
    assert advice in capsys.readouterr().err
    assert not opened
