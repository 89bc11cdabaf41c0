"""What ``qfleet doctor`` finds out about the machine."""

from __future__ import annotations

import py_compile
from pathlib import Path
from types import ModuleType

from qfleet.training.doctor import describe_compiled_files


def test_missing_compiled_files_are_named_with_the_command_that_makes_them(tmp_path: Path) -> None:
    source = tmp_path / "slow.py"
    source.write_text("")
    slow = ModuleType("slow")
    slow.__file__ = str(source)
    assert describe_compiled_files(slow).startswith("no: every start compiles slow again")
    assert f"compileall -q {tmp_path}" in describe_compiled_files(slow)
    py_compile.compile(str(source))
    assert describe_compiled_files(slow) == "yes"
