"""``qfleet lab compare``: what it takes, and what it leaves alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import qfleet
from qfleet.cli.main import main
from qfleet.data.manifest import Dataset
from support.configs import tiny_fields


def test_a_run_is_compared_by_name_and_its_recording_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    fields = tiny_fields(steps=200, learning_starts=50, record="data")
    qfleet.train("CartPole-v1", name="recorded", **fields)
    before = Dataset("data").manifest.sha256
    words = ["lab", "compare", "recorded", "double=true,learning_rate=0.1", "--json"]
    assert main([*words, "--steps", "100"]) == 0
    assert json.loads(capsys.readouterr().out)["first_difference"] is not None
    assert Dataset("data").manifest.sha256 == before


def test_code_of_a_file_needs_consent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "other.json"
    file.write_text(json.dumps({"env": "CartPole-v1", "network": "nosuch:Net"}))
    assert main(["lab", "compare", str(file), "gamma=0.5"]) != 0
    assert "trust" in capsys.readouterr().err
