"""On Windows: one line that names WSL, and exit code 2."""

from __future__ import annotations

import sys

import pytest

import qfleet
from qfleet.cli.main import main
from qfleet.core.errors import UserError


@pytest.mark.parametrize("verb", ["train", "runs", "doctor"])
def test_windows_gets_one_line(
    verb: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    assert main([verb, "CartPole-v1"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "Windows" in err
    assert "WSL" in err
    with pytest.raises(UserError, match="WSL"):
        _ = qfleet.train
    assert main(["--version"]) == 0
