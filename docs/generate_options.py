"""Write docs/options.md from qfleet/config/config.py: every field, its default and its docstring.

In: the source of ``Config`` (a docstring only exists there) and its defaults. Out: one Markdown
table per section. Run it after a change: ``python docs/generate_options.py``.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import re
from pathlib import Path
from typing import Any, NamedTuple

from qfleet.cli.parsing import ALIASES
from qfleet.config import config as config_module
from qfleet.config.algorithms import ALGORITHMS

TARGET = Path(__file__).with_name("options.md")

HEAD = """# Every option of an experiment

Made by `python docs/generate_options.py` from the docstrings in `qfleet/config/config.py`.
Do not edit.

Each row is a field of `qfleet.Config`, a keyword argument of `qfleet.train` and, with dashes, an
option of `qfleet train`: `learning_rate` is `--learning-rate`. The defaults are those of
`--preset none`; the preset that suits an environment sets some of them (`qfleet train --preset
list`), and so does the algorithm's row ([algorithms](algorithms/README.md)).
A switch is turned off by `--no-…`, as in `--no-double`.
"""


class Option(NamedTuple):
    section: str
    name: str
    kind: str
    default: Any
    text: str


def read_options() -> list[Option]:
    """The fields in the order of the source, each under the comment line that heads its section."""
    source = inspect.getsource(config_module)
    headings = {
        number: match[1]
        for number, line in enumerate(source.splitlines(), 1)
        if (match := re.match(r"\s*# --- (.+?) -+$", line))
    }
    (body,) = (
        node.body
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.name == "Config"
    )
    defaults = config_module.Config()
    options = []
    for field, after in itertools.pairwise(body):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        if not isinstance(after, ast.Expr) or not isinstance(after.value, ast.Constant):
            raise ValueError(f"field {field.target.id} has no docstring")
        section = headings[max(number for number in headings if number < field.lineno)]
        name = field.target.id
        kind = ast.unparse(field.annotation)
        text = " ".join(str(after.value.value).split())
        options.append(Option(section, name, kind, getattr(defaults, name), text))
    return options


def render() -> str:
    other_names: dict[str, list[str]] = {}
    for alias, option in ALIASES.items():
        other_names.setdefault(option.removeprefix("--").replace("-", "_"), []).append(alias)
    parts, section = [HEAD], ""
    for option in read_options():
        if option.section != section:
            section = option.section
            title = section[0].upper() + section[1:]
            parts.append(f"\n## {title}\n\n| field | default | what it does |\n|---|---|---|\n")
        text = option.text + _choices(option.kind)
        if option.name in other_names:
            text += " Also understood: " + ", ".join(f"`{a}`" for a in other_names[option.name])
            text += "."
        if option.name == "algo":
            text += " Rows: " + ", ".join(f"`{row}`" for row in ALGORITHMS) + "."
        parts.append(f"| `{option.name}` | `{_shown(option.default)}` | {_escape(text)} |\n")
    return "".join(parts)


def _choices(kind: str) -> str:
    if kind == "Head":
        kind = repr(config_module.Head)
    choices = re.findall(r"'([^']+)'", kind) if "Literal" in kind else []
    return " One of " + ", ".join(f"`{choice}`" for choice in choices) + "." if choices else ""


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(map(str, value)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None or value == "":
        return "none"
    return f"{value:,}".replace(",", "_") if isinstance(value, int) else str(value)


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace(">", "&gt;")


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
    print(TARGET)
