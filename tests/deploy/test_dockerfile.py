"""The Dockerfile's install and start lines work in a fresh virtual environment."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import venv
from pathlib import Path

import pytest
import torch

from support.policy_servers import JSON, post, saved_policy
from support.waiting import PHASE_S, deadline, finish, wait_until

ROOT = Path(__file__).parents[2]
INSTALL_S = 1800.0
GOOD = json.dumps({"observation": [0.5, 1.0, 0.0, 0.0]}).encode()
TOKEN = {**JSON, "authorization": "Bearer secret"}


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions and their arguments, without comments."""
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    found = [line.split(" ", 1) for line in lines if line and not line.startswith("#")]
    return [(name, rest) for name, rest in found]


def of(name: str) -> list[str]:
    return [rest for found, rest in instructions() if found == name]


def test_what_is_copied_is_not_ignored() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert ignored[0] == "*"
    for words in of("COPY"):
        for source in words.split()[:-1]:
            assert (ROOT / source).exists()
            assert f"!{source}" in ignored


def test_the_server_does_not_run_as_root() -> None:
    names = [name for name, _ in instructions()]
    assert names.index("USER") < names.index("ENTRYPOINT")
    assert of("USER") != ["root"]


@pytest.mark.slow
@pytest.mark.timeout(2 * INSTALL_S)
def test_the_install_and_start_lines_work(tmp_path: Path) -> None:
    folder = tmp_path / "venv"
    venv.create(folder, with_pip=True)
    environ = {**os.environ, "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    environ.pop("PYTHONPATH", None)
    # As with --build-arg: the torch that these tests have, from wherever it came.
    environ["TORCH"] = f"torch=={torch.__version__.partition('+')[0]}"
    source = tmp_path / "src"
    source.mkdir()
    for words in of("COPY"):
        *names, _ = words.split()
        for name in names:
            subprocess.run(["cp", "-r", str(ROOT / name), str(source)], check=True)
    installs = [line for line in of("RUN") if line.startswith("pip install")]
    assert len(installs) == 2
    for line in installs:
        command = ["sh", "-c", f"python -m {line}"]
        done = subprocess.run(
            command, cwd=source, env=environ, capture_output=True, text=True, timeout=INSTALL_S,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]

    models = tmp_path / "models"
    (model,) = json.loads(of("CMD")[0])
    saved_policy(models / model)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    start = [*json.loads(of("ENTRYPOINT")[0]), model, "--port", str(port)]
    environ.pop("QFLEET_TOKEN", None)
    refused = subprocess.run(
        start, cwd=models, env=environ, capture_output=True, text=True, timeout=deadline(PHASE_S),
        check=False,
    )  # fmt: skip
    assert refused.returncode == 2
    assert "QFLEET_TOKEN" in refused.stderr
    process = subprocess.Popen(
        start, cwd=models, env={**environ, "QFLEET_TOKEN": "secret"},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        (line,) = of("HEALTHCHECK")
        probe = json.loads(re.sub(r"^.*?CMD ", "", line).replace("8000", str(port)))

        def is_ready() -> bool:
            done = subprocess.run(probe, env=environ, capture_output=True, check=False)
            return done.returncode == 0

        wait_until(is_ready, "the health check passed", 3 * PHASE_S, process=process)
        assert post(port, "/act", GOOD, TOKEN)[0] == 200
        assert post(port, "/act", GOOD)[0] == 401
        process.terminate()
        finish(process, "the server stopped")
        assert process.returncode == 143
    finally:
        process.kill()
