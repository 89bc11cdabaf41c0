"""docs/offline.md, followed literally in an empty folder, with a server for its bucket."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from qfleet.storage.published import CACHE_DIR
from support.s3 import BUCKET, s3_server
from support.waiting import deadline

PAGE = Path(__file__).parents[1] / "docs" / "offline.md"


@pytest.mark.slow
def test_the_tutorial_can_be_followed(tmp_path: Path) -> None:
    blocks = re.findall(r"^```sh\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    assert len(lines) == 8
    assert f"s3://{BUCKET}/" in lines[1]
    with s3_server() as server:
        own = {CACHE_DIR: str(tmp_path / "cache"), "COLUMNS": "100", "OMP_NUM_THREADS": "1"}
        printed = [run(line, tmp_path, {**server.environment(), **own}) for line in lines]
        assert server.puts("runs/cql/")
        assert server.puts("policies/cartpole/")
    compared = printed[5]
    assert "rank" in compared
    assert "fqe_interval" in compared
    last = (tmp_path / "runs" / "imitation" / "metrics.jsonl").read_text()
    assert last.count("data/agreement") == 4


def run(line: str, folder: Path, environment: dict[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "qfleet.cli.main", *line.split()[1:]],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=deadline(300),
        check=False,
    )
    assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr
