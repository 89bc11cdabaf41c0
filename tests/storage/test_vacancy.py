"""Folders that a new run may have: those of starts that came to nothing, and no others."""

from __future__ import annotations

from pathlib import Path

import pytest

from qfleet.core.errors import ConfigError
from qfleet.storage.vacancy import check_vacant, has_no_progress, how_to_start_anew
from support.messages import says


@pytest.fixture
def failed(tmp_path: Path) -> Path:
    """What a run leaves that fails before its first step."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "seeds.json").write_text("{}")
    (tmp_path / "metrics.jsonl").write_text("")
    (tmp_path / "result.json").write_text('{"env_steps": 0}')
    (tmp_path / "tensorboard").mkdir()
    return tmp_path


def test_a_failed_start_is_vacant(failed: Path) -> None:
    check_vacant(failed)
    assert how_to_start_anew(failed).endswith(f"--config {failed}/config.json --run-dir {failed}")
    # So is one that was killed, and could not say how it ended.
    (failed / "result.json").unlink()
    check_vacant(failed)
    (failed / "checkpoints" / ".tmp-100-7").mkdir(parents=True)  # never committed
    check_vacant(failed)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("metrics.jsonl", '{"env_steps": 100}\n'),
        ("result.json", '{"env_steps": 50}'),
        ("result.json", "torn"),
        ("result.json", "[]"),
        ("best", None),
        (".old-best", None),
        ("agents", None),
        ("checkpoints/100", None),
        ("checkpoints/.old-100", None),
    ],
)
def test_whatever_a_run_came_to_is_kept(failed: Path, name: str, text: str | None) -> None:
    if text is None:
        (failed / name).mkdir(parents=True)
    else:
        (failed / name).write_text(text)
    assert not has_no_progress(failed)
    mend = "qfleet resume" if name.startswith("checkpoints") else "another folder"
    with pytest.raises(ConfigError, match=says("run", mend)):
        check_vacant(failed)
    assert "--run-dir" not in how_to_start_anew(failed)


def test_a_configuration_that_no_run_wrote_is_kept(tmp_path: Path) -> None:
    check_vacant(tmp_path)
    (tmp_path / "config.json").write_text('{"steps": 3}')
    with pytest.raises(ConfigError, match=says("another folder")):
        check_vacant(tmp_path)
