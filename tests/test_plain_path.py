"""The way through the code that a reader takes first: short, in few files, and documented."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import qfleet
from qfleet.agent.learner import Learner
from qfleet.cli.main import main
from qfleet.engines import serial
from qfleet.engines.parts import Setup
from qfleet.telemetry.faults import FaultLog
from support.configs import tiny_config

PACKAGE = Path(qfleet.__file__).parent
MOST_FRAMES, MOST_FILES_PER_TURN = 8, 20
MOST_FILES_TO_READ, MOST_LINES_TO_READ = 14, 3000


def test_the_gradient_step_is_few_frames_below_main(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the reading order of docs/architecture.md contains the file of every frame."""
    step, stacks = Learner.step, list[list[inspect.FrameInfo]]()

    def noted(self: Learner, *arguments: Any) -> None:
        stacks.append(inspect.stack()[1:])
        step(self, *arguments)

    monkeypatch.setattr(Learner, "step", noted)
    argv = "train CartPole-v1 --preset none --engine serial --steps 120 --learning-starts 80"
    main([*argv.split(), "--eval-freq", "0", "--run-dir", str(tmp_path / "run"), "--quiet"])
    ours = [frame for frame in stacks[0] if Path(frame.filename).is_relative_to(PACKAGE)]
    frames = [f"{Path(frame.filename).name}:{frame.function}" for frame in reversed(ours)]
    frames.append("learner.py:step")
    assert frames[0] == "main.py:main"
    assert len(frames) <= MOST_FRAMES, frames
    files = {str(Path(frame.filename).relative_to(PACKAGE.parent)) for frame in ours}
    assert files <= set(reading_order())


def reading_order() -> list[str]:
    page = (PACKAGE.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = page.split("## Reading order", 1)[1].split("\n## ", 1)[0]
    return re.findall(r"^\d+\. `(qfleet/[\w/]+\.py)`", section, flags=re.MULTILINE)


def test_the_reading_order_is_short() -> None:
    files = reading_order()
    lines = sum(len((PACKAGE.parent / name).read_text().splitlines()) for name in files)
    assert len(files) == len(set(files)) <= MOST_FILES_TO_READ
    assert files
    assert lines <= MOST_LINES_TO_READ


def test_a_turn_of_collecting_and_learning_touches_few_files() -> None:
    config = tiny_config(engine="serial", steps=400, learning_starts=100)
    parts = serial.build(Setup(config, FaultLog()))
    files: set[str] = set()

    def note(frame: FrameType, *_: object) -> None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(PACKAGE):
            files.add(str(path.relative_to(PACKAGE)))

    try:
        serial.run(parts, lambda: parts.clock.env_steps < 200)
        updates, until = parts.clock.updates, parts.clock.env_steps + config.train_freq
        sys.setprofile(note)
        serial.run(parts, lambda: parts.clock.env_steps < until)
        sys.setprofile(None)
        assert parts.clock.updates > updates
    finally:
        sys.setprofile(None)
        parts.close()
    assert len(files) <= MOST_FILES_PER_TURN, sorted(files)
