"""``qfleet serve --on ray``: the same application in the replicas of Ray Serve."""

from __future__ import annotations

import importlib.util
import json
import signal
import socket
from pathlib import Path

import pytest

from qfleet.cli.main import main
from support.clusters import needs_ray
from support.policy_servers import post, saved_policy
from support.processes import start_qfleet
from support.waiting import CLUSTER_S, finish, wait_until

GOOD = json.dumps({"observation": [0.5, 1.0, 0.0, 0.0]}).encode()
HAS_SERVE = importlib.util.find_spec("pydantic") and importlib.util.find_spec("fastapi")


@pytest.mark.slow
@needs_ray
@pytest.mark.skipif(not HAS_SERVE, reason="needs Ray Serve: pip install 'ray[serve]'")
def test_replicas_answer_until_a_signal(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    path = saved_policy(tmp_path / "policy")
    words = ["--on", "ray", "--workers", "2", "--runtime", "torch", "--port", str(port)]
    with (tmp_path / "errors").open("w") as errors:
        process = start_qfleet("serve", str(path), *words, stderr=errors)
    try:
        lines = tmp_path / "errors"
        wait_until(
            lambda: "serving at" in lines.read_text(), "serving", 3 * CLUSTER_S, process=process
        )
        status, headers, body = post(port, "/act", GOOD)
        assert status == 200
        assert headers["x-model-version"] == json.loads(body)["version"]
        assert post(port, "/act", b"{")[0] == 400
        assert post(port, "/models/other/act", GOOD)[0] == 404
        process.send_signal(signal.SIGTERM)
        finish(process, "the cluster was left", CLUSTER_S)
        assert process.returncode == 143
    finally:
        process.kill()


@pytest.mark.parametrize("words", ["--port 0", "--device cuda:0,cuda:1"])
def test_what_replicas_cannot_have_is_refused(
    words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = saved_policy(tmp_path / "policy")
    assert main(["serve", str(path), "--on", "ray", "--runtime", "torch", *words.split()]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert words.split()[0] in error


@needs_ray
@pytest.mark.skipif(bool(HAS_SERVE), reason="is installed")
@pytest.mark.slow
def test_without_ray_serve_one_line_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = saved_policy(tmp_path / "policy")
    assert main(["serve", str(path), "--on", "ray", "--runtime", "torch"]) == 2
    assert "ray[serve]" in capsys.readouterr().err
