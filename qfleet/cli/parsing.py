"""Parsing shared by the verbs: tyro with one-line errors, aliases of options, durations."""

from __future__ import annotations

import contextlib
import io
import re
import sys
import typing
from collections.abc import Callable
from typing import Any, TypeVar

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from qfleet.config.words import ALIASES, parse_whole
from qfleet.core.errors import UserError

T = TypeVar("T")

_OPTION_ALIASES = {**ALIASES, "exp_name": "name"}
"""Option names of other libraries → ours, without dashes; a name is no field of Config."""

_REGISTRY = ConstructorRegistry()


@_REGISTRY.primitive_rule
def _whole_numbers(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    """Let options that are whole numbers take ``1e6`` and ``50k``, and lists of them ``64,64``."""
    is_list = typing.get_args(info.type) == (int, ...)
    if info.type is not int and not is_list:
        return None

    def read(words: list[str]) -> Any:
        if not is_list:
            return parse_whole(words[0])
        return tuple(parse_whole(number) for word in words for number in word.split(","))

    return PrimitiveConstructorSpec(
        nargs="*" if is_list else 1,
        metavar="[INT [INT ...]]" if is_list else "INT",
        instance_from_str=read,
        is_instance=lambda value: isinstance(value, tuple if is_list else int),
        str_from_instance=lambda value: [str(n) for n in (value if is_list else [value])],
    )


def parse(
    target: Callable[..., T], argv: list[str], verb: str, description: str, **options: Any
) -> T:
    """Call tyro.cli; examples end the help, and an error is a UserError of one line, not a box."""
    description, _, examples = description.partition("Examples:")
    stderr = io.StringIO()
    is_usage = False
    try:
        with contextlib.redirect_stderr(stderr):
            parsed: T = tyro.cli(
                target,
                args=spell(argv),
                prog=f"qfleet {verb}",
                # tyro joins lines, except those that begin with a space.
                description=" " + re.sub(r"\n+", "\n ", description.strip()),
                registry=_REGISTRY,
                **options,
            )
        return parsed
    except SystemExit as exit_:
        if exit_.code == 0:
            print(f"Examples:{examples}", end="")
        if not exit_.code:
            raise
        is_usage = True
        raise UserError(_one_line(stderr.getvalue(), verb)) from None
    finally:
        if not is_usage and (lines := stderr.getvalue()):
            sys.stderr.write(lines)  # of a verb that is a function: tyro has called it


def spell(argv: list[str]) -> list[str]:
    """Replace underscores by dashes and aliases by our names, in option names only."""
    words, spellings = [], dict[str, str]()
    for word in argv:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            name = name.replace("_", "-")
            own = _OPTION_ALIASES.get(name[2:].replace("-", "_"), name[2:]).replace("_", "-")
            if spellings.setdefault(own, name) != name:
                raise UserError(f"{spellings[own]} and {name} are the same option; give one")
            word = f"--{own}{equals}{value}"
        words.append(word)
    return _gather(_gather(words, "--imports"), "--wrappers")


def _gather(argv: list[str], option: str) -> list[str]:
    """Return the words with all values of a repeatable option behind its only occurrence."""
    values, others, takes_values = list[str](), list[str](), False
    for word in argv:
        if word.startswith("-"):
            takes_values = word.partition("=")[0] == option
        if takes_values:
            values += word.split("=", 1)[1:] if word.startswith("-") else [word]
        else:
            others.append(word)
    return [*others, option, *values] if len(others) < len(argv) else argv


ELSEWHERE = {
    "--capture-video": "qfleet video RUN",
    "--cuda": "--device cuda or --device cpu",
    "--save-model": "qfleet export RUN; every run keeps its policies",
    "--tensorboard-log": "--run-dir FOLDER, where TensorBoard's files are",
    "--torch-deterministic": "--seed N alone",
    "--verbose": "--quiet, or leave it out",
    "--wandb-project-name": "--track wandb",
}
"""Options of CleanRL and Stable-Baselines3's zoo → what to use here."""


def _one_line(text: str, verb: str) -> str:
    """Return the error that tyro prints, and the option that it suggests, without the box.

    The box is a title, a rule, the error, a rule, suggestions …; on a UTF-8 terminal the title is
    part of the upper border.
    """
    plain = re.sub(r"\x1b\[[0-9;]*m|[│╭╮╰╯]", " ", text)
    sections = [" ".join(part.split()) for part in re.split(r"(?m)^ *(?:─|---).*$", plain)]
    error, advice, *_ = *sections[1:], "cannot parse", ""
    suggested = re.match(r"Perhaps you meant: (--[\w-]+)", advice)
    words = set(re.findall(r"--[\w-]+", error))
    if suggested and suggested[1] not in words:
        error += f"; did you mean {suggested[1]}?"
    for option in words & ELSEWHERE.keys():
        error += f"; instead of {option} use {ELSEWHERE[option]}"
    return f"{error} (see qfleet {verb} --help)"


def parse_duration(text: str) -> float:
    """Parse ``90``, ``90s``, ``30m``, ``1h30m`` or ``2d`` into seconds."""
    match = re.fullmatch(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+(?:\.\d+)?)s?)?", text.strip())
    if not text.strip() or match is None:
        raise UserError(f"'{text}' is not a duration; write e.g. 90s, 30m or 1h30m")
    days, hours, minutes, seconds = (float(group or 0) for group in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
