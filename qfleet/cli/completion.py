"""``qfleet completion``: print a script with which a shell completes verbs, options and values.

The script holds every word, so that a TAB starts no Python; print it again after an update.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
from dataclasses import dataclass
from typing import Literal

import tyro

from qfleet.cli.data import ACTIONS
from qfleet.cli.parsing import parse
from qfleet.config.algorithms import ALGORITHMS
from qfleet.config.recipes import PRESETS

HELP = "print a completion script for bash, zsh or fish"

DESCRIPTION = """Print a script that completes qfleet's verbs, options and values.

Examples:
  eval "$(qfleet completion bash)"        (in ~/.bashrc; zsh alike, in ~/.zshrc after compinit)
  qfleet completion fish > ~/.config/fish/completions/qfleet.fish
"""

OF_RUNS = (
    "resume", "scale", "evaluate", "plot", "report", "watch", "video", "export", "push", "serve",
)  # fmt: skip
"""Verbs whose argument is a run."""
ARGUMENTS = {
    "data": " ".join(ACTIONS),
    "lab": "compare maze mapreduce speedup",
    "completion": "bash zsh fish",
}
VALUES = {"--preset": " ".join((*PRESETS, "none", "list")), "--algo": " ".join(ALGORITHMS)}
"""Values of options that --help does not list."""
_OPTION = re.compile(r"(?m)^[│ ] +(?:-h, )?(--[\w-]+)(?:, (--[\w-]+))?(?: (\S+))?")

_BASH = r"""_qfleet() {
  local cur="${COMP_WORDS[COMP_CWORD]}" prev="${COMP_WORDS[COMP_CWORD-1]}" words=
  COMPREPLY=()
  case "$prev" in
VALUES
  esac
  [ -n "$words" ] || case "${COMP_WORDS[1]}:$cur" in
OPTIONS
    RUNS)  # not by -W, which would run $(...) in the name of a folder
      # -G and not -d, for which zsh ignores the folder
      COMPREPLY=($(compgen -G "runs/$cur*/")); COMPREPLY=("${COMPREPLY[@]#runs/}")
      COMPREPLY=("${COMPREPLY[@]%/}")
      return ;;
  esac
  [ "$COMP_CWORD" -ne 1 ] || words='VERBS'
  COMPREPLY=($(compgen -W "$words" -- "$cur"))
}
complete -o default -F _qfleet qfleet"""


@dataclass(frozen=True)
class CompletionOptions:
    shell: tyro.conf.Positional[Literal["bash", "zsh", "fish"]]
    """Shell that reads the script."""


def run(argv: list[str]) -> int:
    shell = parse(CompletionOptions, argv, "completion", DESCRIPTION).shell
    from qfleet.cli.main import VERBS

    os.environ["COLUMNS"] = "100"  # of the help that is read below: one column of options
    options = {verb: read_options(verb) for verb in VERBS}
    if shell == "zsh":
        print("autoload -U +X bashcompinit && bashcompinit")
    print(_fish(options) if shell == "fish" else _bash(options))
    return 0


def read_options(verb: str) -> dict[str, str | None]:
    """Return option → its values, "" if they are not listed, None for a switch.

    They are read from the help of the verb; of ``lab`` and ``data``, from that of their parts.
    """
    run_verb, text = importlib.import_module(f"qfleet.cli.{verb}").run, io.StringIO()
    flag = "--help-all" if verb in ("train", "profile") else "--help"
    for words in ARGUMENTS[verb].split() if verb in ("lab", "data") else [""]:
        with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
            run_verb([*words.split(), flag])
    found: dict[str, str | None] = {}
    for name, negated, value in _OPTION.findall(text.getvalue()):
        choices = "" if "|" in value else " ".join(re.findall(r"[{,](?!None)([^,}]+)", value))
        found[name] = VALUES.get(name, choices) if value else None
        found |= {negated: None} if negated else {}
    return found


def _bash(options: dict[str, dict[str, str | None]]) -> str:
    # The values that train has win over those of other verbs.
    values = {name: v for found in reversed(options.values()) for name, v in found.items() if v}
    cases = [f"    {verb}:-*) words='{' '.join(found)}' ;;" for verb, found in options.items()]
    cases += [f"    {verb}:*) words='{words}' ;;" for verb, words in ARGUMENTS.items()]
    script = _BASH.replace("VERBS", " ".join(options)).replace("OPTIONS", "\n".join(cases))
    script = script.replace("RUNS", "|".join(f"{verb}:*" for verb in OF_RUNS))
    return script.replace(
        "VALUES", "\n".join(f"    {n}) words='{v}' ;;" for n, v in values.items())
    )


def _fish(options: dict[str, dict[str, str | None]]) -> str:
    lines = []
    for verb, found in options.items():
        text = importlib.import_module(f"qfleet.cli.{verb}").HELP.replace("'", "\\'")
        lines.append(f"complete -c qfleet -n __fish_use_subcommand -x -a {verb} -d '{text}'")
        seen = f"complete -c qfleet -n '__fish_seen_subcommand_from {verb}'"
        for name, values in found.items():
            takes = "" if values is None else f" -x -a '{values}'" if values else " -r"
            lines.append(f"{seen} -l {name[2:]}{takes}")
        if verb in OF_RUNS or verb in ARGUMENTS:
            names = ARGUMENTS.get(verb, "(command ls runs 2>/dev/null)")
            lines.append(f"{seen} -a '{names}'")
    return "\n".join(lines)
