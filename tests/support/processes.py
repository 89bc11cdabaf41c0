"""Child processes of tests: started with default signal handling, and looked up in /proc."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

needs_proc = pytest.mark.skipif(
    not Path("/proc/self/stat").exists(), reason="lists processes by /proc"
)


def restore_default_signals() -> None:
    """For ``preexec_fn``: a background job inherits an ignored SIGINT, and so would its children.

    Python installs its handler for Ctrl-C only where SIGINT is not ignored at the start.
    """
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def start(command: list[str], **options: Any) -> subprocess.Popen[Any]:
    """Start a command that hears signals; its output goes to pipes, as text, unless told else."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, preexec_fn=restore_default_signals, **pipes | options)


def python(*words: str) -> list[str]:
    """The command of an interpreter that prints its stacks on SIGABRT."""
    return [sys.executable, "-X", "faulthandler", *words]


def start_qfleet(*words: str, **options: Any) -> subprocess.Popen[Any]:
    """Start the program ``qfleet`` with these arguments."""
    return start(python("-m", "qfleet.cli.main", *words), **options)


def count_lines(path: Path) -> int:
    """The number of whole lines in a file; 0 as long as there is none."""
    return path.read_text().count("\n") if path.exists() else 0


def is_alive(pid: int) -> bool:
    """Return whether a process runs; a zombie has ended and waits for its parent to look."""
    return state_of(pid) not in ("", "Z")


def state_of(pid: int) -> str:
    """The letter that ps shows: "Z" for a zombie, "T" for a stopped process, "" for none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def children_of(pid: int) -> list[int]:
    """The processes whose parent this one is, zombies too."""
    return [child for child, parent in _parents(with_zombies=True).items() if parent == pid]


def descendants(pid: int) -> dict[int, str]:
    """Map each living process that this one has started, directly or not, to its title."""
    parents = _parents(with_zombies=False)
    found: dict[int, str] = {}
    generation = {pid}
    while generation:
        generation = {child for child, parent in parents.items() if parent in generation}
        for child in generation:
            try:
                text = Path(f"/proc/{child}/cmdline").read_text()
            except OSError:
                continue
            found[child] = text.replace("\0", " ").strip()
    return found


def _parents(with_zombies: bool) -> dict[int, int]:
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if with_zombies or state != "Z":
            parents[int(stat.parent.name)] = int(parent)
    return parents
