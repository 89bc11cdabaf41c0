"""A command that torchrun has started again continues its own run, and no other."""

from __future__ import annotations

from pathlib import Path

import pytest

from qfleet.engines.auto import settle
from qfleet.training.restarts import stored_engine, was_lost
from support.configs import tiny_config

CONFIG = tiny_config(engine="all-reduce", workers=2)


def store(folder: Path, **changes: object) -> Path:
    (folder / "config.json").write_text(settle(CONFIG)[0].replace(**changes).to_json())
    return folder


def test_a_restarted_command_knows_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store(tmp_path)
    assert not was_lost(tmp_path, CONFIG)  # the first start
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert was_lost(tmp_path, CONFIG)
    assert was_lost(tmp_path, CONFIG.replace(workers=4))  # with fewer machines
    assert not was_lost(tmp_path, CONFIG.replace(learning_rate=0.5))
    assert not was_lost(tmp_path / "other", CONFIG)
    assert not was_lost(store(tmp_path, engine="serial"), CONFIG)
    assert not was_lost(tmp_path, CONFIG.replace(engine="serial"))


def test_the_engine_of_a_run_that_is_elsewhere_is_that_of_ranks(tmp_path: Path) -> None:
    assert stored_engine("unknown", tmp_path) == "all-reduce"
    store(tmp_path, engine="serial")
    (tmp_path / "metrics.jsonl").touch()
    assert stored_engine(tmp_path, tmp_path) == "serial"
