"""Random command lines (tools/random_commands.py) end in success or in one line."""

from __future__ import annotations

import importlib.util
import itertools
import shlex
import shutil
from pathlib import Path
from types import ModuleType

import pytest

from qfleet.cli.main import main
from qfleet.config.config import FIELDS
from support.processes import is_alive
from support.waiting import deadline, wait_until

TOOL = Path(__file__).parents[2] / "tools" / "random_commands.py"
SAMPLE = 12
CLUSTER = ("auto", "actors", "parameter-server")


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("random_commands", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def template(tool: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("random") / "template"
    tool.make_folder(folder, lambda line, _: main(line))
    return folder


def is_quick(line: list[str]) -> bool:
    """Return whether a line measures nothing, starts no cluster and suits this process."""
    pairs = itertools.pairwise(line)
    return (
        line[:1] in (["train"], ["evaluate"], ["resume"], ["plot"], ["runs"], ["scale"])
        and "--threads" not in line
        and not any(name == "--engine" and value in CLUSTER for name, value in pairs)
    )


def test_a_sample_of_lines_ends_in_success_or_one_line(
    tool: ModuleType,
    template: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    lines = [line for line in tool.draw_lines(60, seed=3) if is_quick(line)][:SAMPLE]
    assert len(lines) == SAMPLE
    for number, line in enumerate(lines):
        folder = tmp_path / str(number)
        shutil.copytree(template, folder)
        monkeypatch.chdir(folder)
        try:
            code = main(line)
        except SystemExit as exit_:
            code = int(exit_.code or 0)
        out, err = capfd.readouterr()
        assert tool.why_bad(code, out, err) is None, (line, err)


def test_lines_depend_on_the_seed_only_and_cover_every_field(tool: ModuleType) -> None:
    lines = tool.draw_lines(200, seed=0)
    assert lines == tool.draw_lines(200, seed=0) != tool.draw_lines(200, seed=1)
    assert {line[0] for line in lines if line} >= {"train", "evaluate", "resume", "plot", "lab"}
    options = {"--" + name.replace("_", "-") for name in FIELDS}
    assert options <= {word for line in tool.draw_lines(3000, seed=0) for word in line}


@pytest.mark.parametrize(
    ("code", "out", "err", "bad"),
    [
        (0, "fine", "", False),
        (2, "", "preset x\nqfleet: steps must be ≥ 1\n", False),
        (2, "", "", True),
        (1, "", "qfleet: an error\nof two lines\n", True),
        (1, "", 'Traceback (most recent call last):\n  File "x"\nKeyError\n', True),
        (0, "", "Traceback (most recent call last):\nin a thread\n", True),
        (-11, "", "qfleet: x", True),
    ],
)
def test_a_traceback_a_long_error_and_a_signal_are_failures(
    tool: ModuleType, code: int, out: str, err: str, bad: bool
) -> None:
    assert (tool.why_bad(code, out, err) is not None) == bad


@pytest.mark.slow
def test_a_hang_is_killed_with_its_children(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = tmp_path / "child"
    # A shell, not Python: its child must have started before the time limit, which always passes.
    line = f"sleep 600 & echo $! > {shlex.quote(str(child))}; wait"
    monkeypatch.setattr(tool, "command", lambda _: ["sh", "-c", line])
    (tmp_path / "template").mkdir()
    ended = tool.run_line([], tmp_path / "template", deadline(3.0))
    assert "did not end" in ended.bad
    pid = int(child.read_text())
    wait_until(lambda: not is_alive(pid), "the child to end")
