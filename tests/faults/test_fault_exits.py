"""Faults 46 and 47 of docs/faults.md: environments that exit, hang in close, or leave threads.

On real processes: an in-process test would end with them.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from support.faulty_envs import result_of, rude
from support.messages import holds
from support.processes import python, start_qfleet
from support.waiting import PHASE_S, deadline, finish, wait_until

OPTIONS = (
    "--preset none --engine serial --net-arch 16 --steps 300 --learning-starts 40 --eval-freq 0 "
    "--n-eval-episodes 1 --no-tensorboard --buffer-size 1000 --run-dir run"
)


def start(folder: Path, how: str, where: str, vectorize: str = "sync") -> subprocess.Popen[Any]:
    asked = rude(how, where)
    words = ["train", asked["env"], "--env-kwargs", asked["env_kwargs"], *OPTIONS.split()]
    return start_qfleet(*words, "--vectorize", vectorize, cwd=folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "where", "faults"),
    [
        ("exit", "step", {"env_crash": 3}),
        ("interrupt", "step", {"env_crash": 3}),
        ("hang", "close", {"env_close": 2}),
        ("thread", "step", {}),
    ],
)
def test_the_program_ends_as_it_should(
    how: str, where: str, faults: dict[str, int], tmp_path: Path
) -> None:
    process = start(tmp_path, how, where)
    out, err = finish(process, "the end of the run")
    assert process.returncode == 0, err
    assert "Traceback" not in err
    assert "stopped by steps" in out
    assert ("atexit functions were called" in out) == (how == "thread")
    result = result_of(tmp_path / "run")
    assert result["faults"] == faults
    assert (result["stopped_by"], result["env_steps"]) == ("steps", 300)
    for kind in faults:
        assert holds(err, kind, "env 0", "support.faulty_envs:RudeEnv")


@pytest.mark.slow
@pytest.mark.parametrize(("how", "vectorize"), [("exit", "async"), ("interrupt", "sync")])
def test_a_constructor_that_exits_is_one_line(how: str, vectorize: str, tmp_path: Path) -> None:
    process = start(tmp_path, how, "constructor", vectorize)
    out, err = finish(process, "the refusal")
    assert (process.returncode, out) == (1, "")
    assert len(err.splitlines()) == 1
    assert holds(err, "support.faulty_envs:RudeEnv", "failed to start")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_second_ctrl_c_ends_the_program_in_an_env_that_hangs(tmp_path: Path) -> None:
    process = start(tmp_path, "hang", "step")
    try:
        wait_until((tmp_path / "hanging").exists, "the env hangs", process=process)
        # A third one in case that the first two were handled at once.
        for wait_s in (2.0, PHASE_S, PHASE_S):
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(wait_s)
        out, err = finish(process, "the end after Ctrl-C")
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130, err
    assert (out, err.splitlines()[-1]) == ("", "qfleet: interrupted")
    assert "Traceback" not in err


@pytest.mark.slow
def test_a_module_that_exits_when_it_is_imported_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import sys; sys.exit(main() if 0 else 3)")
    process = start_qfleet("train", "script:Env", *OPTIONS.split(), cwd=tmp_path)
    _, err = finish(process, "the refusal")
    assert process.returncode == 2
    assert holds(err, "script:Env", "SystemExit", "3")
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("end", "code", "words"),
    [("return 3", 3, ()), ("raise ValueError('broken')", 1, ("ValueError: broken",))],
)
def test_a_program_on_a_gpu_ends_at_once_after_what_is_registered(
    end: str, code: int, words: tuple[str, ...]
) -> None:
    """Python's own end would wait for the object below; an error is shown as always."""
    program = (
        "import atexit, sys, types\n"
        "from qfleet.cli.program import run_to_end\n"
        "class Slow:\n"
        "    def __del__(self):\n"
        "        print('waited')\n"
        "sys.modules['torch'] = types.SimpleNamespace(\n"
        "    cuda=types.SimpleNamespace(is_initialized=lambda: True))\n"
        "compiler = types.SimpleNamespace(shutdown_compile_workers=lambda: print('shut down'))\n"
        "sys.modules['torch._inductor.async_compile'] = compiler\n"
        "atexit.register(compiler.shutdown_compile_workers)\n"
        "atexit.register(print, 'registered')\n"
        "slow = Slow()\n"
        f"def main():\n    {end}\n"
        "sys.exit(run_to_end(main))\n"
    )
    ended = subprocess.run(
        python("-c", program), capture_output=True, text=True, timeout=deadline(PHASE_S),
        check=False,
    )  # fmt: skip
    assert ended.returncode == code, ended.stderr
    assert "registered" in ended.stdout
    assert holds(ended.stderr, *words) if words else ended.stderr == ""
    if code == 3:
        assert ended.stdout.split() == ["registered"]
