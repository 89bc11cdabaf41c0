"""Completion scripts: every verb, option and value, without a process per TAB."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from qfleet.cli.main import VERBS, main
from qfleet.config.config import FIELDS
from qfleet.config.recipes import PRESETS


@pytest.fixture(scope="module")
def scripts() -> dict[str, str]:
    made = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "80")
        for shell in ("bash", "zsh", "fish"):
            text = io.StringIO()
            with contextlib.redirect_stdout(text):
                assert main(["completion", shell]) == 0
            made[shell] = text.getvalue()
    return made


def complete(script: str, folder: Path, *words: str) -> list[str]:
    """Return what bash offers for the last word; no other program may be started."""
    quoted = " ".join(f"'{word}'" for word in words)
    ask = f"COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _qfleet\n"
    ask += 'printf "%s\\n" "${COMPREPLY[@]}"'
    ended = subprocess.run(
        ["/bin/bash", "-c", f"{script}\n{ask}"],
        cwd=folder,
        env={**os.environ, "PATH": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stderr == ""
    return ended.stdout.split()


def test_bash_offers_verbs_options_and_values(scripts: dict[str, str], tmp_path: Path) -> None:
    def offered(*words: str) -> list[str]:
        return complete(scripts["bash"], tmp_path, "qfleet", *words)

    assert offered("") == list(VERBS)
    assert offered("ev") == ["evaluate"]
    options = offered("train", "--")
    assert {f"--{name.replace('_', '-')}" for name in FIELDS} <= set(options)
    assert {"--overwrite", "--no-double", "--max-wall", "--seeds"} <= set(options)
    assert offered("train", "CartPole-v1", "--engine", "pi") == ["pipeline"]
    assert offered("train", "--preset", "") == [*PRESETS, "none", "list"]
    assert "rainbow" in offered("train", "--algo", "")
    assert offered("evaluate", "x", "--which", "") == ["best", "last"]
    assert offered("runs", "--s") == ["--sort"]
    assert offered("lab", "ma") == ["maze", "mapreduce"]
    assert offered("train", "--run-dir", "") == []  # then bash completes files


def test_bash_offers_runs_and_never_runs_their_names(
    scripts: dict[str, str], tmp_path: Path
) -> None:
    for name in ("first", "fifth", "$(>pwned)", "`>pwned`", "a;>pwned"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    found = complete(scripts["bash"], tmp_path, "qfleet", "resume", "fi")
    assert sorted(found) == ["fifth", "first"]
    assert len(complete(scripts["bash"], tmp_path, "qfleet", "resume", "")) == 5
    assert not (tmp_path / "pwned").exists()


def test_zsh_reads_the_script_of_bash(scripts: dict[str, str]) -> None:
    first, _, rest = scripts["zsh"].partition("\n")
    assert "bashcompinit" in first
    assert rest == scripts["bash"]


@pytest.mark.skipif(shutil.which("zsh") is None, reason="needs zsh")
def test_zsh_offers_runs(scripts: dict[str, str], tmp_path: Path) -> None:
    for name in ("first", "fifth", "$(>pwned)"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    # Words as bashcompinit's _bash_complete gives them.
    ask = "setopt ksharrays; COMP_WORDS=(qfleet resume fi); COMP_CWORD=2; PREFIX=fi; _qfleet"
    text = f"autoload -U compinit && compinit -D\n{scripts['zsh']}\n{ask}"
    command = ["zsh", "-f", "-c", f'{text}; print -l "${{COMPREPLY[@]}}"']
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert sorted(ended.stdout.split()) == ["fifth", "first"]
    assert not (tmp_path / "pwned").exists()


def test_fish_gets_one_line_per_option(scripts: dict[str, str]) -> None:
    lines = scripts["fish"].splitlines()
    assert all(line.startswith("complete -c qfleet -n ") for line in lines)
    verbs = [re.search(r"__fish_use_subcommand -x -a (\w+)", line) for line in lines]
    assert [found[1] for found in verbs if found] == list(VERBS)
    for name in FIELDS:
        option = f" -l {name.replace('_', '-')}"
        assert any("from train'" in line and f"{line} ".find(f"{option} ") > 0 for line in lines)
    assert "complete -c qfleet -n '__fish_seen_subcommand_from train' -l track -x -a " in "\n".join(
        lines
    )
    # Quotes are balanced.
    assert all(len(re.findall(r"(?<!\\)'", line)) % 2 == 0 for line in lines)


def test_another_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "tcsh"]) == 2
    assert "tcsh" in capsys.readouterr().err
