"""A network that the operating system does not let one rank hold, but four."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from support.messages import holds
from support.waiting import deadline

CAP_BYTES = 600 * 2**20
"""Of each process. Measured: four ranks need between 420 and 480 MiB, one more than 700 MiB."""
STACK_BYTES = 2 * 2**20
"""Of each thread, which counts as a whole; ranks have dozens of threads."""
LAYERS = [1500] * 11
"""23 million weights: 450 MB of weights, gradient, target weights and moments."""
UPDATES = 3
WORDS = (
    "train CartPole-v1 --preset none --batch-size 4 --envs 1 --steps 40 --learning-starts 28 "
    "--train-freq 4 --gradient-steps 1 --buffer-size 100 --eval-freq 0 --checkpoint-freq 1000000 "
    "--no-tensorboard --threads 1 --device cpu --run-dir run --engine all-reduce"
)


def limit() -> None:
    """Limit this process; those that it starts inherit the limits."""
    resource.setrlimit(resource.RLIMIT_STACK, (STACK_BYTES, STACK_BYTES))
    resource.setrlimit(resource.RLIMIT_DATA, (CAP_BYTES, CAP_BYTES))


def train(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    layers = ["--net-arch", *map(str, LAYERS)]
    return subprocess.run(
        [sys.executable, "-m", "qfleet", *WORDS.split(), *layers, *words],
        cwd=folder,
        # The C library returns freed layers at once, so that holes between them do not count.
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": str(2**20)},
        preexec_fn=limit,
        capture_output=True,
        text=True,
        timeout=deadline(240.0),
        check=False,
    )


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts mapped memory on Linux")
def test_four_ranks_train_a_network_that_one_cannot_hold(tmp_path: Path) -> None:
    one = train(tmp_path, "--workers", "1")
    assert one.returncode == 1
    assert holds(one.stderr, "not enough memory")
    assert not (tmp_path / "run" / "result.json").exists()

    four = train(tmp_path, "--workers", "4", "--tensor-parallel", "2", "--pipeline-parallel", "2")
    assert four.returncode == 0, four.stderr
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["updates"] == UPDATES
