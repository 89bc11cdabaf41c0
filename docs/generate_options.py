"""Write docs/options.md: every field of Config, its default, its range and its docstring.

In: the metadata, defaults and docstrings of ``Config``. Out: one Markdown table per group. Run it
after a change: ``python docs/generate_options.py``.
"""

from __future__ import annotations

import typing
from pathlib import Path
from typing import Any

from qfleet.config.algorithms import ALGORITHMS
from qfleet.config.config import FIELDS, OPTIONS, Config, Group, read_docstrings
from qfleet.config.words import ALIASES

TARGET = Path(__file__).with_name("options.md")

HEAD = """# Every option of an experiment

Made by `python docs/generate_options.py` from `qfleet/config/config.py`. Do not edit.

Each row is a field of `qfleet.Config`, a keyword argument of `qfleet.train` and, with dashes, an
option of `qfleet train`: `learning_rate` is `--learning-rate`. A switch is turned off by `--no-…`,
as in `--no-double`. The groups are those of `qfleet train --help-all`; `--help` shows the fields in
bold. The defaults are those of `--preset none`; the preset that suits an environment sets some of
them (`qfleet train --preset list`), and so does the algorithm's row
([algorithms](algorithms/README.md)).
"""


def render() -> str:
    docstrings, defaults, parts = read_docstrings(), Config(), [HEAD]
    for group in typing.get_args(Group):
        parts.append(f"\n## {group.capitalize()}\n\n| field | default | allowed | what it does |\n")
        parts.append("|---|---|---|---|\n")
        for name in (name for name in OPTIONS if OPTIONS[name].group == group):
            field = f"**`{name}`**" if OPTIONS[name].common else f"`{name}`"
            cells = (field, f"`{_shown(getattr(defaults, name))}`", _allowed(name))
            text = docstrings[name].replace("<", "&lt;").replace(">", "&gt;")
            parts.append(f"| {' | '.join(cells)} | {text}{_other_names(name)} |\n")
    return "".join(parts)


def _allowed(name: str) -> str:
    if name == "algo":
        return ", ".join(f"`{row}`" for row in ALGORITHMS)
    if typing.get_origin(FIELDS[name]) is typing.Literal:
        return ", ".join(f"`{choice}`" for choice in typing.get_args(FIELDS[name]))
    return ", ".join(f"{sign} {bound:g}" for sign, bound in OPTIONS[name].bounds.items())


def _other_names(name: str) -> str:
    aliases = (alias for alias, own in ALIASES.items() if own == name)
    names = ", ".join(f"`--{alias.replace('_', '-')}`" for alias in aliases)
    return f" Also understood: {names}." if names else ""


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(map(str, value)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None or value == "":
        return "none"
    return f"{value:_}" if isinstance(value, int) else str(value)


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
    print(TARGET)
