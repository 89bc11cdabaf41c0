"""docs/first-steps.md, followed literally in an empty folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.waiting import deadline

PAGE = Path(__file__).parents[1] / "docs" / "first-steps.md"


@pytest.mark.slow
def test_first_steps_can_be_followed(tmp_path: Path) -> None:
    blocks = re.findall(r"^```(\w+)\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert [kind for kind, _ in blocks] == ["python", "sh", "sh", "python"]
    printed = ""
    for kind, text in blocks:
        if kind == "python":
            name = text.splitlines()[0].removeprefix("# ")
            (tmp_path / name).write_text(text)
            lines = [f"python {name}"] if name == "use.py" else []
        else:
            lines = text.splitlines()
        for line in lines:
            printed += _run(line, tmp_path)
    assert "network mlp for 1 float32 observations" in printed
    assert "return 3.0 ± 0.0 over 20 episodes" in printed
    assert printed.splitlines()[-3:] == ["6.0", "1", "200"]
    assert (tmp_path / "corridor.gif").stat().st_size > 1000
    assert (tmp_path / "runs" / "first" / "plots").is_dir()


def _run(line: str, folder: Path) -> str:
    program = [sys.executable, *(["-m", "qfleet.cli.main"] if line.startswith("qfleet") else [])]
    words = re.findall(r"\S+", line)[1:]
    done = subprocess.run(
        [*program, *words],
        cwd=folder,
        env={**os.environ, "COLUMNS": "100"},
        capture_output=True,
        text=True,
        timeout=deadline(300),
        check=False,
    )
    assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
    return done.stdout if line.startswith("python") else done.stdout + done.stderr
